"""Four decoder layers, four microbatches, forward and backward on one GPU: Transformer Engine and ours, eager and captured.

Rows of one run, at the same sizes, with the same work (RMSNorm, causal attention with RoPE, SwiGLU of 2.75 times the hidden
size, residuals, FP8 delayed scaling, FP32 main gradients accumulated by the products, weights cast once a step):

te eager       Transformer Engine's modules, driven as its documentation says
te graphs      the same through ``make_graphed_callables``: one graph pair for all microbatches, or one for each (``_order``)
native, te     ours with either backend, eager, from graphs of F, I and W, and from one graph of all of them (as with
               ``graphs.scope: step``), in an order that is not last-in-first-out

A time is the median of synchronised rounds of all microbatches; the roll of the scales is in, the optimizer is not. GPU-busy
time is the union of all kernels' intervals (torch.profiler). Memory is what torch's allocator holds at most for a row, weights
and graphs' pools included.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.actions import Action, Kind
from pipeline.capture import preparing
from pipeline.plan import Plan, make_plan
from pipeline.program import COMPUTE
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.contract.leases import Slot
from qeffect_lm.data.loader import StepBatch
from qeffect_lm.graphs.backend import Graph, GraphBackend
from qeffect_lm.graphs.cuda_graphs import CudaGraphs
from tools.benchmarks.weights import drawn_on_device

SHAPES = ((1024, 512), (1024, 2048), (2048, 1024), (2048, 2048), (4096, 1024), (4096, 2048), (4096, 4096))
LAYERS, MICROBATCHES = 4, 4
ORDER = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
CHUNK = 1  # of three: the embedding and the head are others
Round = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """``tokens`` are one sequence, a microbatch."""

    hidden: int
    tokens: int
    layers: int = LAYERS
    device: str = "cuda"
    main_grads: str = "float32"

    @property
    def heads(self) -> int:
        return self.hidden // (64 if self.hidden <= 1024 else 128)

    @property
    def ffn(self) -> int:
        return self.hidden * 11 // 4

    def config(self, backend: str, graphs: str) -> Config:
        return Config.from_dict(
            {
                "run": {"name": "layers", "device": self.device},
                "model": {
                    "backend": backend,
                    "vocab_size": 64,
                    "hidden_size": self.hidden,
                    "num_layers": self.layers,
                    "num_heads": self.heads,
                    "num_kv_heads": self.heads,
                    "ffn_size": self.ffn,
                },
                "precision": {
                    "dtype": "bfloat16",
                    "main_grads": self.main_grads,
                    "fp8": {"recipe": "delayed", "history": 16},
                },
                "pipeline": {
                    "schedule": "interleaved-1f1b",
                    "chunks": 3,
                    "microbatches": MICROBATCHES,
                    "stage_layers": [0, self.layers, 0],
                },
                "graphs": {"backend": graphs},
                "data": {"seq_len": self.tokens, "microbatch_size": 1},
                "train": {"steps": 1},
            }
        )


def plan() -> Plan:
    """All three chunks on one rank, in :data:`ORDER`."""
    row = []
    for word in ORDER.split():
        chunks = (0, 1, 2) if word[0] == "F" else (2, 1, 0)
        row += [Action(Kind(word[0]), chunk, int(word[1:])) for chunk in chunks]
    return make_plan("layers", [row], Placement((0, 0, 0)), MICROBATCHES)


def batch(size: Size) -> StepBatch:
    shape = (MICROBATCHES, 1, size.tokens)
    tokens = torch.randint(0, 64, (*shape[:2], shape[2] + 1), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(shape[:2], dtype=torch.int64)
    return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), torch.ones(shape), ids, tokens.numel())


# ---- ours ------------------------------------------------------------------------------------------------------------


def ours(size: Size, backend: str) -> Iterator[tuple[str, Round, float]]:
    """(name, one round, seconds to capture) of a backend: eager, then from graphs."""
    assembly = assembled(size, backend)
    assembly.prepare(batch(size))
    fill(assembly)
    yield f"{backend} eager", round_of(assembly), 0.0
    assembly.config = size.config(backend, "cuda_graphs")
    torch.cuda.synchronize()
    began = time.perf_counter()
    assembly.capture()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    fill(assembly)
    yield f"{backend} graphs", round_of(assembly), seconds
    assembly.release()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph = one_graph(assembly)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    fill(assembly)
    yield f"{backend} one graph", replaying(assembly, graph), seconds
    graph.reset()


def assembled(size: Size, backend: str) -> Assembly:
    """All of :func:`plan` on this process, eager so far."""
    with drawn_on_device():
        return assemble(size.config(backend, "eager"), plan=plan())


def fill(assembly: Assembly) -> None:
    """Inputs and output gradients of the middle chunk, the same at each call."""
    generator = torch.Generator(assembly.flat.device).manual_seed(1)
    for slot in assembly.engine.stages[CHUNK].slots:
        slot.x.normal_(generator=generator)
        slot.dy.normal_(generator=generator).mul_(1e-3)


def round_of(assembly: Assembly, commit: bool = True) -> Round:
    """The middle chunk's F, I and W of every microbatch, and the commit; under the ledger. Without the commit, scales stay and
    every round gives the same bits."""
    engine, ledger = assembly.engine, assembly.ledger
    work, number = work_of(assembly, commit), 0

    def once() -> None:
        nonlocal number
        number += 1
        ledger.begin_step(number)
        with engine.computing():
            work()
        ledger.abandon_step()

    return once


def work_of(assembly: Assembly, commit: bool) -> Round:
    """What :func:`round_of` launches, eagerly or from the graphs that the engine has by then."""
    engine, ledger = assembly.engine, assembly.ledger
    stage = engine.stages[CHUNK]
    actions = [a for a in engine.actions if a.is_compute and a.chunk == CHUNK]
    slots = engine.plan.slots[0]

    def run(action: Action) -> None:
        key = engine.plan.graph_key(action)
        places = (Slot("I", CHUNK, key.i_slot), Slot("W", CHUNK, key.w_slot))
        assert action.microbatch is not None
        if engine.captured is not None:
            graph, summary = engine.captured.actions[key]
            ledger.replay(summary, CHUNK, action.microbatch, slots=places)
            graph.replay()
            return
        slot = stage.slots[slots.i_slots.index[action.key]]
        with ledger.action(str(action.kind), CHUNK, action.microbatch, beta=key.beta, slots=places) as scope:
            work: dict[Kind, Callable[..., None]] = {Kind.F: stage.forward, Kind.I: stage.input_grad, Kind.W: stage.weight_grad}
            work[action.kind](slot, scope)

    def all_of_it() -> None:
        for action in actions:
            run(action)
        if not commit:
            pass
        elif engine.captured is not None:
            engine.captured.end["commit"].replay()
        else:
            with torch.no_grad():
                engine.end.commit_()

    return all_of_it


def one_graph(assembly: Assembly, backend: GraphBackend | None = None, commit: bool = True) -> Graph:
    """The same work as one graph; the ledger checks it while it is captured."""
    engine, ledger = assembly.engine, assembly.ledger
    if backend is None:
        stream = engine.streams.real(COMPUTE)
        assert stream is not None, "given a backend, or on a GPU"
        backend = CudaGraphs(stream)
    with preparing(engine, backend, assembly.register), ledger.recording(checked=True):
        ledger.begin_step(-1)
        return backend.capture("a round", work_of(assembly, commit), register=assembly.register)


def replaying(assembly: Assembly, graph: Graph) -> Round:
    """A round from its graph."""

    def once() -> None:
        with assembly.engine.computing():
            graph.replay()

    return once


# ---- Transformer Engine alone ------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Transformer Engine's modules and residuals, with its fused RoPE. ``given`` are further options of its linears."""

    def __init__(self, te: Any, size: Size, **given: Any) -> None:
        super().__init__()
        options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda", "fuse_wgrad_accumulation": True, **given}
        norm = {"normalization": "RMSNorm", **options}
        h, d = size.hidden, size.hidden // size.heads
        self.heads, self.head_dim = size.heads, d
        self.rotate = te.attention.rope.apply_rotary_pos_emb
        self.frequencies = te.attention.RotaryPositionEmbedding(d)(size.tokens).cuda()
        self.qkv = nn.ModuleList(te.LayerNormLinear(h, 3 * h, **norm) for _ in range(size.layers))
        self.core = nn.ModuleList(
            te.DotProductAttention(size.heads, d, attention_dropout=0.0, qkv_format="bshd", attn_mask_type="causal")
            for _ in range(size.layers)
        )
        self.out = nn.ModuleList(te.Linear(h, h, **options) for _ in range(size.layers))
        self.mlp = nn.ModuleList(te.LayerNormMLP(h, size.ffn, activation="swiglu", **norm) for _ in range(size.layers))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
            assert weight.dtype is torch.bfloat16, name

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        first = {"is_first_microbatch": is_first_microbatch}
        for qkv, core, out, mlp in zip(self.qkv, self.core, self.out, self.mlp, strict=True):
            q, k, v = qkv(x, **first).view(*x.shape[:2], self.heads, 3 * self.head_dim).split(self.head_dim, dim=-1)
            q, k = (self.rotate(t.contiguous(), self.frequencies, tensor_format="bshd", fused=True) for t in (q, k))
            x = x + out(core(q, k, v.contiguous()), **first)
            x = x + mlp(x, **first)
        return x


