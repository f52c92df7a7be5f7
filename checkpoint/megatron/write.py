"""Megatron checkpoints as target of a conversion: parameters alone, as Megatron's own ``release`` checkpoints are.

``torch_dist`` is written once for every layout, since Megatron reshards it when it loads: each layer's tensor is one entry
of a stacked one, as Megatron's default has it. ``mp_rank`` folders are written for one number of tensor-parallel and
pipeline ranks.

What is written are pickles (there is no other form of these files), made here of plain values, tensors and one ``Namespace``.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from checkpoint.fileops import FileOps, naming, write_file
from checkpoint.hf.description import Description, describe
from checkpoint.hf.folder import CONFIG, INDEX
from checkpoint.hf.read import HEADER
from checkpoint.hf.tensors import tensor_groups
from checkpoint.megatron.dist_files import stacked_key, write_torch_dist
from checkpoint.megatron.names import model_section, theirs
from checkpoint.megatron.rank_files import Ranks, nbytes_of_ranks, write_ranks
from checkpoint.megatron.read import TOKENIZER, TRACKER
from checkpoint.portable import Model, check_names
from qeffect_lm.errors import UsageError

RELEASE = "release"
SHARD_SIZE = 5_000_000_000
DIVISOR = 128  # Megatron's --make-vocab-size-divisible-by


def check_model(model: Model, ranks: Ranks | None) -> argparse.Namespace:
    """Whether Megatron-core's GPT model can be this one; returns the arguments that describe it.

    Raises:
        UsageError: names the key, parameter or number that does not fit.
    """
    groups = tensor_groups(model.section, model.seq_len)
    items = {item.name: item.shape for item in model.items}
    check_names(model.where, items, {group.ours: group.shape for group in groups})
    wanted = describe(model.section, model.seq_len)
    _check_ranks(wanted, ranks)
    kinds: dict[str, str] = {}
    for item in model.items:
        key = stacked_key(theirs(item.name, wanted.num_experts is not None))[0]
        if ranks is None and kinds.setdefault(key, item.dtype) != item.dtype:
            raise UsageError(f"{key} is {kinds[key]} in one layer and {item.dtype} in another: choose one with --dtype")
    arguments = _arguments(model, ranks)
    back = model_section(vars(arguments), "Megatron's arguments")
    back["vocab_size"] = model.section["vocab_size"]
    got = describe(back)
    for name in (field.name for field in fields(wanted)):
        if name != "family" and getattr(wanted, name) != getattr(got, name):
            raise UsageError(f"model.{name} is {getattr(wanted, name)!r}, which Megatron's arguments cannot say")
    return arguments


def _check_ranks(model: Description, ranks: Ranks | None) -> None:
    if ranks is None:
        return
    if model.num_experts is not None:
        raise UsageError(
            "--tp and --pp: mp_rank folders are not written for a model with experts: leave them out, Megatron reshards "
            "torch_dist to any layout when it loads"
        )
    for option, key in (("--tp", "num_kv_heads"), ("--tp", "ffn_size"), ("--pp", "num_layers")):
        number, size = ranks.tp if option == "--tp" else ranks.pp, getattr(model, key)
        if number < 1 or size % number:
            raise UsageError(f"{option} {number} does not divide model.{key} {size}: choose another one")


def nbytes_of(model: Model, ranks: Ranks | None) -> int:
    """Bytes of the tensors and tokenizer files that :func:`write_megatron` writes."""
    beside = sum(len(raw) for raw in _beside(model).values())
    return beside + (model.nbytes if ranks is None else nbytes_of_ranks(model, ranks, _padded_vocabulary(model, ranks.tp)))


def left_behind(model: Model) -> list[str]:
    """What of the model's files does not go into a Megatron checkpoint, in words."""
    names = sorted(set(model.files) - set(_beside(model)) - {name for name in model.files if name.endswith(HEADER)} - {INDEX})
    return [f"the file {name}, for which Megatron's arguments stand" for name in names]


