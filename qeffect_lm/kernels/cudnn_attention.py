"""Causal attention by cuDNN through NVIDIA's Python package ``cudnn`` (nvidia-cudnn-frontend), with a backward that repeats.

torch's own binding never asks cuDNN for its deterministic backward, and so refuses cuDNN under
``torch.use_deterministic_algorithms(True)``. The interface is the package's documentation, "Scaled Dot Product Attention" and
"Scaled Dot Product Attention Backward".

``qkv`` is the fused projection ``[batch, sequence, kv_heads, group + 2, head_dim]`` (per KV head its query heads, then k, then
v), contiguous, and its gradient has that layout: cuDNN takes strides, nothing is copied.

On Hopper the deterministic backward writes d(scores) out, in the operands' dtype a matrix ``[sequence, sequence]`` per query
head, and makes dq from it, where the other one lets blocks add to dq in any order. The matrices lie in the workspace, which so
grows with the sequence's square: KV heads are taken a few at a time to keep it within a limit. Fewer at once are slower: half
of them by an eighth to two fifths on an H200, where the bytes stayed the same.
"""

from __future__ import annotations

import importlib
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from qeffect_lm import kernels
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.errors import QEffectError

PACKAGE, OLDEST = "nvidia-cudnn-frontend", (1, 29)
WORKSPACE_LIMIT = 1 << 30  # bytes of a stream's workspace, unless one KV head alone needs more: 32 heads of 4096 tokens

_ALIGNMENT = 16  # bytes: what cuDNN assumes of every address
_FORWARD, _BACKWARD = ("q", "k", "v", "o", "stats"), ("q", "k", "v", "o", "dO", "stats", "dq", "dk", "dv")
_MADE = {_FORWARD: ("o", "stats"), _BACKWARD: ("dq", "dk", "dv")}


@dataclass(frozen=True)
class _Graph:
    """One built cuDNN graph; a tensor's number in it is its place in ``names``. A call launches it for each of ``starts``."""

    graph: Any
    names: tuple[str, ...]
    starts: tuple[tuple[int, int], ...]  # (sequence of the batch, KV head)
    workspace_bytes: int


