"""Megatron-LM's checkpoints: reading both layouts (``torch_dist``, and ``mp_rank`` folders), and writing them."""

from __future__ import annotations
