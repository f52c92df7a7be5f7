"""What a model is, in one record: every choice settled that a model section or a ``config.json`` may leave open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from qeffect_lm.config_model import ROPE_KEYS
from qeffect_lm.errors import UsageError

# What model keys that are null mean, per family; a test compares it with the families themselves.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": "none", "mlp_bias": False, "qk_norm": False, "activation": "silu"},
    "mistral": {"attention_bias": "none", "mlp_bias": False, "qk_norm": False, "activation": "silu"},
    "mixtral": {"attention_bias": "none", "mlp_bias": False, "qk_norm": False, "activation": "silu"},
    "qwen2": {"attention_bias": "qkv", "mlp_bias": False, "qk_norm": False, "activation": "silu"},
    "qwen3": {"attention_bias": "none", "mlp_bias": False, "qk_norm": True, "activation": "silu"},
    "gpt2": {"attention_bias": "all", "mlp_bias": True, "qk_norm": False, "activation": "gelu_new"},
}


@dataclass(frozen=True)
class Description:
    """A model of one of :data:`FAMILIES`. Names are those of the model section.

    Attributes:
        rope_scaling: ``type`` and the parameters that are set; ``{"type": "none"}`` without a scaling.
        num_experts, top_k: ``model.moe``'s; None in a family without experts.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    activation: str
    attention_bias: str
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_window_layers: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any]
    norm_eps: float
    tie_word_embeddings: bool
    num_experts: int | None = None
    top_k: int | None = None

    def section(self, **more: Any) -> dict[str, Any]:
        """The model section that says this, ready for a configuration; ``more``: keys that describe no function."""
        section = {field.name: getattr(self, field.name) for field in fields(self)}
        section["rope_scaling"] = dict(self.rope_scaling)
        experts = {key: section.pop(key) for key in ("num_experts", "top_k")}
        if self.num_experts is not None:
            section["moe"] = experts
        for key, usual in FAMILIES[self.family].items():
            if section[key] == usual:
                del section[key]
        return section | more


def describe(section: Mapping[str, Any], seq_len: int | None = None) -> Description:
    """The model of a ``model`` section (of a manifest, or written by hand).

    Args:
        seq_len: ``data.seq_len``, the context of a section without ``max_position_embeddings``.

    Raises:
        UsageError: a family that Hugging Face's names are not known for, or no context.
    """
    family = str(section.get("family", "llama"))
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UsageError(f"model.family {family!r}: Hugging Face's names are known for {known}")
    settled = {key: _given(section, key, usual) for key, usual in FAMILIES[family].items()}
    context = _given(section, "max_position_embeddings", seq_len)
    if context is None:
        raise UsageError("model.max_position_embeddings is null: give it, or data.seq_len")
    hidden, heads = section["hidden_size"], section["num_heads"]
    scaling = dict(section.get("rope_scaling") or {})
    kind = scaling.pop("type", "none")
    needed, optional = ROPE_KEYS[kind]
    kept = {key: scaling[key] for key in (*needed, *optional) if scaling.get(key) is not None}
    window = section.get("sliding_window")
    if family == "mixtral":
        settled |= _experts(section.get("moe") or {})
    return Description(
        family=family,
        vocab_size=section["vocab_size"],
        hidden_size=hidden,
        num_layers=section["num_layers"],
        num_heads=heads,
        num_kv_heads=section["num_kv_heads"],
        head_dim=_given(section, "head_dim", hidden // heads),
        ffn_size=section["ffn_size"],
        sliding_window=window,
        max_window_layers=0 if window is None else _given(section, "max_window_layers", 0),
        max_position_embeddings=context,
        rope_theta=float(section.get("rope_theta", 10000.0)),
        rope_scaling={"type": kind} | {key: _plain(value) for key, value in kept.items()},
        norm_eps=float(section.get("norm_eps", 1e-5)),
        tie_word_embeddings=bool(section.get("tie_word_embeddings", False)),
        **settled,
    )


def _experts(moe: Mapping[str, Any]) -> dict[str, Any]:
    if moe.get("num_experts") is None:
        raise UsageError("model.moe.num_experts is null: family mixtral needs it")
    if moe.get("norm_top_k") is False:
        raise UsageError("model.moe.norm_top_k false: Hugging Face's Mixtral divides the weights of experts by their sum")
    return {"num_experts": moe["num_experts"], "top_k": _given(moe, "top_k", 2)}


def _given(section: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = section.get(key)
    return otherwise if value is None else value


def _plain(value: Any) -> Any:
    """Numbers as one type, so that 8 and 8.0 agree."""
    if isinstance(value, (list, tuple)):
        return tuple(float(item) for item in value)
    return float(value) if isinstance(value, float) else value
