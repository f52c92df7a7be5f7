"""TorchTitan with our pipelines and FP8 linears.

    torchrun … -m torchtitan.train --module qeffect_lm.integrations.torchtitan --config llama3_debugmodel_qeffect

Needs torchtitan (``pip install 'qeffect-lm[titan]'``), which nothing here imports before it is asked for.
"""
