"""The order of tensors in the state dicts of ``transformers``, which is that of the modules: by it shards are filled.

A state dict whose tensors it renames or cuts while it saves is sorted by name instead. Those are the ones with experts, which
it has stacked in memory: all experts' w1 of a layer are parts of one tensor, and go into one shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    # gpt2
    "ln_1",
    "attn.c_attn",
    "attn.c_proj",
    "ln_2",
    "mlp.c_fc",
    "mlp.c_proj",
)
_MODEL = ("embed_tokens", "wte", "wpe", "layers", "norm", "ln_f", "lm_head")
_KINDS = ("weight", "weight_scale_inv", "activation_scale", "bias")
_NAME = re.compile(rf"(?:(?:model|transformer)\.)?(?:(?:layers|h)\.(\d+)\.)?(.+)\.({'|'.join(_KINDS)})")


_EXPERT = re.compile(r"(.+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight(_scale_inv)?")
_STACKED = {"w1": ("gate_up_proj", 0), "w2": ("down_proj", 0), "w3": ("gate_up_proj", 1)}


def units(names: Iterable[str]) -> list[list[str]]:
    """The tensors of one model in order; those of one list lie in one shard."""
    names = list(names)
    if not any(".block_sparse_moe." in name for name in names):
        return [[name] for name in sorted(names, key=module_order)]
    ordered = groupby(sorted(names, key=_stacked_order), key=lambda name: _stacked_order(name)[:2])
    return [list(unit) for _, unit in ordered]


def _stacked_order(name: str) -> tuple[list[tuple[bool, int, str]], int, int]:
    """The name in memory, which half of a stack, which expert."""
    match, half, expert = _EXPERT.fullmatch(name), 0, 0
    if match is not None:
        kind, half = _STACKED[match[3]]
        name, expert = f"{match[1]}.mlp.experts.{kind}{match[4] or ''}", int(match[2])
    parts = name.replace(".block_sparse_moe.", ".mlp.").split(".")
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts], half, expert


def module_order(name: str) -> tuple[int, int, int, int]:
    """A key to sort the tensors of one model by: the order of the modules, in each the weight, its scales, the bias."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"no parameter of a known family: {name}"
    layer, module, kind = match.groups()
    if layer is None:
        return _MODEL.index(module), 0, 0, _KINDS.index(kind)
    return _MODEL.index("layers"), int(layer), _LAYER.index(module), _KINDS.index(kind)
