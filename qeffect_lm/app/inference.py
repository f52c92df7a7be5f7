"""Loading a checkpoint of any layout into one process, for generation and evaluation.

Only what passes without gradients read is loaded: the parameters in the model's dtype, and of an FP8 linear its cached weight
(one byte per element) instead. Masters, moments and main gradients stay on the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from checkpoint import Checkpoint, CheckpointError, open_checkpoint, resolve
from checkpoint.load import load_into
from models import build_model
from models.decoder import DecoderBlock
from qeffect_lm.app.assemble import DTYPES, make_recipe, make_timeline
from qeffect_lm.app.device import device_of
from qeffect_lm.app.shapes import saved_config
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError, shown
from qeffect_lm.fp8.quantise import Quantised
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.inference.model import InferenceModel
from qeffect_lm.kernels import cudnn_attention
from qeffect_lm.kernels.cublaslt import CublasLt
from qeffect_lm.layers.attention import Attention, bind_attention, bind_step_tables
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.layers.linear import SplitLinear, bind_products
from qeffect_lm.layers.moe import bind_experts, mixtures
from qeffect_lm.state import LogicalTensor, Role
from qeffect_lm.units import format_bytes


class Weights(Protocol):
    """Where a model's tensors come from."""

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The parameter of a logical name, on the CPU. Raises QEffectError where there is none of this shape."""
        ...

    def cached(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """An FP8 linear's weight ``[out, in]`` as it was cached, and its inverse scale; None where none was saved."""
        ...


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint's tensors, each read whole from whatever slices hold it, its SHA-256 compared."""

    checkpoint: Checkpoint

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        held = self.checkpoint.manifest.tensors
        logical = f"param/{name}" if f"param/{name}" in held else f"master/{name}"
        found = self.checkpoint.entry(logical)
        if tuple(found.shape) != shape:
            raise UsageError(
                f"{self.checkpoint.path}: {logical} has the shape {list(found.shape)}, the model's is {list(shape)}: the "
                "checkpoint's configuration is not that of its weights"
            )
        return self.checkpoint.read(logical).to(dtype)

    def cached(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        if f"cached_weight/{name}" not in self.checkpoint.manifest.tensors:
            return None
        return self.checkpoint.read(f"cached_weight/{name}"), self.checkpoint.read(f"cached_weight_scale_inv/{name}")


@dataclass(frozen=True)
class Loaded:
    """A model ready for passes, with the configuration that it was built from and its checkpoint."""

    model: InferenceModel
    config: Config
    checkpoint: Checkpoint


def load_for_inference(
    path: Path, *, device: str | None = None, fp8: bool = True, context: int | None = None, family: str | None = None
) -> Loaded:
    """The model of a checkpoint, or of the newest in a folder of checkpoints, whatever layout it was saved from.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; None: as it was trained, or on the CPU where there is no GPU.
        fp8: False runs FP8 linears in the model's dtype, from their parameters.
        context: tokens of the longest sequence; None: the run's ``data.seq_len``.
        family: the ``module:function`` that made the model, where it is one: it has to be named here to be called.

    Raises:
        CheckpointError, ResumeError: unreadable or incomplete.
        UsageError: the model does not fit into the free memory of the device, or lacks FP8 scales.
    """
    checkpoint = open_checkpoint(resolve(path))
    try:
        config = inference_config(saved_config(checkpoint, family), device=device, fp8=fp8, context=context)
    except (KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {shown(str(error))}"
        raise CheckpointError(f"{checkpoint.path}: the saved configuration cannot be read ({what})") from None
    return Loaded(build(config, SavedWeights(checkpoint), context), config, checkpoint)


def inference_config(
    saved: Mapping[str, Any], *, device: str | None = None, fp8: bool = True, context: int | None = None
) -> Config:
    """A run's configuration as one process needs it to run the model."""
    if context is not None and context < 1:
        raise UsageError(f"--context is {context}; it must be at least 1")
    sections = {section: dict(values) for section, values in saved.items()}
    sections["parallel"] = {}
    sections["pipeline"] = {"microbatches": sections["pipeline"]["microbatches"]}  # one chunk on one process
    sections["graphs"], sections["contract"] = {}, {}
    run, model = sections["run"], sections["model"]
    if device is not None:
        run["device"] = device
    elif run.get("device") == "cuda" and not torch.cuda.is_available():
        run["device"] = "cpu"  # neither needs a GPU
    if model.get("backend") == "te":  # one token at a time fits no product of its own; the native one reads the same
        model["backend"] = "native"
        if sections["precision"]["fp8"]["recipe"] == "block":
            fp8 = False
    if context is not None and context > sections["data"]["seq_len"]:
        # A shorter one needs no other tables. 16 sequences make any length a multiple that W in FP8 would need.
        sections["data"] |= {"seq_len": context, "microbatch_size": 16}
    if not fp8:
        sections["precision"]["fp8"] = {"recipe": "none"}
    return Config.from_dict(sections)


def build(config: Config, weights: Weights, context: int | None = None) -> InferenceModel:
    """The model of ``config`` with the tensors of ``weights``, on the configuration's device, for sequences of at most
    ``context`` tokens (None: of ``data.seq_len``)."""
    device, dtype, recipe = device_of(config), DTYPES[config.precision.dtype], make_recipe(config)
    spec = build_model(config, recipe, dtype)
    counts = [config.model.num_layers]
    check_memory(model_bytes(spec.meta_chunk(0, counts)), device, "the model")
    chunk = spec.chunk(0, counts)
    linears = {m.weight_name: m for m in chunk.modules() if isinstance(m, SplitLinear)}
    timeline = make_timeline(config, recipe, list(linears.values()), device)
    if isinstance(weights, SavedWeights) and isinstance(recipe, DelayedScaling):
        _load_scales(weights.checkpoint, timeline.logical_tensors())
    tensors = {"scale": timeline.scale} | ({"history": timeline.history} if mixtures(chunk) else {})
    made: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(chunk):
        linear, shape = linears.get(name), tuple(parameter.shape)
        parameter.requires_grad_(False)
        if linear is not None and linear.recipe is not None:
            linear.cached = _cached(linear, weights, dtype, device)
            linear.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            assert linear.cached.rows is not None
            tensors |= {f"{name}/rows": linear.cached.rows, f"{name}/scale_inv": linear.cached.scale_inv}
            continue
        source = spec.ties.get(name, name)
        if source not in made:
            made[source] = weights.parameter(source, shape, dtype).to(device)
            tensors[source] = made[source]
        parameter.data = made[source]
    bind_step_tables(chunk)
    if device.type == "cuda":
        bind_experts(chunk)
    for place, module in chunk.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[attribute] = tensors[f"{place}.{attribute}"] = buffer.to(device)
    if device.type == "cuda":
        bind_products(chunk, CublasLt(device))
        bind_attention(chunk, cudnn_attention.load(device))
    chunk.eval()
    attention = [block.attention for block in chunk.modules() if isinstance(block, DecoderBlock)]
    return InferenceModel(
        chunk.blocks,
        device,
        context_length=context or config.data.seq_len,
        vocab_size=config.model.vocab_size,
        token_bytes=sum(2 * m.kv_heads * m.head_dim for m in chunk.modules() if isinstance(m, Attention)) * dtype.itemsize,
        caches=bool(attention) and all(layer.caches for layer in attention),
        alone=isinstance(recipe, CurrentScaling) or _unseen(chunk, recipe),
        tensors=tensors,
    )


def _unseen(chunk: nn.Module, recipe: object) -> bool:
    """Whether an expert's rows have had no amax yet: they are scaled by their own, and so by what lies beside a sequence."""
    if not isinstance(recipe, DelayedScaling):
        return False
    experts = [expert.gate_up.name for moe in mixtures(chunk) for expert in moe.experts]  # type: ignore[union-attr]
    return any(not bool(recipe.timeline.history_of(f"{name}.input").any()) for name in experts)


def _load_scales(checkpoint: Checkpoint, items: list[LogicalTensor]) -> None:
    scales = [item for item in items if item.role in (Role.SCALE, Role.AMAX_HISTORY)]
    if scales and scales[0].name not in checkpoint.manifest.tensors:
        raise UsageError(
            f"{checkpoint.path} holds no FP8 scales (an imported model that was not trained yet): add --no-fp8 to run it "
            "in its own dtype"
        )
    load_into(checkpoint, scales)


def _cached(linear: SplitLinear, weights: Weights, dtype: torch.dtype, device: torch.device) -> Quantised:
    """The FP8 weight as it was saved, or made from the parameter. Its transposed copy serves gradients only."""
    assert linear.recipe is not None
    saved = weights.cached(linear.weight_name)
    if saved is not None:
        return Quantised(saved[0].to(device), None, saved[1].to(device))
    whole = weights.parameter(linear.weight_name, (linear.out_features, linear.in_features), dtype)
    made = linear.recipe.weight(linear.name, whole.to(device).bfloat16())
    return Quantised(made.rows, None, made.scale_inv)


# ---- memory ------------------------------------------------------------------------------------------------------


def model_bytes(chunk: nn.Module) -> int:
    """Bytes of a model's tensors in inference: one per element of an FP8 linear's weight."""
    eights = {m.weight_name for m in chunk.modules() if isinstance(m, SplitLinear) and m.recipe is not None}
    return sum(p.numel() * (1 if name in eights else p.element_size()) for name, p in named_parameters(chunk))


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on ``device`` now; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    limit, used = (_cgroup(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def _cgroup(name: str) -> int | None:
    """A number of this process's control group (a container's limit); None without one."""
    try:
        return int((Path("/sys/fs/cgroup") / name).read_text())
    except (OSError, ValueError):  # "max": no limit
        return None


def check_memory(needed: int, device: torch.device, what: str, remedy: str = "") -> None:
    """Refuse what does not fit, before it is allocated.

    Raises:
        UsageError: says what is needed and what is free.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise UsageError(
            f"{what} needs {format_bytes(needed)} on {device}, where {format_bytes(free)} are free: "
            f"{remedy}take a machine with more memory"
        )
