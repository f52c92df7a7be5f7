"""Megatron-core's names and arguments ↔ ours.

Names are those of a GPT model of Megatron-core with global layer numbers. Its layers name a norm's weight in two ways: by
itself (``input_layernorm.weight``), or inside the linear that Transformer Engine fuses it with
(``self_attention.linear_qkv.layer_norm_weight``). Rows of the fused q, k and v are in our order: per group (KV head) its query
heads, then k, then v. gate and up lie below each other in one process's tensor, as ours. Experts have one name here, that of
layers which hold them one by one (``mlp.experts.local_experts.E.linear_fc1.weight``), whatever a checkpoint calls them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from checkpoint.hf.values import is_flag, is_number, is_size
from qeffect_lm.errors import UsageError

_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.linear_fc1": "mlp.gate_up",
    "mlp.linear_fc2": "mlp.down",
    "mlp.router": "moe.router",
}
_EXPERT = {"linear_fc1": "gate_up", "linear_fc2": "down"}
_MODEL = {
    "embedding.word_embeddings": "embedding",
    "decoder.final_layernorm": "final_norm",
    "output_layer": "head",
}
_NAME = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.+?)(?:(?<=layer_norm)_|(?<!layer_norm)\.)(weight|bias)")
_ONE = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])")
_MINE = re.compile(r"layers\.(\d+)\.moe\.experts\.(\d+)\.(gate_up|down)\.weight")
_GROUPED = re.compile(r"(.*mlp\.experts\.)(linear_fc[12]\.)(weight)(\d+)")
VOCABULARY = ("embedding.weight", "head.weight")
# Our linears with FP8 roles, by Megatron's modules.
LINEARS = {theirs: ours for theirs, ours in _LAYER.items() if ".linear_" in theirs and not theirs.endswith("layer_norm")}
COLUMN = ("embedding.word_embeddings", "self_attention.linear_qkv", "mlp.linear_fc1", "output_layer")
ROW = ("self_attention.linear_proj", "mlp.linear_fc2")


def ours(name: str) -> str | None:
    """Our name of a parameter with a global layer number; None for what is none of our models'."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, module, kind = match.groups()
    found = (_MODEL if layer is None else _LAYER).get(module)
    expert = _ONE.fullmatch(module)
    if layer is not None and expert is not None:
        found = f"moe.experts.{int(expert[1])}.{_EXPERT[expert[2]]}"
    if found is None:
        return None
    return f"{found}.{kind}" if layer is None else f"layers.{layer}.{found}.{kind}"


def one_by_one(name: str) -> str:
    """An expert's parameter by its own name, where a grouped layer has numbered weights (``…experts.linear_fc1.weight3``)."""
    match = _GROUPED.fullmatch(name)
    return name if match is None else f"{match[1]}local_experts.{int(match[4])}.{match[2]}{match[3]}"


def theirs(name: str, experts: bool = False) -> str:
    """Megatron's name of one of our parameters, with a global layer number, as Transformer Engine's layers have it (what
    ``torch_dist`` checkpoints use for all). In a model with ``experts`` nothing is fused with the norm before them.

    Raises:
        UsageError: a parameter that its GPT model does not have.
    """
    one = _MINE.fullmatch(name)
    if one is not None:
        module = next(module for module, found in _EXPERT.items() if found == one[3])
        return f"decoder.layers.{one[1]}.mlp.experts.local_experts.{one[2]}.{module}.weight"
    if experts and name.endswith(".mlp_norm.weight"):
        return f"decoder.{name.replace('mlp_norm', 'pre_mlp_layernorm')}"
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    table = {found: module for module, found in (_MODEL | _LAYER).items()}  # the later names: those of the fused layers
    if match is None or match[2] not in table:
        raise UsageError(f"{name} has no counterpart in Megatron-core's GPT model")
    layer, module, kind = match[1], table[match[2]], match[3]
    joint = "_" if module.endswith("layer_norm") else "."
    return f"{module}{joint}{kind}" if layer is None else f"decoder.layers.{layer}.{module}{joint}{kind}"


def split_axis(name: str) -> int | None:
    """Along which dimension tensor parallelism cuts a parameter; None: every rank has it whole."""
    module, _, kind = re.sub(r"^decoder\.layers\.\d+\.", "", name).rpartition(".")
    module = module if _ONE.fullmatch(module) is None else f"mlp.{module.rpartition('.')[2]}"
    if module in COLUMN and kind in ("weight", "bias"):
        return 0
    return 1 if module in ROW and kind == "weight" else None


def gated(name: str) -> bool:
    """Whether each rank's part holds its gate's rows, then its up's."""
    return bool(re.fullmatch(r"decoder\.layers\.\d+\.mlp\.(experts\.local_experts\.\d+\.)?linear_fc1\.(weight|bias)", name))


# ---- arguments -----------------------------------------------------------------------------------------------------

