"""What the work of a model's parts holds of memory, found by running it over tensors without data.

A small model of the run's own parts (embedding, one decoder layer of each kind, head with its loss), each a chunk, runs one
step through the engine: same layers, shapes, recipe and contract as the run, nothing is computed and nothing allocated. What
is counted is what the code itself makes and lets go. For a CPU the tensors are torch's fake ones, for a GPU those of the meta
device, on which layers take the path of their kernels (:func:`qeffect_lm.kernels.on_gpu`); the kernels are not launched.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.actions import Action, Kind
from pipeline.stage import Stage
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.app.profile import Microbatches, in_fp8, made_up_batch
from qeffect_lm.config import Config
from qeffect_lm.layers.attention import bind_attention
from qeffect_lm.layers.context import Phase
from qeffect_lm.layers.linear import bind_products
from qeffect_lm.layers.moe import bind_experts
from qeffect_lm.optim import adamw, norm
from qeffect_lm.parallel import expert, tensor
from qeffect_lm.parallel.mesh import Mesh

LayerKind = tuple[bool, str]
"""Of a decoder layer: whether it is in FP8, and its recompute."""


@dataclass(frozen=True)
class Held:
    """Bytes of one piece of work: alive after it, most alive while it ran, and all that it made."""

    left: int = 0
    peak: int = 0
    made: int = 0

    def times(self, factor: int) -> Held:
        return Held(self.left * factor, self.peak * factor, self.made * factor)


@dataclass(frozen=True)
class PartBytes:
    """One microbatch of a part, from nothing before F to nothing after W; without the slots' own buffers."""

    f: Held
    i: Held
    w: Held

    def times(self, factor: int) -> PartBytes:
        return PartBytes(self.f.times(factor), self.i.times(factor), self.w.times(factor))


_Parts = tuple[PartBytes, dict["LayerKind", PartBytes], PartBytes]


@dataclass(frozen=True)
class Rehearsed:
    """Of every part of a model.

    Attributes:
        embedding, layers, head: one microbatch of each; ``layers`` by kind.
        calibration: the same for a fresh run's calibration, in the order of the model's parts; empty where there is none.
        end: name of each piece of a step's end → (bytes at its peak, bytes it makes) as (a, b) of a + b · elements.
        kernels: whether a GPU's kernels were what ran (they need Triton; without it torch's operations hold more).
    """

    embedding: PartBytes
    layers: dict[LayerKind, PartBytes]
    head: PartBytes
    calibration: tuple[PartBytes, dict[LayerKind, PartBytes], PartBytes] | None
    end: dict[str, tuple[tuple[float, float], tuple[float, float]]]
    kernels: bool

    def times(self, factor: int) -> Rehearsed:
        """Of a microbatch of so many times the sequences: but for a few bytes of counts all that it holds grows with them."""
        if factor == 1:
            return self
        calibration = None if self.calibration is None else _times(self.calibration, factor)
        embedding, layers, head = _times((self.embedding, self.layers, self.head), factor)
        return replace(self, embedding=embedding, layers=layers, head=head, calibration=calibration)