class CudnnAttention:
    """cuDNN's attention on one device: a handle and a workspace per stream, two graphs per shape.

    Made by whoever assembles the layers (:func:`load`), and given to them (``layers.attention.bind_attention``). cuDNN's
    heuristic chooses the kernels, once per graph: no timing decides. Inside a capture a shape or a stream not seen before is an
    error: building and allocating do not belong into a graph. Nothing here waits for the device.

    Args:
        package: the module ``cudnn``.
        workspace_limit: bytes that the backward's workspace may take, unless one KV head alone needs more.
    """

    def __init__(self, device: torch.device | str, package: Any, workspace_limit: int = WORKSPACE_LIMIT) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.workspace_limit = workspace_limit
        self._cudnn = package
        self._types = {torch.bfloat16: package.data_type.BFLOAT16, torch.float16: package.data_type.HALF}
        self._graphs: dict[tuple[torch.Size, torch.dtype], tuple[_Graph, _Graph] | None] = {}
        self._handles: dict[int, Any] = {}
        # (stream, bytes) → uint8 storage: library scratch. Never replaced, for captured graphs keep its address.
        self.workspaces: dict[tuple[int, int], torch.Tensor] = {}

    def takes(self, qkv: torch.Tensor) -> bool:
        """Whether cuDNN computes this both ways: bfloat16 or float16, and a shape it has kernels for. The first time for a
        shape the graphs are built, and a refusal is warned of.

        Raises:
            CaptureError: inside a capture, and this shape was not seen before.
        """
        if not kernels.usable(qkv) or qkv.dtype not in self._types or not qkv.is_contiguous() or qkv.data_ptr() % _ALIGNMENT:
            return False
        key = qkv.shape, qkv.dtype
        if key not in self._graphs:
            self._outside_capture(f"no cuDNN graph yet for attention of qkv {list(qkv.shape)} in {qkv.dtype}")
            self._graphs[key] = self._built(qkv)
        return self._graphs[key] is not None

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention with scale ``head_dim ** -0.5``.

        Returns:
            y as ``[batch, sequence, kv_heads, group, head_dim]``, and for the backward each query's float32 logarithm of the
            sum of exponentials, natural, as ``[batch, kv_heads, group, sequence]``; both contiguous.
        """
        graph, _ = self._taken(qkv)
        batch, sequence, kv_heads, parts, head_dim = qkv.shape
        y = torch.empty(batch, sequence, kv_heads, parts - 2, head_dim, dtype=qkv.dtype, device=qkv.device)
        lse = torch.empty(batch, kv_heads, parts - 2, sequence, dtype=torch.float32, device=qkv.device)
        kernels.launched("cudnn_attention", qkv, y, lse, len(graph.starts))
        self._launch(graph, qkv, {"q": qkv, "k": qkv, "v": qkv, "o": y, "stats": lse})
        return y, lse

    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """d(qkv), the same bytes every time; ``y`` and ``lse`` are what :meth:`forward` gave, ``dy`` has y's shape."""
        _, graph = self._taken(qkv)
        y, lse, dy = y.contiguous(), lse.contiguous(), dy.contiguous()
        dqkv = torch.empty_like(qkv)
        kernels.launched("cudnn_attention_backward", qkv, y, lse, dy, dqkv, len(graph.starts))
        read = {"q": qkv, "k": qkv, "v": qkv, "o": y, "dO": dy, "stats": lse}
        self._launch(graph, qkv, {**read, "dq": dqkv, "dk": dqkv, "dv": dqkv})
        return dqkv

    def close(self) -> None:
        """Free graphs, handles and workspaces; captured graphs that use them must be gone."""
        self._graphs.clear()
        for handle in self._handles.values():
            self._cudnn.destroy_handle(handle)
        self._handles.clear()
        self.workspaces.clear()

    # ---- graphs ------------------------------------------------------------------------------------------------

    def _taken(self, qkv: torch.Tensor) -> tuple[_Graph, _Graph]:
        graphs = self._graphs[qkv.shape, qkv.dtype] if self.takes(qkv) else None
        if graphs is None:
            raise QEffectError(f"cuDNN does not take attention of qkv {list(qkv.shape)} in {qkv.dtype}: ask takes() first")
        return graphs

    def _built(self, qkv: torch.Tensor) -> tuple[_Graph, _Graph] | None:
        try:
            with torch.cuda.device(self.device):
                return self._build(qkv, _FORWARD, None), self._build(qkv, _BACKWARD, self.workspace_limit)
        except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            case = f"attention of qkv {list(qkv.shape)} in {qkv.dtype}"
            warnings.warn(f"cuDNN has no deterministic kernels for {case}, so slower ones run: {error}", stacklevel=4)
            return None

    def _build(self, qkv: torch.Tensor, names: tuple[str, ...], limit: int | None) -> _Graph:
        cudnn, kind, wide = self._cudnn, self._types[qkv.dtype], self._cudnn.data_type.FLOAT
        batch, _, kv_heads, _, head_dim = qkv.shape
        rows, whole = _heads_at_once(qkv, limit)
        graph = cudnn.pygraph(
            handle=self._handle(torch.cuda.current_stream(self.device)),
            io_data_type=kind,
            intermediate_data_type=wide,
            compute_data_type=wide,
        )
        places = {name: _place(name, qkv.shape, None if whole else rows) for name in names}
        inputs = {
            name: graph.tensor(name=name, dim=dim, stride=stride, data_type=wide if name == "stats" else kind, uid=uid)
            for uid, (name, (dim, stride)) in enumerate(places.items())
            if name not in _MADE[names]
        }
        causal = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
        options = {"attn_scale": head_dim**-0.5, **causal}
        if names is _BACKWARD:
            made = graph.sdpa_backward(**inputs, **options, use_deterministic_algorithm=True)
        else:
            made = graph.sdpa(**inputs, **options, generate_stats=True)
        for name, output in zip(_MADE[names], made, strict=True):
            dim, stride = places[name]
            output.set_uid(names.index(name)).set_output(True).set_dim(dim).set_stride(stride)
            output.set_data_type(wide if name == "stats" else kind)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        if graph.selected_engine is not None:  # the package's own kernels, compiled where they run
            raise RuntimeError("only kernels outside of cuDNN take it")
        starts = [(0, 0)] if whole else [(item, head) for item in range(batch) for head in range(0, kv_heads, rows)]
        return _Graph(graph, names, tuple(starts), graph.get_workspace_size())

    # ---- launches ----------------------------------------------------------------------------------------------

    def _launch(self, graph: _Graph, qkv: torch.Tensor, operands: dict[str, torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        handle, workspace = self._handle(stream), self.workspace(stream, graph.workspace_bytes)
        for item, head in graph.starts:
            addresses = {}
            for uid, name in enumerate(graph.names):
                strides, offset = _layout(name, qkv.shape)
                elements = offset + item * strides[0] + head * strides[1]
                addresses[uid] = operands[name].data_ptr() + elements * operands[name].element_size()
                if addresses[uid] % _ALIGNMENT:
                    raise ValueError(f"attention's {name} lies at an address that {_ALIGNMENT} does not divide")
            graph.graph.execute(addresses, workspace, handle=handle)

    def _handle(self, stream: torch.cuda.Stream) -> Any:
        """``stream``'s handle, made at the first request: a handle carries its stream."""
        found = self._handles.get(stream.cuda_stream)
        if found is None:
            self._outside_capture(f"stream {stream.cuda_stream:#x} has no cuDNN handle")
            with torch.cuda.device(self.device):
                found = self._cudnn.create_handle()
            self._cudnn.set_stream(found, stream.cuda_stream)
            self._handles[stream.cuda_stream] = found
        return found

    def workspace(self, stream: torch.cuda.Stream, size: int) -> torch.Tensor | None:
        """``stream``'s workspace of ``size`` bytes, allocated at the first request; None for 0 bytes."""
        if not size:
            return None
        found = self.workspaces.get((stream.cuda_stream, size))
        if found is None:
            self._outside_capture(f"stream {stream.cuda_stream:#x} has no cuDNN workspace of {size} bytes")
            found = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.workspaces[stream.cuda_stream, size] = found
        return found

    @staticmethod
    def _outside_capture(problem: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{problem}: run this work once before it is captured", operation="attention")


# ---- layouts -------------------------------------------------------------------------------------------------------


def _layout(name: str, shape: torch.Size) -> tuple[tuple[int, int, int, int, int], int]:
    """An operand's strides over [sequence of the batch, KV head, query head of it, token, element] and its first element."""
    _, sequence, kv_heads, parts, head_dim = shape
    group = parts - 2
    if name == "stats":
        return (kv_heads * group * sequence, group * sequence, sequence, 1, 1), 0
    heads = group if name in ("o", "dO") else parts
    token = kv_heads * heads * head_dim
    first = {"k": group, "v": group + 1}.get(name[-1], 0) * head_dim
    one_head = name[-1] in ("k", "v")
    return (sequence * token, heads * head_dim, sequence * token if one_head else head_dim, token, 1), first


def _place(name: str, shape: torch.Size, rows: int | None) -> tuple[list[int], list[int]]:
    """An operand's four dimensions and strides in a graph: ``[rows, query heads of a KV head, token, element]`` of one
    sequence, or ``[sequence, head, token, element]`` of the whole batch (rows None; one query head per KV head)."""
    batch, sequence, kv_heads, parts, head_dim = shape
    strides, _ = _layout(name, shape)
    last = [sequence, 1 if name == "stats" else head_dim]
    if rows is None:
        return [batch, kv_heads, *last], [strides[0], strides[1], *strides[3:]]
    return [rows, 1 if name[-1] in ("k", "v") else parts - 2, *last], list(strides[1:])


def _heads_at_once(qkv: torch.Tensor, limit: int | None) -> tuple[int, bool]:
    """KV heads per launch, and whether one launch takes the whole batch: several query heads per KV head have no common
    stride over all KV heads, so a sequence is then a batch of KV heads."""
    batch, sequence, kv_heads, parts, _ = qkv.shape
    padded = -(-sequence // 128) * 128  # cuDNN pads its matrices
    fit = batch * kv_heads if limit is None else limit // ((parts - 2) * padded * padded * qkv.element_size())
    if parts == 3 and batch > 1 and batch * kv_heads <= fit:
        return kv_heads, True
    return max(rows for rows in range(1, kv_heads + 1) if kv_heads % rows == 0 and rows <= max(fit, 1)), False


def scores_bytes(qkv: torch.Tensor, limit: int = WORKSPACE_LIMIT) -> int:
    """Bytes of the matrices d(scores) that the backward of ``qkv`` (of any device) keeps in its workspace at once."""
    batch, sequence, _, parts, _ = qkv.shape
    rows, whole = _heads_at_once(qkv, limit)
    padded = -(-sequence // 128) * 128
    return (batch if whole else 1) * rows * (parts - 2) * padded * padded * qkv.element_size()


# ---- the package ---------------------------------------------------------------------------------------------------


def load(device: torch.device | str) -> CudnnAttention | None:
    """cuDNN's attention on ``device``, or None and a warning with the reason and the remedy."""
    try:
        return CudnnAttention(device, _package())
    except QEffectError as error:
        warnings.warn(f"attention runs on slower kernels than cuDNN's: {error}", stacklevel=2)
        return None


def _package() -> Any:
    """The module ``cudnn``.

    Raises:
        QEffectError: it is missing, does not load, is too old, or found another cuDNN than torch runs.
    """
    wanted = ".".join(map(str, OLDEST))
    install = f"pip install '{PACKAGE}>={wanted}'"
    try:
        cudnn = importlib.import_module("cudnn")
        version, backend = str(cudnn.__version__), int(cudnn.backend_version())
    except ImportError as error:
        raise QEffectError(f"{PACKAGE} is not there ({error}): {install}") from error
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise QEffectError(f"{PACKAGE} does not load ({type(error).__name__}: {error}): {install}") from error
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise QEffectError(f"{PACKAGE} {version} is older than {wanted}: {install}")
    if backend != torch.backends.cudnn.version():
        raise QEffectError(
            f"{PACKAGE} found cuDNN {backend} and torch runs {torch.backends.cudnn.version()}, and parts of two do not work "
            "together: put the folder of torch's libcudnn.so first in LD_LIBRARY_PATH before the process starts"
        )
    return cudnn
