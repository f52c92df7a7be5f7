"""Ground truth by exhaustion: small programs over virtual streams, executed in every interleaving that their edges allow.

The contract's ledger decides with clocks and counters whether a program is sound. This package decides the same question
without any of that: it runs the program in all orders and looks at what happened. It imports nothing of
:mod:`qeffect_lm.contract`, so that the two can be compared.

:mod:`~qeffect_lm.modelcheck.explore` is the generic core, :mod:`~qeffect_lm.modelcheck.program` the vocabulary of programs,
:mod:`~qeffect_lm.modelcheck.storage` what their actions do to stored values, :mod:`~qeffect_lm.modelcheck.verdict` the answer.
"""