def _times(parts: _Parts, factor: int) -> _Parts:
    embedding, layers, head = parts
    return embedding.times(factor), {kind: part.times(factor) for kind, part in layers.items()}, head.times(factor)


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live. What an operation reads was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.made = 0
        self._known: set[int] = set()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._know(leaf.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _know(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._known.discard, key)  # the identity may come back

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or key in self._known:
            return
        self._sizes[key] = size
        self.now += size
        self.made += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def during(self, work: Callable[[], object]) -> Held:
        """Run ``work``; bytes beside those that lived before."""
        before, self.peak, made = self.now, self.now, self.made
        work()
        return Held(self.now - before, self.peak - before, self.made - made)


@dataclass
class _Watch:
    """An engine's watch: what each F, I and W of one step adds."""

    live: Live
    found: dict[tuple[Kind, int], list[Held]] = field(default_factory=dict)
    _before: tuple[int, int] = (0, 0)

    def begin(self, action: Action) -> None:
        self._before = self.live.now, self.live.made
        self.live.peak = self.live.now

    def end(self, action: Action) -> None:
        now, made = self._before
        held = Held(self.live.now - now, self.live.peak - now, self.live.made - made)
        self.found.setdefault((action.kind, action.key[0]), []).append(held)


class _Products:
    """In the place of a GPU's products: every result's storage is its caller's."""

    def matmul(self, *arguments: Any, **keywords: Any) -> None: ...


class _AttentionOnly:
    """In the place of cuDNN's attention: what it hands over."""

    def takes(self, qkv: torch.Tensor) -> bool:
        return True

    def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, sequence, kv_heads, parts, head_dim = qkv.shape
        y = torch.empty(batch, sequence, kv_heads, parts - 2, head_dim, dtype=qkv.dtype, device=qkv.device)
        return y, torch.empty(batch, kv_heads, parts - 2, sequence, dtype=torch.float32, device=qkv.device)

    def backward(self, qkv: torch.Tensor, y: torch.Tensor, lse: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(qkv)


def rehearse(config: Config, device: str, like: Rehearsed | None = None) -> Rehearsed:
    """Run the parts of ``config``'s model on a device (``cpu`` or ``cuda``) that need not be there; some 100 ms a part.

    ``like``: of the same model in another layout, whose step's end holds as much for as many elements.
    """
    kinds = sorted(set(layer_kinds(config)))
    parts, calibration, ends, elements = _rehearse(config, kinds, 1, device)
    if like is None:
        _, _, more_ends, more = _rehearse(config, kinds, 2, device)
        end = {
            name: (_line(elements, one.peak, more, more_ends[name].peak), _line(elements, one.made, more, more_ends[name].made))
            for name, one in ends.items()
        }
    else:
        end = like.end
    shaped = [(one[0], dict(zip(kinds, one[1:-1], strict=True)), one[-1]) if one else None for one in (parts, calibration)]
    assert shaped[0] is not None
    return Rehearsed(*shaped[0], shaped[1], end, kernels=device == "cpu" or find_spec("triton") is not None)


def layer_kinds(config: Config) -> list[LayerKind]:
    """Of every decoder layer."""
    model = config.model
    chosen = range(model.num_layers) if model.recompute_layers is None else model.recompute_layers
    return [(fp8, model.recompute if i in chosen else "none") for i, fp8 in enumerate(in_fp8(config))]


def _line(x0: int, y0: int, x1: int, y1: int) -> tuple[float, float]:
    """(a, b) of y = a + b x."""
    slope = (y1 - y0) / (x1 - x0)
    return y0 - slope * x0, slope


def _small(config: Config, kinds: list[LayerKind], copies: int) -> Config:
    """One process, ``copies`` decoder layers of each kind, each part a chunk; the kinds out of FP8 come first."""
    small = config.to_dict()
    layers = [kind for kind in kinds for _ in range(copies)]
    again = [i for i, (_, recompute) in enumerate(layers) if recompute != "none"]
    small["model"] |= {"num_layers": len(layers), "backend": "native", "max_window_layers": 0}
    small["model"] |= {"recompute": config.model.recompute if again else "none", "recompute_layers": again or None}
    fp8 = config.precision.fp8.recipe != "none"
    small["precision"]["fp8"] |= {"high_precision_first": sum(not kind[0] for kind in layers) if fp8 else 0}
    small["precision"]["fp8"] |= {"high_precision_last": 0}
    if config.precision.fp8.recipe == "block":  # Transformer Engine's own; its operands are as large
        small["precision"]["fp8"] |= {"recipe": "delayed"}
    small["parallel"] = {key: small["parallel"][key] for key in ("ep", "cp", "tp", "sequence_parallel")}
    joined = config.pipeline.coalesce_w if config.model.backend == "native" else 1
    small["pipeline"] = {
        "schedule": "interleaved-1f1b",
        "microbatches": 2 * joined,
        "chunks": len(layers) + 2,
        "stage_layers": [0, *[1] * len(layers), 0],
        "coalesce_w": joined,
    }
    small["graphs"] = {}
    small["contract"] = {"mode": "enforce"}
    small["run"] = {**small["run"], "device": "cpu"}
    small["optim"] |= {"backend": "native", "zero": 0}
    small["checkpoint"] = {}
    return Config.from_dict(small)


_Found = tuple[list[PartBytes], list[PartBytes], dict[str, Held], int]


def _rehearse(config: Config, kinds: list[LayerKind], copies: int, device: str) -> _Found:
    """Of each part: a microbatch in a step, in calibration; then the pieces of the step's end, and for how many elements."""
    small = _small(config, kinds, copies)
    with _without_data(device, even=config.graphs.backend == "eager") as where:
        assembly = assemble(small, Mesh(small.parallel.sizes), device=where, rehearsal=True)
        elements = assembly.flat.grad_buffer.numel()
        if where.type == "meta":
            for stage in assembly.engine.stages.values():
                bind_products(stage.chunk, _Products())  # type: ignore[arg-type]
                bind_attention(stage.chunk, _AttentionOnly())
                bind_experts(stage.chunk)
        assembly.rebuild_caches()
        live = Live()
        calibration = _calibrated(assembly, live) if _calibrates(small) else []
        parts = _stepped(assembly, small, live)
        with live, torch.no_grad():
            ends = {name: live.during(work) for name, work in assembly.engine.end_work().items()}
    pick = [0, *range(1, 1 + copies * len(kinds), copies), -1]
    return [parts[i] for i in pick], [calibration[i] for i in pick] if calibration else [], ends, elements


def _calibrates(config: Config) -> bool:
    return config.precision.fp8.recipe == "delayed" and config.precision.fp8.window == "step"


@contextmanager
def _without_data(device: str, even: bool) -> Iterator[torch.device]:
    """The device whose tensors stand for those of ``device``; nothing is launched. ``even``: experts' ranks exchange as many
    rows as with even routing, not the most that there could be."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        exchanges = [(tensor, name) for name in ("all_gather", "_reduce_scatter", "_all_reduce")]
        for module, name in (*exchanges, (expert, "_all_to_all"), (expert, "_all_reduce")):  # with peers, who are not there
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda *arguments, **keywords: None)
        if even:
            stack.callback(setattr, expert, "rows_between", expert.rows_between)
            expert.rows_between = lambda tokens, k, each, ranks: -(-tokens * k // ranks)
        if device == "cpu":
            for module, name in ((adamw, "CPU_CHUNK"), (norm, "BLOCK")):  # pieces that small are no more than time here
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, 2**40)
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield torch.device("cpu")
            return
        if find_spec("triton") is not None:
            from triton.runtime.jit import KernelInterface

            launch = KernelInterface.__getitem__
            KernelInterface.__getitem__ = lambda self, grid: lambda *arguments, **keywords: None
            stack.callback(setattr, KernelInterface, "__getitem__", launch)
        yield torch.device("meta")


def _batch(config: Config, device: torch.device) -> Microbatches:
    one, m = made_up_batch(config), config.pipeline.microbatches
    inputs, targets, mask = (tensor.repeat(m, 1, 1).to(device) for tensor in (one.inputs, one.targets, one.loss_mask))
    starts = None if one.starts is None else one.starts.repeat(m, 1, 1).to(device)
    return Microbatches(inputs, targets, mask, one.tokens, starts)


def _stepped(assembly: Assembly, config: Config, live: Live) -> list[PartBytes]:
    """The work of a step; of each chunk what its microbatches but the first add, which makes what is made once."""
    watch, engine = _Watch(live), assembly.engine
    engine.watch = watch
    batch = _batch(config, engine.divisor.device)
    with live:
        assembly.ledger.begin_step(0)
        engine.inputs.load(0, batch)
        commits = [action for action in engine.actions if action.kind is Kind.COMMIT and action.chunk is not None]
        engine.run_actions([action for action in engine.actions if action.is_compute or action in commits])
    engine.watch = None
    return [
        _part(*(_most(watch.found[kind, chunk][1:]) for kind in (Kind.F, Kind.I, Kind.W)))
        for chunk in range(assembly.plan.placement.num_chunks)
    ]


def _most(found: list[Held]) -> Held:
    return Held(*(max(values) for values in zip(*((one.left, one.peak, one.made) for one in found), strict=True)))


def _part(f: Held, i: Held, w: Held) -> PartBytes:
    """From what each adds to what there is before it: what there is."""
    i = Held(f.left + i.left, f.left + i.peak, i.made)
    return PartBytes(f, i, Held(i.left + w.left, i.left + w.peak, w.made))


def _calibrated(assembly: Assembly, live: Live) -> list[PartBytes]:
    """F and I in high precision, as :func:`pipeline.calibrate.calibrate` runs them."""

    def one(stage: Stage) -> PartBytes:
        slot = stage.make_slot(Phase.CALIBRATE)
        with live:
            f = live.during(lambda: stage.forward(slot, None))
            i = live.during(lambda: stage.input_grad(slot, None))
        return _part(f, i, Held())

    return [one(stage) for _, stage in sorted(assembly.engine.stages.items())]