# With another value the model computes what ours does not. An argument that is absent has the first value.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "multi_latent_attention": (False, None),
    "apply_layernorm_1p": (False, None),
    "rotary_interleaved": (False, None),
    "rotary_percent": (1.0, None),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
    "squared_relu": (False, None),
    "quick_geglu": (False, None),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "qk_l2_norm": (False, None),
    "softmax_type": ("vanilla", None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "hybrid_layer_pattern": (None,),
    "spec": (None,),
    "use_mup": (False, None),
    "no_rope_freq": (None,),
    "glu_linear_offset": (0, 0.0, None),
    "activation_func_clamp_value": (None,),
}
# The same, of a model with experts.
_ONLY_EXPERTS: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1, None),
    "moe_router_score_function": ("softmax", None),
    "moe_router_pre_softmax": (False, None),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_enable_expert_bias": (False, None),
    "moe_router_num_groups": (None,),
    "moe_router_group_topk": (None,),
    "moe_router_topk_limited_devices": (None,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_expert_capacity_factor": (None,),
    "moe_input_jitter_eps": (None,),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "moe_single_grouped_weight": (False, None),
    "add_qkv_bias": (False, None),
    "qk_layernorm": (False, None),
}


def model_section(args: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our model section of Megatron's arguments; ``vocab_size`` is the padded one, or None where that is not told.

    Raises:
        UsageError: an argument that our models have nothing for, or one that is missing; names it.
    """
    none = type(args.get("num_experts")) is int and args["num_experts"] == 0
    experts = None if none else _optional(args, "num_experts", where)
    for name, allowed in {**_ONLY, **(_ONLY_EXPERTS if experts else {})}.items():
        value = args.get(name, allowed[0])
        if value not in allowed:
            raise UsageError(f"{where}: the argument {name} is {value!r}, which is not supported; {allowed[0]!r} is")
    if args.get("position_embedding_type", "rope") != "rope" and not args.get("use_rotary_position_embeddings"):
        kind = args["position_embedding_type"]
        raise UsageError(f"{where}: the argument position_embedding_type is {kind!r}, which is not supported; 'rope' is")
    hidden, heads = _need(args, "hidden_size", where), _need(args, "num_attention_heads", where)
    groups = _optional(args, "num_query_groups", where) if _flag(args, "group_query_attention", where) else heads
    norms, biases = _flag(args, "qk_layernorm", where), _flag(args, "add_qkv_bias", where)
    if norms and biases:
        raise UsageError(f"{where}: the arguments qk_layernorm and add_qkv_bias are both set, which no family of ours has")
    section: dict[str, Any] = {
        "family": "qwen3" if norms else "qwen2" if biases else "llama",
        "vocab_size": _optional(args, "padded_vocab_size", where),
        "hidden_size": hidden,
        "num_layers": _need(args, "num_layers", where),
        "num_heads": heads,
        "num_kv_heads": groups or heads,
        "head_dim": _optional(args, "kv_channels", where) or hidden // heads,
        "ffn_size": _optional(args, "ffn_hidden_size", where) or 4 * hidden,
        "max_position_embeddings": _need(args, "max_position_embeddings", where),
        "norm_eps": _number(args, "norm_epsilon" if "norm_epsilon" in args else "layernorm_epsilon", 1e-5, where),
        "rope_theta": _number(args, "rotary_base", 10000.0, where),
        "tie_word_embeddings": not _flag(args, "untie_embeddings_and_output_weights", where),
    }
    if experts is not None:
        section |= {"family": "mixtral", "ffn_size": _optional(args, "moe_ffn_hidden_size", where) or section["ffn_size"]}
        section["moe"] = {"num_experts": experts, "top_k": _optional(args, "moe_router_topk", where) or 2}
        if section["moe"]["top_k"] > experts:
            told = f"moe_router_topk is {section['moe']['top_k']} and num_experts {experts}"
            raise UsageError(f"{where}: the argument {told}: a token cannot take more experts than there are")
        for key, name in (("aux_loss_coef", "moe_aux_loss_coeff"), ("z_loss_coef", "moe_z_loss_coeff")):
            section["moe"][key] = _number(args, name, 0.0, where)
    if _flag(args, "use_rope_scaling", where):  # Megatron's is Llama 3's, with its constants
        section["rope_scaling"] = {
            "type": "llama3",
            "factor": _number(args, "rope_scaling_factor", 8.0, where),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return section


def _need(args: Mapping[str, Any], name: str, where: str) -> int:
    value = _optional(args, name, where)
    if value is None:
        raise UsageError(f"{where}: the argument {name} is not there, a number is needed")
    return value


def _optional(args: Mapping[str, Any], name: str, where: str) -> int | None:
    value = args.get(name)
    if value is not None and not is_size(value):
        raise UsageError(f"{where}: the argument {name} is {value!r}, a whole number from 1 on is needed")
    return value


def _flag(args: Mapping[str, Any], name: str, where: str) -> bool:
    value = args.get(name)
    if value is not None and not is_flag(value):
        raise UsageError(f"{where}: the argument {name} is {value!r}, True or False is needed")
    return bool(value)


def _number(args: Mapping[str, Any], name: str, absent: float, where: str) -> float:
    value = args.get(name)
    if value is not None and not is_number(value):
        raise UsageError(f"{where}: the argument {name} is {value!r}, a finite number is needed")
    return absent if value is None else float(value)