def borders(size: Size) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Inputs, which need gradients, and output gradients of every microbatch, bfloat16 ``[1, tokens, hidden]``; the same at
    each call."""
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(factor: float) -> list[torch.Tensor]:
        shape = (1, size.tokens, size.hidden)
        made = (torch.randn(shape, device="cuda", generator=generator) for _ in range(MICROBATCHES))
        return [tensor.mul_(factor).bfloat16() for tensor in made]

    return [x.requires_grad_() for x in drawn(1.0)], drawn(1e-3)


class _Theirs:
    """A stack with its data. Graphs are made by :meth:`shared` or :meth:`each`, of a stack of their own."""

    def __init__(self, size: Size, te: Any, recipe: Any) -> None:
        self.te, self.recipe = te, recipe
        self.stack = Stack(te, size)
        self.xs, self.dys = borders(size)
        self.norms = [weight for weight in self.stack.parameters() if weight.dim() == 1]
        self.options = {"num_warmup_iters": 3, "enabled": True, "recipe": recipe, "cache_quantized_params": True}

    def run(self, callables: list[Callable[..., torch.Tensor]], order: str) -> None:
        for leaf in (*self.norms, *self.xs):
            leaf.grad = None
        outs: dict[int, torch.Tensor] = {}
        for word in order.split():
            number = int(word[1:])
            if word[0] == "F":
                with self.te.autocast(enabled=True, recipe=self.recipe):
                    outs[number] = callables[number](self.xs[number], is_first_microbatch=number == 0)
            else:
                outs.pop(number).backward(self.dys[number])

    def eager(self) -> Round:
        return lambda: self.run([self.stack] * MICROBATCHES, "F0 B0 F1 B1 F2 B2 F3 B3")

    def shared(self) -> Round:
        """One pair of graphs for all microbatches, one after the other."""
        one = self.te.make_graphed_callables(self.stack, (self.xs[0],), **self.options)
        return lambda: self.run([one] * MICROBATCHES, "F0 B0 F1 B1 F2 B2 F3 B3")

    def each(self) -> Round:
        """A pair for each microbatch, in the order of 1F1B with one in flight."""
        order = [1, 1, -1, 1, -1, 1, -1, -1]
        samples = tuple((x,) for x in self.xs)
        many = self.te.make_graphed_callables((self.stack,), samples, **self.options, _order=order, _num_layers_per_chunk=[1])
        return lambda: self.run(list(many), "F0 F1 B0 F2 B1 F3 B2 B3")


def theirs(size: Size, library: Any, recipe: Any, how: str) -> Iterator[tuple[str, Round, float]]:
    """(name, one round, seconds to capture) of one way to drive Transformer Engine."""
    with own_globals(library):
        made = _Theirs(size, library.te, recipe)
        torch.cuda.synchronize()
        began = time.perf_counter()
        once = getattr(made, how)()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        name = {"eager": "te alone, eager", "shared": "te alone, one graph", "each": "te alone, graph for each"}[how]
        yield name, once, 0.0 if how == "eager" else seconds


@contextmanager
def own_globals(library: Any) -> Iterator[None]:
    """Transformer Engine keeps for the life of the process the amax of modules long gone (an eager roll goes over them too),
    the flag that skips weight casts in graphs, the mark of a capture, and, after an exception, a class's call wrapped for
    one. Each row begins and ends without them."""
    manager, graph = library.modules["pytorch.quantization"].FP8GlobalStateManager, library.modules["pytorch.graph"]
    call = Stack.__call__
    manager.reset()
    try:
        yield
    finally:
        manager.reset()
        graph.set_capture_end()
        Stack.__call__ = call  # type: ignore[method-assign]


# ---- measuring ---------------------------------------------------------------------------------------------------------


def measure(sizes: list[Size], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every row at every size."""
    from qeffect_lm.layers.te import load

    rows: list[dict[str, Any]] = []
    for size in sizes:
        library = load(torch.device("cuda", torch.cuda.current_device()), "delayed")
        recipe = library.recipes.DelayedScaling(amax_history_len=16, amax_compute_algo="max", reduce_amax=False)
        peers = [theirs(size, library, recipe, how) for how in ("eager", "shared", "each")]
        for made in (*peers, ours(size, "native"), ours(size, "te")):
            rows += _rows(size, made, rounds, say)
            gc.collect()
            torch.cuda.empty_cache()
    return rows


