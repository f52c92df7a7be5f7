"""Megatron checkpoints written from the rules of its layout, without Megatron: any tensor-parallel and pipeline ranks, virtual
stages, padded vocabularies, Transformer Engine's extra states. What Megatron itself wrote is in
tests/golden/megatron.tar.xz."""

from __future__ import annotations

import argparse
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint.megatron import unpickle
from tools.convert import main

GOLDEN = Path(__file__).parent / "golden" / "megatron.tar.xz"
LAYOUTS = ("dist", "dist_tp2_pp2", "torch_tp2_pp2", "dist_layers")
SIZES = {"hidden": 24, "heads": 12, "groups": 12, "head_dim": 4, "ffn": 36, "layers": 4}


def unpacked(folder: Path) -> Path:
    """The golden checkpoints."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder


def arguments(vocab: int | None = 59, padded: int = 60, **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "hidden_size": SIZES["hidden"],
            "ffn_hidden_size": SIZES["ffn"],
            "kv_channels": SIZES["head_dim"],
            "num_layers": SIZES["layers"],
            "num_attention_heads": SIZES["heads"],
            "group_query_attention": False,
            "num_query_groups": 1,
            "seq_length": 16,
            "max_position_embeddings": 64,
            "position_embedding_type": "rope",
            "rotary_base": 10000,
            "add_bias_linear": False,
            "swiglu": True,
            "untie_embeddings_and_output_weights": True,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-5,
            "vocab_size": vocab,
            "padded_vocab_size": padded,
            "consumed_train_samples": 40,
            **more,
        }
    )


def whole(padded: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every parameter as one process has it, by Megatron's names with global layer numbers, in the order of its modules."""
    s, generator = SIZES, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    h, d = s["hidden"], s["head_dim"]
    tensors = OrderedDict({"embedding.word_embeddings.weight": random(padded, h)})
    for i in range(s["layers"]):
        at = f"decoder.layers.{i}"
        tensors[f"{at}.self_attention.linear_proj.weight"] = random(h, s["heads"] * d)
        tensors[f"{at}.self_attention.linear_qkv.layer_norm_weight"] = random(h)
        tensors[f"{at}.self_attention.linear_qkv.weight"] = random((s["heads"] + 2 * s["groups"]) * d, h)
        tensors[f"{at}.mlp.linear_fc1.layer_norm_weight"] = random(h)
        tensors[f"{at}.mlp.linear_fc1.weight"] = random(2 * s["ffn"], h)
        tensors[f"{at}.mlp.linear_fc2.weight"] = random(h, s["ffn"])
    tensors["decoder.final_layernorm.weight"] = random(h)
    tensors["output_layer.weight"] = random(padded, h)
    return tensors


def part(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A tensor-parallel rank's part, as Megatron's column- and row-parallel linears hold it."""
    if ".linear_fc1.weight" in name:
        gate, up = tensor.chunk(2)
        return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
    if name.endswith(("word_embeddings.weight", "linear_qkv.weight", "output_layer.weight")):
        return tensor.chunk(tp)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(tp, dim=1)[rank].clone()
    return tensor.clone()


def owners(pp: int, vp: int = 1) -> dict[str, tuple[int, int, str]]:
    """Global name → (pipeline rank, virtual stage, local name)."""
    each = SIZES["layers"] // (pp * vp)
    found: dict[str, tuple[int, int, str]] = {}
    for name in whole(4):
        if name.startswith("decoder.layers."):
            layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
            chunk, local = divmod(int(layer), each)
            found[name] = (chunk % pp, chunk // pp, f"decoder.layers.{local}.{rest}")
        else:
            found[name] = (0, 0, name) if name.startswith("embedding") else (pp - 1, vp - 1, name)
    return found


def extra_state(length: int, seed: int) -> torch.Tensor:
    """What Transformer Engine 2 keeps of an FP8 linear: a pickle in bytes."""
    generator = torch.Generator().manual_seed(seed)
    history = {"fwd": torch.rand(length, 3, generator=generator), "bwd": torch.rand(length, 2, generator=generator)}
    state: dict[str, Any] = {"recipe": None, "extra_fp8_variables": {"num_gemms": 1}}
    for side, fp8_max in (("fwd", 448.0), ("bwd", 57344.0)):
        history[side][0] = 0.0  # the running window's
        state[f"amax_history_{side}"] = history[side]
        state[f"scale_{side}"] = fp8_max / history[side].amax(0)
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def write_ranks(
    root: Path,
    tensors: dict[str, torch.Tensor],
    args: argparse.Namespace,
    tp: int = 1,
    pp: int = 1,
    vp: int = 1,
    extra: dict[str, torch.Tensor] | None = None,
    **more: Any,
) -> Path:
    """``mp_rank`` folders of ``tensors`` (see :func:`whole`), and the file that names the iteration."""
    folder = root / "iter_0000007"
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    owner = owners(pp, vp)
    for t in range(tp):
        for p in range(pp):
            chunks: list[dict[str, Any]] = [OrderedDict() for _ in range(vp)]
            for name, tensor in tensors.items():
                rank, chunk, local = owner.get(name, (pp - 1, vp - 1, name))
                if rank == p:
                    chunks[chunk][local] = part(name, tensor, t, tp)
            for module, state in (extra or {}).items():
                rank, chunk, local = owner[f"{module}.weight"]
                if rank == p:
                    chunks[chunk][local.removesuffix("weight") + "_extra_state"] = state
            content = {"args": args, "checkpoint_version": 3.0, "iteration": 7, **more}
            content |= {"model": chunks[0]} if vp == 1 else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
            path = folder / (f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}")
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    return root


def optimizer_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As torch's Adam numbers it in Megatron's groups: matrices first, then what does not decay."""
    groups = [[n for n, t in tensors.items() if (t.dim() > 1) == decays] for decays in (True, False)]
    order = [name for group in groups for name in group]
    state = {i: {kind: tensors[n].float() + k for k, kind in enumerate(("exp_avg", "exp_avg_sq"))} for i, n in enumerate(order)}
    numbers = iter(range(len(order)))
    made = [{"wd_mult": float(i == 0), "step": 7, "params": [next(numbers) for _ in group]} for i, group in enumerate(groups)]
    masters = [[tensors[name].float() for name in group] for group in groups]
    return {"optimizer": {"state": state, "param_groups": made}, "fp32_from_fp16_params": masters}


def run(src: Path, dst: Path, *more: str, target: str = "native") -> int:
    return main(["--from", "megatron", "--to", target, str(src), str(dst), "--quiet", "--allow-pickle", *more])


def in_this_process(kind: str, paths: Sequence[Path]) -> list[str]:
    return [unpickle.answer(kind, str(path)) for path in paths]
