"""A stand-in for NVIDIA's module ``cudnn``: it takes attention graphs as the package documents them and computes them on CPU,
from the addresses, dimensions and strides that it was given."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import torch

BUILD = ["validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"]
DTYPES = {"bf16": torch.bfloat16, "half": torch.float16, "float": torch.float32}


class NotSupported(Exception):
    pass


class Cudnn:
    """The module. ``refuses`` is a message to decline graphs with; ``engine`` is what a built graph says serves it."""

    data_type = SimpleNamespace(BFLOAT16="bf16", HALF="half", FLOAT="float")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="top left")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
    cudnnGraphNotSupportedError = NotSupported

    def __init__(self, version: str = "1.29.0", backend: int = 91900) -> None:
        self.__version__, self._backend = version, backend
        self.graphs: list[Graph] = []
        self.handles: list[SimpleNamespace] = []
        self.launches: list[tuple[Graph, int, int]] = []  # graph, stream, workspace's address
        self.refuses = self.engine = None

    def backend_version(self) -> int:
        return self._backend

    def create_handle(self) -> SimpleNamespace:
        self.handles.append(SimpleNamespace(stream=0, alive=True))
        return self.handles[-1]

    def set_stream(self, handle: SimpleNamespace, stream: int) -> None:
        handle.stream = stream

    def destroy_handle(self, handle: SimpleNamespace) -> None:
        handle.alive = False

    def pygraph(self, handle, io_data_type, intermediate_data_type, compute_data_type) -> Graph:
        assert handle in self.handles and (intermediate_data_type, compute_data_type) == ("float", "float")
        self.graphs.append(Graph(self, io_data_type))
        return self.graphs[-1]


class Tensor:
    def __init__(self, **values) -> None:
        self.__dict__.update(values)
        self.output = False

    def _set(self, name: str, value) -> Tensor:
        setattr(self, name, value)
        return self

    def set_uid(self, uid):
        return self._set("uid", uid)

    def set_output(self, output):
        return self._set("output", output)

    def set_dim(self, dim):
        return self._set("dim", dim)

    def set_stride(self, stride):
        return self._set("stride", stride)

    def set_data_type(self, data_type):
        return self._set("data_type", data_type)

    def at(self, addresses: dict[int, int]) -> torch.Tensor:
        """The memory at this tensor's address, as it lies there."""
        address, dtype = addresses[self.uid], DTYPES[self.data_type]
        assert address % 16 == 0 and len(self.dim) == len(self.stride) == 4
        count = 1 + sum((size - 1) * step for size, step in zip(self.dim, self.stride, strict=True))
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(raw, dtype=dtype).as_strided(self.dim, self.stride)


class Graph:
    def __init__(self, library: Cudnn, io_type: str) -> None:
        self.library, self.io_type, self.called = library, io_type, []
        self.tensors: list[Tensor] = []
        self.selected_engine = None

    def tensor(self, name, dim, stride, data_type, uid) -> Tensor:
        self.tensors.append(Tensor(name=name, dim=dim, stride=stride, data_type=data_type, uid=uid))
        return self.tensors[-1]

    def _made(self, *names: str) -> list[Tensor]:
        made = [Tensor(name=name) for name in names]
        self.tensors += made
        return made

    def sdpa(self, q, k, v, attn_scale, diagonal_alignment, diagonal_band_right_bound, generate_stats) -> list[Tensor]:
        assert (diagonal_alignment, diagonal_band_right_bound, generate_stats) == ("top left", 0, True)
        self.scale, self.run = attn_scale, self._forward
        return self._made("o", "stats")

    def sdpa_backward(
        self, q, k, v, o, dO, stats, attn_scale, diagonal_alignment, diagonal_band_right_bound, use_deterministic_algorithm
    ) -> list[Tensor]:
        assert (diagonal_alignment, diagonal_band_right_bound) == ("top left", 0)
        assert use_deterministic_algorithm is True
        self.scale, self.run = attn_scale, self._backward
        return self._made("dq", "dk", "dv")

    def __getattr__(self, name: str):
        if name not in BUILD:
            raise AttributeError(name)

        def step(*arguments):
            self.called.append(name)
            if name == "check_support" and self.library.refuses:
                raise NotSupported(self.library.refuses)
            self.selected_engine = self.library.engine

        return step

    def get_workspace_size(self) -> int:
        assert self.called == BUILD
        shape = next(t.dim for t in self.tensors if t.name == "q")
        return 0 if self.run == self._forward else 2 * shape[0] * shape[1] * shape[2] ** 2

    def execute(self, addresses, workspace, handle) -> None:
        assert handle.alive and self.called == BUILD and sorted(addresses) == sorted(t.uid for t in self.tensors)
        size = self.get_workspace_size()
        assert workspace is None if size == 0 else workspace.numel() == size
        assert all(t.data_type == ("float" if t.name == "stats" else self.io_type) for t in self.tensors)
        self.library.launches.append((self, handle.stream, 0 if workspace is None else workspace.data_ptr()))
        self.run({t.name: t.at(addresses) for t in self.tensors})

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = q.double() @ k.double().transpose(-1, -2) * self.scale
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)

    def _forward(self, at: dict[str, torch.Tensor]) -> None:
        scores = self._scores(at["q"], at["k"])
        at["o"].copy_(torch.softmax(scores, dim=-1) @ at["v"].double())
        at["stats"].copy_(scores.logsumexp(dim=-1, keepdim=True))

    def _backward(self, at: dict[str, torch.Tensor]) -> None:
        """With one KV head for all query heads, or as many (what the caller may ask for)."""
        q, k, v, dy = (at[name].double() for name in ("q", "k", "v", "dO"))
        p = torch.exp(self._scores(q, k) - at["stats"].double())
        delta = (dy * at["o"].double()).sum(dim=-1, keepdim=True)
        ds = p * (dy @ v.transpose(-1, -2) - delta) * self.scale
        dk, dv = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
        if k.shape[1] != q.shape[1]:
            dk, dv = dk.sum(dim=1, keepdim=True), dv.sum(dim=1, keepdim=True)
        for name, value in (("dq", ds @ k), ("dk", dk), ("dv", dv)):
            at[name].copy_(value)