def options(model: Model) -> str:
    """The options of Megatron that its ``--use-checkpoint-args`` does not take from a checkpoint."""
    d = describe(model.section, model.seq_len)
    given = [f"--norm-epsilon {d.norm_eps:g}"]
    given += ["--qk-layernorm"] if d.qk_norm else []
    if d.num_experts is not None:
        moe = model.section["moe"]
        given.append(f"--moe-router-dtype fp32 --moe-aux-loss-coeff {moe.get('aux_loss_coef', 0.001):g}")
        given += [f"--moe-z-loss-coeff {moe['z_loss_coef']:g}"] if moe.get("z_loss_coef") else []
    if d.rope_scaling["type"] == "llama3":
        given.append(f"--use-rope-scaling --rope-scaling-factor {d.rope_scaling['factor']:g}")
    return " ".join(given)


def _beside(model: Model) -> dict[str, bytes]:
    """The tokenizer's files and the like; what describes theirs of the model does not describe these files."""
    return {name: raw for name, raw in model.files.items() if name not in (INDEX, CONFIG) and not name.endswith(HEADER)}


def _padded_vocabulary(model: Model, tp: int) -> int:
    return -(-int(model.section["vocab_size"]) // (DIVISOR * tp)) * DIVISOR * tp


def _arguments(model: Model, ranks: Ranks | None) -> argparse.Namespace:
    """What Megatron reads of a checkpoint's arguments (``--use-checkpoint-args``), and compares with its own."""
    d = describe(model.section, model.seq_len)
    tp = 1 if ranks is None else ranks.tp
    # Whoever loads torch_dist pads the vocabulary for ranks of their own.
    padded = None if ranks is None else _padded_vocabulary(model, tp)
    scaling = d.rope_scaling
    return argparse.Namespace(
        num_layers=d.num_layers,
        hidden_size=d.hidden_size,
        ffn_hidden_size=d.ffn_size,
        seq_length=min(d.max_position_embeddings, model.seq_len or d.max_position_embeddings),
        num_attention_heads=d.num_heads,
        group_query_attention=True,
        num_query_groups=d.num_kv_heads,
        kv_channels=d.head_dim,
        max_position_embeddings=d.max_position_embeddings,
        position_embedding_type="rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_base=int(d.rope_theta) if d.rope_theta.is_integer() else d.rope_theta,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=scaling["type"] == "llama3",
        rope_scaling_factor=scaling.get("factor", 8.0),
        add_bias_linear=False,
        add_qkv_bias=d.attention_bias == "qkv",
        qk_layernorm=d.qk_norm,
        swiglu=True,
        squared_relu=False,
        untie_embeddings_and_output_weights=not d.tie_word_embeddings,
        apply_layernorm_1p=False,
        normalization="RMSNorm",
        norm_epsilon=d.norm_eps,
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=d.num_experts,
        **_experts(model),
        vocab_size=d.vocab_size,
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=DIVISOR,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1 if ranks is None else ranks.pp,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        ckpt_format="torch_dist" if ranks is None else "torch",
    )


def _experts(model: Model) -> dict[str, Any]:
    """Arguments of a model with experts: weights are those of a softmax over the chosen ones, which is Mixtral's."""
    d = describe(model.section, model.seq_len)
    if d.num_experts is None:
        return {}
    return {
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": d.ffn_size,
        "moe_router_topk": d.top_k,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": model.section["moe"].get("aux_loss_coef", 0.001),
        "moe_z_loss_coeff": model.section["moe"].get("z_loss_coef") or None,
    }


def write_megatron(
    model: Model, folder: Path, ops: FileOps, ranks: Ranks | None = None, shard_size: int = SHARD_SIZE
) -> None:
    """Write ``release``, the file that names it and ``tokenizer`` into ``folder``, each file synced; one tensor in memory at a
    time.

    Raises:
        UsageError: as :func:`check_model`.
        CheckpointError: a file system operation failed.
    """
    arguments = check_model(model, ranks)
    with naming("create", folder / RELEASE):
        ops.mkdir(folder / RELEASE)
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
    if ranks is None:
        write_torch_dist(model, folder / RELEASE, common, ops, shard_size)
    else:
        write_ranks(model, folder / RELEASE, common, ops, ranks)
    beside = _beside(model)
    if beside:
        with naming("create", folder / TOKENIZER):
            ops.mkdir(folder / TOKENIZER)
    for name, raw in beside.items():
        write_file(ops, folder / TOKENIZER / name, raw)
    write_file(ops, folder / TRACKER, RELEASE.encode())
