"""``config.json`` ↔ the model section, in both directions, for the families of :mod:`checkpoint.hf.description`.

A key is read, or known to say nothing about the function that the weights compute, or refused by name. Rope parameters come
under the newer key (``rope_parameters``) or the older two (``rope_theta``, ``rope_scaling``); where both are there they must
agree. The reference for keys and defaults is ``transformers``' configuration classes and ``modeling_rope_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.hf.description import FAMILIES, Description, describe
from checkpoint.hf.values import check_values
from qeffect_lm.config_model import ROPE_KEYS
from qeffect_lm.errors import UsageError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# Ours ← theirs, with what an absent key means (None: it must be there; DERIVED: it follows from others).
DERIVED = object()
_LLAMA: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", None),
    "hidden_size": ("hidden_size", None),
    "ffn_size": ("intermediate_size", None),
    "num_layers": ("num_hidden_layers", None),
    "num_heads": ("num_attention_heads", None),
    "num_kv_heads": ("num_key_value_heads", DERIVED),
    "head_dim": ("head_dim", DERIVED),
    "activation": ("hidden_act", "silu"),
    "max_position_embeddings": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "init_std": ("initializer_range", 0.02),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
_OTHERS = _LLAMA | {"max_position_embeddings": ("max_position_embeddings", None)}
_QWEN = {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "llama": _LLAMA,
    "mistral": _OTHERS,
    "mixtral": _OTHERS
    | {
        "max_position_embeddings": ("max_position_embeddings", 131072),
        "norm_eps": ("rms_norm_eps", 1e-5),
        "num_experts": ("num_local_experts", 8),
        "top_k": ("num_experts_per_tok", 2),
        "aux_loss_coef": ("router_aux_loss_coef", 0.001),
    },
    "qwen2": _OTHERS,
    "qwen3": _OTHERS | {"head_dim": ("head_dim", 128)},
    "gpt2": {
        "vocab_size": ("vocab_size", None),
        "hidden_size": ("n_embd", None),
        "ffn_size": ("n_inner", DERIVED),
        "num_layers": ("n_layer", None),
        "num_heads": ("n_head", None),
        "activation": ("activation_function", "gelu_new"),
        "max_position_embeddings": ("n_positions", 1024),
        "norm_eps": ("layer_norm_epsilon", 1e-5),
        "init_std": ("initializer_range", 0.02),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32}  # where the key is absent
# Keys besides those that a family reads.
_MORE: dict[str, set[str]] = {
    "llama": {"attention_bias", "mlp_bias"},
    "mistral": {"sliding_window"},
    "mixtral": {"sliding_window"},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"attention_bias"},
    "gpt2": set(),
}
_ALIASES = {  # other names of gpt2's keys
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "n_ctx": "n_positions",
}
# They must have this value where they are there: with another one the model computes something else.
_FIXED: dict[str, Any] = {
    "pretraining_tp": 1,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "partial_rotary_factor": 1.0,
    "use_mrope": False,
    "chunk_size_feed_forward": 0,
    "router_jitter_noise": 0.0,
}
_TRAINING = ("init_std", "aux_loss_coef")  # keys of ours that say nothing about the function
_THETA = {"mixtral": 1e6}  # where no key gives one; else 10,000
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
_DROPOUT = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
# About files, generation, training or classification: they travel with the original config.json and say nothing about ours.
_IGNORED = {
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attn_implementation", "auto_map", "begin_suppress_tokens", "bos_token_id", "cross_attention_hidden_size",
    "decoder_start_token_id", "dtype", "eos_token_id", "experts_implementation", "finetuning_task", "id2label",
    "is_decoder", "label2id", "model_type", "num_labels", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id",
    "prefix", "problem_type", "return_dict", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a ``config.json`` says.

    Attributes:
        section: the ``model`` section, without nulls.
        notes: what was left out of it, for the user to read.
    """

    section: dict[str, Any]
    notes: tuple[str, ...]


