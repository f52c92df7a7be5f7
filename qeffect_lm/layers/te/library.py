"""Transformer Engine itself: found, checked and imported, with a clear word where something is missing.

Backend ``te`` reaches into parts of Transformer Engine that are not its public interface (quantizers, the store of delayed
weight gradients, the workspace of its products). :data:`NEEDED` lists every such name; :func:`load` looks for them all, so that
a version that moved one is refused by name before any memory is allocated. Developed and measured with 2.20.2.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qeffect_lm.errors import QEffectError, UsageError

PACKAGE, BINDING = "transformer-engine", "transformer-engine-torch"
CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
OLDEST, TESTED = (2, 20), (2, 20)
NATIVE = "set model.backend=native to run without it"
INSTALL = "pip install 'qeffect-lm[te-cu13]' (te-cu12 with CUDA 12)"

# Module below transformer_engine → names in it; NAME.PART is an attribute of a class, NAME(ARGUMENT) of its constructor.
NEEDED: dict[str, tuple[str, ...]] = {
    "pytorch": (
        "Linear(delay_wgrad_compute)",
        "Linear(fuse_wgrad_accumulation)",
        "LayerNormLinear(delay_wgrad_compute)",
        "LayerNormLinear(fuse_wgrad_accumulation)",
        "LayerNormMLP(delay_wgrad_compute)",
        "LayerNormMLP(fuse_wgrad_accumulation)",
        "LayerNormMLP(activation)",
        "DotProductAttention(qkv_format)",
        "DotProductAttention(attn_mask_type)",
        "autocast(_graph)",
        "Float8Tensor",
        "Float8Quantizer",
        "is_fp8_available",
        "is_fp8_block_scaling_available",
    ),
    "common.recipe": ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "Format"),
    "pytorch.constants": ("FP8FwdTensorIdx", "FP8BwdTensorIdx"),
    "pytorch.graph": ("set_capture_start", "set_capture_end", "is_graph_capturing"),
    "pytorch.module.base": ("TransformerEngineBaseModule.init_fp8_metadata", "quantize_weight"),
    "pytorch.module._common": ("WeightGradStore.put", "WeightGradStore.pop"),
    "pytorch.quantization": ("FP8GlobalStateManager.quantization_state",),
    "pytorch.cpp_extensions.gemm": ("get_cublas_workspace",),
    "pytorch.attention.dot_product_attention": ("_attention_backends",),
    "pytorch.attention.dot_product_attention.utils": ("get_full_cu_seqlens",),
}


@dataclass(frozen=True)
class Library:
    """Transformer Engine, imported and checked; ``modules`` by their name below ``transformer_engine``."""

    version: str
    modules: dict[str, Any]
    device: torch.device

    @cached_property
    def te(self) -> Any:
        return self.modules["pytorch"]

    @cached_property
    def recipes(self) -> Any:
        return self.modules["common.recipe"]

    @cached_property
    def indices(self) -> tuple[Any, Any]:
        """Positions of a module's quantizers: forward (input, weight of each product), backward (output gradients)."""
        constants = self.modules["pytorch.constants"]
        return constants.FP8FwdTensorIdx, constants.FP8BwdTensorIdx

    def cublas_workspace(self) -> torch.Tensor:
        """The scratch of all its products on this device: one per process, shared by whatever stream runs them."""
        return self.modules["pytorch.cpp_extensions.gemm"].get_cublas_workspace(self.device.index, False, False)

    def sequence_offsets(self, batch: int, sequence: int) -> torch.Tensor:
        """The cached int32 ``[batch + 1]`` of sequence starts that its attention keeps for this shape."""
        utils = self.modules["pytorch.attention.dot_product_attention.utils"]
        return utils.get_full_cu_seqlens(batch, sequence, self.device)

    def check_attention(self, name: str) -> None:
        """After an attention ran. Raises QEffectError where the kernel chosen for it was none of its fused ones."""
        if self.modules["pytorch.attention.dot_product_attention"]._attention_backends["use_unfused_attention"]:
            raise QEffectError(
                f"{name}: Transformer Engine found no fused attention kernel for these shapes and took its unfused one, which "
                "keeps the whole score matrix. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 in the environment make it print why. Often "
                f"another cuDNN than torch's was found: export CUDNN_HOME={torch_cudnn()}; or {NATIVE}"
            )

    @contextmanager
    def holding_still(self) -> Iterator[None]:
        """Tell it that a graph is being captured: it then rolls no scale by itself after a backward. In eager too, so that
        eager and captured work take the same paths."""
        graph = self.modules["pytorch.graph"]
        before = graph.is_graph_capturing()
        graph.set_capture_start()
        try:
            yield
        finally:
            if not before:
                graph.set_capture_end()

    def check_undisturbed(self) -> None:
        """Raises UsageError where somebody else in this process uses its global FP8 state, which every module shares."""
        state = self.modules["pytorch.quantization"].FP8GlobalStateManager.quantization_state
        if getattr(state, "skip_fp8_weight_update_tensor", None) is not None:
            raise UsageError(
                "another user of Transformer Engine in this process set its global flag for skipping weight casts, which would "
                "cast our cached weights in every microbatch: run it in a process of its own"
            )


