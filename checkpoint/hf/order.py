"""The order of tensors in the state dicts of ``transformers``, which is that of the modules: by it shards are filled."""

from __future__ import annotations

import re

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


def module_order(name: str) -> tuple[int, int, int, int]:
    """A key to sort the tensors of one model by: the order of the modules, in each the weight, its scales, the bias."""
    match = _NAME.fullmatch(name)
    assert match is not None, f"no parameter of a known family: {name}"
    layer, module, kind = match.groups()
    if layer is None:
        return _MODEL.index(module), 0, 0, _KINDS.index(kind)
    return _MODEL.index("layers"), int(layer), _LAYER.index(module), _KINDS.index(kind)
