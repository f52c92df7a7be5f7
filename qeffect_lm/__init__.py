"""QEffect LM: FP8 pipeline training of language models under an explicit state and resource contract.

Importing this package imports neither torch nor any optional dependency.
"""

__version__ = "0.1.0"
