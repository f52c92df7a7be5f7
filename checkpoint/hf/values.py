"""Whether a value of a ``config.json`` is of the kind that its key stands for: JSON's types are the writer's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from qeffect_lm.errors import UsageError

LIMIT = 2**31  # above any size, length or count


def is_size(value: Any) -> bool:
    """A whole number from 1 on; true is none."""
    return type(value) is int and 0 < value < LIMIT


def is_count(value: Any) -> bool:
    """A whole number from 0 on."""
    return type(value) is int and 0 <= value < LIMIT


def is_number(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """True or false; 1 and 0 are numbers."""
    return type(value) is bool


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_SAID: Mapping[Callable[[Any], bool], str] = {
    is_size: "a whole number from 1 on",
    is_count: "a whole number from 0 on",
    is_number: "a finite number",
    is_flag: "true or false",
    _words: "a list of names",
}
# By our names of what a key says, and by theirs for keys that have no counterpart.
_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "ffn_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"), is_size),
    **dict.fromkeys(("max_position_embeddings", "sliding_window", "original_max_position_embeddings"), is_size),
    **dict.fromkeys(("num_experts", "top_k"), is_size),
    "aux_loss_coef": is_number,
    "max_window_layers": is_count,
    **dict.fromkeys(("norm_eps", "init_std", "rope_theta", "partial_rotary_factor", "factor", "attention_factor"), is_number),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"), is_number),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "truncate"), is_flag),
    **dict.fromkeys(("architectures", "layer_types"), _words),
}
_TYPES: Mapping[str, tuple[type, str]] = {
    "activation": (str, "a name"),
    "rope_type": (str, "a name"),
    "type": (str, "a name"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
}


def check_values(config: Mapping[str, Any], names: Mapping[str, str], inside: str = "") -> None:
    """Every value of a known key is of its kind, or null (which is as if the key were absent).

    Args:
        names: their key → what it says by our name, where that is another.
        inside: the key whose object ``config`` is.

    Raises:
        UsageError: names the first key that is not.
    """
    for key, value in config.items():
        name = names.get(key, key)
        if value is None:
            continue
        if name in ("short_factor", "long_factor"):
            fits, said = isinstance(value, list) and all(map(is_number, value)), "a list of finite numbers"
        elif name in _TYPES:
            kind, said = _TYPES[name]
            fits = isinstance(value, kind)
        elif name in _KINDS:
            fits, said = _KINDS[name](value), _SAID[_KINDS[name]]
        else:
            continue
        if not fits:
            shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}…"
            raise UsageError(f"{inside + '.' if inside else ''}{key} = {shown}: {said} is needed")