def load(device: torch.device, recipe: str = "none") -> Library:
    """Import Transformer Engine for ``device`` and an FP8 ``recipe`` (``none``, ``delayed``, ``current`` or ``block``).

    Raises:
        UsageError: not installed or half installed, too old, without a name of :data:`NEEDED`; no GPU; no FP8 on this GPU;
            two copies of cuDNN in the process.
    """
    version = check_installed()
    if device.type != "cuda":
        raise UsageError(f"model.backend=te needs a GPU, and this run uses the {device.type}: {NATIVE}")
    if device.index is None:  # its caches are keyed by the device's number
        device = torch.device("cuda", torch.cuda.current_device())
    modules = {name: _import(f"transformer_engine.{name}") for name in NEEDED}
    missing = [f"transformer_engine.{module}.{name}" for module, name in _missing(modules)]
    if missing:
        raise UsageError(
            f"Transformer Engine {version} has no {missing[0]}, which model.backend=te builds on ({len(missing)} missing; "
            f"developed with {_dotted(TESTED)}): install that version, or {NATIVE}"
        )
    library = Library(version, modules, device)
    _check_cudnn()
    _check_fp8(library, recipe)
    return library


def check_installed(version_of: Callable[[str], str] = metadata.version) -> str:
    """The version of an installation that has all its parts.

    Raises:
        UsageError: absent, or only one of its parts, or parts of different versions, or too old.
    """

    def version(name: str) -> str | None:
        try:
            return version_of(name)
        except metadata.PackageNotFoundError:
            return None

    package, binding = version(PACKAGE), version(BINDING)
    cores = {name: found for name in CORES if (found := version(name)) is not None}
    if package is None:
        raise UsageError(f"model.backend=te needs Transformer Engine, which is not installed: {INSTALL}, or {NATIVE}")
    # A build from source is one distribution; what PyPI has comes in three.
    if (binding is None) != (not cores):
        absent = BINDING if binding is None else " or ".join(CORES)
        raise UsageError(f"Transformer Engine {package} is installed without {absent}: {INSTALL}, or {NATIVE}")
    for name, found in {BINDING: binding, **cores}.items():
        if found is not None and found != package:
            raise UsageError(f"{PACKAGE} is version {package} and {name} is {found}: install one version of both, or {NATIVE}")
    numbers = _numbers(package)
    if numbers < OLDEST:
        oldest = f"the oldest supported version is {_dotted(OLDEST)}"
        raise UsageError(f"Transformer Engine {package} is too old, {oldest}: {INSTALL}, or {NATIVE}")
    if numbers[:2] > TESTED:
        warnings.warn(
            f"Transformer Engine {package} is newer than {_dotted(TESTED)}, with which model.backend=te was tested",
            stacklevel=2,
        )
    return package


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # its loader raises ImportError, OSError, RuntimeError, AssertionError and FileNotFoundError
        hint = cudnn_hint(str(error))
        raise UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}. {hint}{NATIVE}") from error


def _missing(modules: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for module, names in NEEDED.items():
        for name in names:
            path, _, argument = name.removesuffix(")").partition("(")
            value: Any = modules[module]
            for part in path.split("."):
                value = getattr(value, part, None)
            if value is None or (argument and argument not in value.__init__.__code__.co_varnames):
                yield module, name


def _check_fp8(library: Library, recipe: str) -> None:
    if recipe == "none":
        return
    te = library.te
    probe = te.is_fp8_block_scaling_available if recipe == "block" else te.is_fp8_available
    available, reason = probe(return_reason=True)
    if not available:
        raise UsageError(
            f"precision.fp8.recipe={recipe} does not run on {torch.cuda.get_device_name(library.device)}: {reason} "
            "Set precision.fp8.recipe=none, or another recipe"
        )


# ---- cuDNN ---------------------------------------------------------------------------------------------------------


def _check_cudnn() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists():
        check_cudnn(maps.read_text(encoding="utf-8", errors="replace"))


def check_cudnn(maps: str) -> None:
    """``maps``: what the process has mapped (``/proc/self/maps``).

    Raises:
        UsageError: parts of two copies of cuDNN, which do not work together.
    """
    folders = cudnn_folders(maps)
    if len(folders) > 1:
        raise UsageError(
            f"two copies of cuDNN are loaded, from {' and from '.join(folders)}: Transformer Engine took another one than "
            f"torch, and parts of two do not work together. Export CUDNN_HOME={torch_cudnn()} before the process starts"
        )


def cudnn_folders(maps: str) -> list[str]:
    """The folders that libraries of cuDNN are mapped from, in order of appearance."""
    found = re.findall(r"(/\S*)/libcudnn[^/\s]*\.so[^/\s]*", maps)
    return list(dict.fromkeys(found))


def cudnn_hint(message: str) -> str:
    """A sentence for an error that speaks of cuDNN."""
    if "cudnn" not in message.lower():
        return ""
    return f"If another cuDNN than torch's was found first, export CUDNN_HOME={torch_cudnn()} before the process starts. "


def torch_cudnn() -> Path:
    """Where torch's wheel keeps its cuDNN."""
    return Path(torch.__file__).resolve().parents[1] / "nvidia" / "cudnn"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