def model_section(config: Mapping[str, Any]) -> Found:
    """The model section of a parsed ``config.json``.

    Raises:
        UsageError: a model type or key that is not known, keys that disagree, a feature that our layers do not have; names the
            key.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise UsageError(f"model_type {family[:60]!r}: the known ones are {', '.join(FAMILIES)}")
    config = _canonical(family, config)
    read = {theirs for theirs, _ in KEYS[family].values()} | _MORE[family] | (_ROPE if family != "gpt2" else set())
    unknown = sorted(set(config) - read - _FIXED.keys() - _IGNORED - set(_DROPOUT))
    if unknown:
        key = unknown[0]
        raise UsageError(f"{key} = {config[key]!r} is not known for model_type {family}: what it changes would be lost")
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) not in (wanted, None):
            raise UsageError(f"{key} = {config[key]!r}: only {wanted!r} is supported")
    check_values(config, {theirs: ours for ours, (theirs, _) in KEYS[family].items()})
    _check_architecture(family, config)
    values = {ours: _value(config, theirs, absent) for ours, (theirs, absent) in KEYS[family].items()}
    if values.get("top_k", 1) > values.get("num_experts", 1):
        of = f"num_experts_per_tok = {values['top_k']} and num_local_experts = {values['num_experts']}"
        raise UsageError(f"{of}: a token cannot take more experts than there are")
    if "num_key_value_heads" not in config:  # null is another thing: as many as there are heads
        values["num_kv_heads"] = _KV_HEADS.get(family)
    values["num_kv_heads"] = values.get("num_kv_heads") or values["num_heads"]
    values["ffn_size"] = values["ffn_size"] or 4 * values["hidden_size"]
    values["head_dim"] = values.get("head_dim") or _head_dim(values)
    training = {key: float(values.pop(key)) for key in _TRAINING if key in values}
    values |= {**FAMILIES[family], "activation": _activation(family, values["activation"])}
    if "attention_bias" in _MORE[family]:
        values["attention_bias"] = "all" if config.get("attention_bias") else "none"
    if "mlp_bias" in _MORE[family]:
        values["mlp_bias"] = bool(config.get("mlp_bias"))
    window, full = _window(family, config, values["num_layers"])
    theta, scaling = (10000.0, {"type": "none"}) if family == "gpt2" else _rope(
        config, values["max_position_embeddings"], _THETA.get(family, 10000.0)
    )
    found = Description(
        family=family, sliding_window=window, max_window_layers=full, rope_theta=theta, rope_scaling=scaling, **values
    )
    given = [key for key in _DROPOUT if config.get(key)]
    dropped = [f"{key} {config[key]}: dropout is a setting of training; model.dropout is 0" for key in given]
    section = found.section(init_std=training["init_std"])
    if "aux_loss_coef" in training:
        section["moe"]["aux_loss_coef"] = training["aux_loss_coef"]
    return Found(section, tuple(dropped))


def config_json(
    section: Mapping[str, Any], original: Mapping[str, Any] | None = None, *, seq_len: int | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a model section.

    Args:
        original: the one that the model came with: its other keys are kept, and if it describes this very model it is
            given back as it is.
        seq_len: as of :func:`describe`.

    Raises:
        UsageError: a family without a counterpart.
    """
    wanted = describe(section, seq_len)
    if original is not None and describe(model_section(original).section) == wanted:
        return dict(original)
    kept = {} if original is None else {k: v for k, v in original.items() if k not in _ROPE | _ALIASES.keys() | _QWEN}
    made: dict[str, Any] = {"architectures": [ARCHITECTURES[wanted.family]], "model_type": wanted.family}
    for ours, (theirs, _) in KEYS[wanted.family].items():
        made[theirs] = _setting(section, ours) if ours in _TRAINING else getattr(wanted, ours)
    if "attention_bias" in _MORE[wanted.family]:
        made["attention_bias"] = wanted.attention_bias == "all"
    if "mlp_bias" in _MORE[wanted.family]:
        made["mlp_bias"] = wanted.mlp_bias
    if wanted.family == "gpt2":
        dropout = float(section.get("dropout", 0.0))
        made |= {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
    else:
        made |= _window_keys(wanted) | _rope_keys(wanted)
    return kept | made


# ---- pieces ----------------------------------------------------------------------------------------------------


def _setting(section: Mapping[str, Any], key: str) -> float:
    """A setting of training that their configurations hold, too."""
    given = section.get("init_std") if key == "init_std" else section.get("moe", {}).get(key)
    return {"init_std": 0.02, "aux_loss_coef": 0.001}[key] if given is None else float(given)


def _canonical(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """gpt2's other names under one."""
    if family != "gpt2":
        return dict(config)
    found = {key: value for key, value in config.items() if key not in _ALIASES}
    for alias, name in _ALIASES.items():
        if alias in config and found.setdefault(name, config[alias]) != config[alias]:
            raise UsageError(f"{alias} = {config[alias]!r} and {name} = {found[name]!r} are one thing and disagree")
    return found


def _value(config: Mapping[str, Any], key: str, absent: Any) -> Any:
    value = config.get(key)
    if value is None and absent is not DERIVED:
        value = absent
        if value is None:
            raise UsageError(f"config.json has no {key}")
    return value


def _head_dim(values: Mapping[str, Any]) -> int:
    hidden, heads = values["hidden_size"], values["num_heads"]
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} is not divisible by the number of heads {heads}, and head_dim is not given")
    return int(hidden // heads)


def _check_architecture(family: str, config: Mapping[str, Any]) -> None:
    given = config.get("architectures")
    if given and list(given) != [ARCHITECTURES[family]]:
        raise UsageError(f"architectures = {given[:3]!r}: {ARCHITECTURES[family]} is supported for model_type {family}")


def _activation(family: str, name: str) -> str:
    known = {"gelu_pytorch_tanh": "gelu_new"}.get(name, name)
    allowed = ("gelu_new", "gelu", "relu", "silu") if family == "gpt2" else ("silu",)
    if known not in allowed:
        key = KEYS[family]["activation"][0]
        raise UsageError(f"{key} = {name!r}: model_type {family} is supported with {' or '.join(allowed)}")
    return known


def _window(family: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, int]:
    """The window, and how many layers at the beginning have none."""
    if family in ("llama", "gpt2"):
        return None, 0
    if family == "mistral":
        return config.get("sliding_window", 4096), 0
    if family == "mixtral":
        return config.get("sliding_window"), 0
    types = config.get("layer_types")
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    given = config.get("max_window_layers")
    full = min(28 if given is None else given, layers)
    if types is not None:
        first = layers if window is None else full
        if len(types) != layers or any(t != ("full_attention", "sliding_attention")[i >= first] for i, t in enumerate(types)):
            raise UsageError("layer_types disagrees with use_sliding_window, sliding_window and max_window_layers")
    return (None, 0) if window is None or full == layers else (window, full)


def _window_keys(wanted: Description) -> dict[str, Any]:
    if wanted.family in ("mistral", "mixtral"):
        return {"sliding_window": wanted.sliding_window}
    if wanted.family == "llama":
        return {}
    full = wanted.num_layers if wanted.sliding_window is None else wanted.max_window_layers
    return {
        "use_sliding_window": wanted.sliding_window is not None,
        "sliding_window": wanted.sliding_window,
        "max_window_layers": full,
        "layer_types": ["full_attention"] * full + ["sliding_attention"] * (wanted.num_layers - full),
    }


# ---- rope ------------------------------------------------------------------------------------------------------


def _rope(config: Mapping[str, Any], context: int, usual: float) -> tuple[float, dict[str, Any]]:
    """Theta (``usual`` where none is given) and scaling, from whichever keys are there."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    theta = config.get("rope_theta")
    readings = {}
    if new is not None:
        readings["rope_parameters"] = _scaling("rope_parameters", new, usual if theta is None else theta, context)
    if old is not None:
        readings["rope_scaling"] = _scaling("rope_scaling", old, usual if theta is None else theta, context)
    if len(readings) == 2 and readings["rope_parameters"] != readings["rope_scaling"]:
        raise UsageError(f"rope_parameters = {new!r} and rope_scaling = {old!r} disagree")
    if new is not None and theta is not None and readings["rope_parameters"][0] != float(theta):
        raise UsageError(f"rope_theta = {theta!r} and rope_parameters.rope_theta = {new.get('rope_theta')!r} disagree")
    if readings:
        return next(iter(readings.values()))
    return float(usual if theta is None else theta), {"type": "none"}


def _scaling(key: str, given: Mapping[str, Any], theta: float, context: int) -> tuple[float, dict[str, Any]]:
    check_values(given, {}, key)
    values = {name: value for name, value in given.items() if value is not None}
    kinds = {values.pop(name) for name in ("rope_type", "type") if name in values} or {"default"}
    if len(kinds) > 1:
        raise UsageError(f"{key}: rope_type and type disagree: {' and '.join(sorted(map(repr, kinds)))}")
    (kind,) = kinds
    base = values.pop("rope_theta", theta)
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"{key}.partial_rotary_factor = {given['partial_rotary_factor']!r}: only 1.0 is supported")
    kind = "none" if kind == "default" else kind
    if kind not in ROPE_KEYS:
        known = ", ".join(["default", *list(ROPE_KEYS)[1:]])
        raise UsageError(f"{key}: rope_type {kind!r} is not known; {known} are")
    needed, optional = ROPE_KEYS[kind]
    if "original_max_position_embeddings" in needed:
        values.setdefault("original_max_position_embeddings", context)
    unknown = sorted(set(values) - {*needed, *optional})
    if unknown:
        raise UsageError(f"{key}.{unknown[0]} = {values[unknown[0]]!r} is not known for rope_type {kind}")
    missing = [name for name in needed if name not in values]
    if missing:
        raise UsageError(f"{key}: rope_type {kind} needs {missing[0]}")
    return float(base), {"type": kind} | {name: _number(values[name]) for name in (*needed, *optional) if name in values}


def _number(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(float(item) for item in value)
    return value


def _rope_keys(wanted: Description) -> dict[str, Any]:
    """The newer key, and the older two for readers that know only those."""
    scaling = {k: list(v) if isinstance(v, tuple) else v for k, v in wanted.rope_scaling.items() if k != "type"}
    kind = wanted.rope_scaling["type"]
    new = {"rope_theta": wanted.rope_theta, "rope_type": "default" if kind == "none" else kind, **scaling}
    old = None if kind == "none" else {"rope_type": kind, "type": kind, **scaling}
    return {"rope_parameters": new, "rope_theta": wanted.rope_theta, "rope_scaling": old}