def _rows(
    size: Size, made: Iterator[tuple[str, Round, float]], rounds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    before = torch.cuda.memory_reserved()
    while True:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            name, once, seconds = next(made)
        except StopIteration:
            return rows
        except Exception as error:  # noqa: BLE001 (a peer that fails is a row that says so)
            say(f"hidden {size.hidden} tokens {size.tokens}: {type(error).__name__}: {str(error)[:300]}")
            rows.append({"hidden": size.hidden, "tokens": size.tokens, "row": "failed", "error": str(error)[:300]})
            return rows
        row = {
            "hidden": size.hidden,
            "tokens": size.tokens,
            "row": name,
            "ms": timed(once, rounds),
            "busy_ms": busy(once),
            "peak_gib": (torch.cuda.max_memory_reserved() - before) / 2**30,
            "capture_s": seconds,
        }
        rows.append(row)
        say(f"{line(row)}")


def timed(once: Round, rounds: int) -> float:
    """Milliseconds of a round: the median, the host waits after each."""
    for _ in range(4):
        once()
    milliseconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        once()
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - began))
    return statistics.median(milliseconds)


def busy(once: Round, rounds: int = 16) -> float:
    """Milliseconds of a round in which any kernel or copy runs: of the last quarter of ``rounds``.

    A GPU that rested, as it does while a profiler starts, runs the first rounds at a higher clock than it holds under load, and
    then a round would seem to wait for longer than it does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events.*")  # at the end of each cycle: there is one
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(rounds):
                once()
                torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return union_of_last(spans, rounds, rounds // 4) / 1e3 / (rounds // 4)


def union_of_last(spans: list[tuple[float, float]], rounds: int, last: int) -> float:
    """Time covered by the intervals of the ``last`` of equal ``rounds``."""
    spans = sorted(spans)
    total = end = 0.0
    for start, stop in spans[len(spans) * (rounds - last) // rounds :]:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['hidden']:>6} {row['tokens']:>6}  failed: {row['error']}"
    return (
        f"{row['hidden']:>6} {row['tokens']:>6}  {row['row']:24} {row['ms']:>8.2f} {row['busy_ms']:>8.2f} "
        f"{row['ms'] / row['busy_ms']:>6.3f} {row['peak_gib']:>7.2f} {row['capture_s']:>7.2f}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'hidden':>6} {'tokens':>6}  {'row':24} {'ms':>8} {'busy ms':>8} {'ratio':>6} {'GiB':>7} {'capture':>7}"
    return "\n".join([head, *map(line, rows)])
