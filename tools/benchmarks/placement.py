"""What it is worth that a weight gradient goes straight to its place: a rank's captured F, I and W, on one GPU.

Six decoder layers hold 24 weight matrices; with four microbatches a rank-step has 96 weight-gradient GEMMs. Ways of one run:

placed       ours: each GEMM writes (beta 0) or adds to (beta 1) its main gradient, nothing is in between
temporary    the same plan captured once more, each GEMM into a temporary of the main gradient's dtype, which one more launch
             copies (first microbatch) or adds: 96 launches more and nothing else, which the graphs' node lists must show
coalesced    W alone, one GEMM a weight over the tokens of all four microbatches, from operands that lie joined
te fused     Transformer Engine's modules alone, delay_wgrad_compute with fuse_wgrad_accumulation, captured per microbatch
te unfused   the same without the fusion: BF16 gradients, added to the main gradients by one more launch each

Ways take turns from repetition to repetition; a figure is the median, by CUDA events around three rounds in a row (the host
runs ahead). The roll of scales is left out, so all rounds give the same bits.

``placed`` and ``temporary`` round differently, and how far apart they may come is stated: the products of the m microbatches
are the same, P_1 … P_m; each way rounds every product and every partial sum once at most, so an element differs by no more than
``2 m u sum |P_i|``, u half a unit in the last place of the main gradient's dtype (2^-24 for float32).
"""

from __future__ import annotations

import gc
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from pipeline.actions import Kind
from pipeline.captured import Captured
from qeffect_lm.fp8.gemm import accumulate_scaled_mm
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format, quantise
from qeffect_lm.graphs.backend import Graph, GraphBackend
from qeffect_lm.graphs.cuda_graphs import CudaGraphs
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import HiddenStateRegister, Rule
from qeffect_lm.layers import linear
from qeffect_lm.layers.base import split_layers
from qeffect_lm.layers.linear import SplitLinear
from tools.benchmarks.layers import (
    CHUNK,
    MICROBATCHES,
    Round,
    Size,
    Stack,
    assembled,
    batch,
    borders,
    fill,
    own_globals,
    round_of,
)

LAYERS = 6
SHAPES = ((4096, 1024), (1024, 512), (1024, 2048), (2048, 1024), (2048, 2048), (4096, 2048), (4096, 4096))
WANTED = {(4096, 1024): 1.132}  # what the rank-step must gain at least, temporary over placed; elsewhere 1
IN_A_ROW = 3
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
BETA = re.compile(r"_(bz|badd)_")  # in the name of one of cuBLASLt's kernels
Clock = Callable[[Round], float]

# ---- ours ------------------------------------------------------------------------------------------------------------


@contextmanager
def products_by(way: Callable[..., None]) -> Iterator[None]:
    """Inside, the linears' W calls ``way(product, out, …)`` in place of ``product(out, …)``."""
    names = ("accumulate_mm", "accumulate_scaled_mm")
    before = {name: getattr(linear, name) for name in names}
    for name, product in before.items():
        setattr(linear, name, partial(way, product))
    try:
        yield
    finally:
        for name, product in before.items():
            setattr(linear, name, product)


def through_a_temporary(product: Callable[..., None], out: torch.Tensor, *operands: Any, library: Any = None) -> None:
    """W as without placement: a GEMM, then a copy or an addition."""
    *factors, beta = operands
    temporary = torch.empty_like(out)
    product(temporary, *factors, 0, library=library)
    if beta:
        out.add_(temporary)
    else:
        out.copy_(temporary)


class Ours:
    """A rank with both ways captured over one set of storages."""

    def __init__(self, size: Size, graphs: str = "cuda_graphs") -> None:
        self.size = size
        self.assembly = assembled(size, "native")
        self.assembly.prepare(batch(size))
        layers = split_layers(self.assembly.engine.stages[CHUNK].chunk)
        self.linears = [layer for layer in layers if isinstance(layer, SplitLinear)]
        self.captured: dict[str, Captured] = {}
        self._once = round_of(self.assembly, commit=False)
        self.assembly.config = size.config("native", graphs)
        for name in ("placed", "temporary"):
            self.assembly.engine.captured = None  # kept here: capturing would destroy what the engine holds
            with products_by(through_a_temporary) if name == "temporary" else nullcontext():
                self.assembly.capture()
            assert self.assembly.engine.captured is not None
            self.captured[name] = self.assembly.engine.captured
        fill(self.assembly)

    @property
    def gemms(self) -> int:
        """Weight-gradient GEMMs of a rank-step."""
        return len(self.linears) * MICROBATCHES

    def step(self, name: str) -> None:
        """F, I and W of all microbatches, from the graphs of a way; ``eager``: placed, without graphs."""
        self.assembly.engine.captured = self.captured.get(name)
        self._once()

    def graphs(self, name: str, *kinds: Kind) -> list[Graph]:
        """What a rank-step replays of a way, in order."""
        engine = self.assembly.engine
        actions = [a for a in engine.actions if a.kind in kinds and a.chunk == CHUNK]
        return [self.captured[name].actions[engine.plan.graph_key(action)][0] for action in actions]

    def weight_grads(self, name: str) -> Round:
        """W of all microbatches, on what the last step left."""
        graphs = self.graphs(name, Kind.W)

        def once() -> None:
            with self.assembly.engine.computing():
                for graph in graphs:
                    graph.replay()

        return once

    def gradients(self, name: str) -> torch.Tensor:
        """The flat main gradients after a step over some other step's (7.0: what a first writer leaves behind shows)."""
        grads = self.assembly.flat.grad_buffer
        grads.fill_(7.0)
        self.step(name)
        return grads.clone()

    def backend(self) -> GraphBackend:
        stream = self.assembly.engine.streams.real(self.assembly.engine.compute_stream())
        return HostReplay() if stream is None else CudaGraphs(stream)

    def release(self) -> None:
        for captured in self.captured.values():
            captured.release()
        self.assembly.engine.captured = None


def nodes_of(graphs: Iterable[Graph]) -> Counter[str]:
    """Launches of these graphs by kind and name with their shapes; a CPU's recorded operations by name."""
    found: Counter[str] = Counter()
    for graph in graphs:
        nodes = [line.removeprefix("node ") for line in graph.lines if line.startswith("node ")]
        operations = [
            line.removeprefix("operation ").partition("(")[0] for line in graph.lines if "aten.empty_like" not in line
        ]
        found.update([node.partition(" after=")[0] for node in nodes] or operations)
    return found


def added(before: Counter[str], after: Counter[str]) -> dict[str, Any]:
    """What ``after`` launches beyond ``before``, by name without the shapes, and what it lacks.

    cuBLASLt has a product that adds to its output (``badd``) and one that overwrites it (``bz``) as two kernels of one
    algorithm. Beta is what the ways are meant to differ in, so such a pair, by its name, counts as one kernel.
    """

    def by_name(lines: Counter[str]) -> dict[str, int]:
        names: Counter[str] = Counter()
        for line, count in lines.items():
            names[line.partition(" grid=")[0]] += count
        return dict(sorted(names.items()))

    def whatever_beta(lines: Counter[str]) -> Counter[str]:
        found: Counter[str] = Counter()
        for line, count in lines.items():
            name, matched = BETA.subn("_b_", line.partition(" grid=")[0])
            found[name if matched else line] += count
        return found

    ours, theirs = whatever_beta(before), whatever_beta(after)
    return {"added": by_name(theirs - ours), "gone": by_name(ours - theirs), "count": (theirs - ours).total()}


def difference(ours: Ours, got: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How far two ways' matrices are apart: at most, and as a part of the stated bound (1: at its edge); and the
    largest gradient of the matrix where it is smallest (0: nothing was compared)."""
    sums: dict[int, torch.Tensor] = {}

    def summed(product: Callable[..., None], out: torch.Tensor, *operands: Any, library: Any = None) -> None:
        *factors, _ = operands
        alone = torch.empty_like(out, dtype=torch.float32)
        product(alone, *factors, 0, library=library)
        total = sums.setdefault(out.data_ptr(), torch.zeros_like(alone))
        total.add_(alone.abs_())
        product(out, *operands, library=library)

    with products_by(summed):
        ours.step("eager")
    flat = ours.assembly.flat
    worst = most = 0.0
    largest = torch.inf
    for layer in ours.linears:
        entry = flat.entry(layer.weight_name)
        span = slice(entry.offset, entry.offset + entry.numel)
        apart = (got[span].float() - other[span].float()).abs_().nan_to_num_(nan=torch.inf)
        allowed = sums[layer.grad_view().data_ptr()].view(-1) * (2 * MICROBATCHES * ROUNDING[got.dtype])
        most, largest = max(most, float(apart.max())), min(largest, float(got[span].abs().max()))
        part = torch.where(allowed > 0, apart / allowed, torch.where(apart > 0, torch.inf, 0.0))
        worst = max(worst, float(part.max()))
    return {"max": most, "of_bound": worst, "smallest_largest": largest}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, signed zeros and NaNs included."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


class Joined:
    """W of a whole step as one GEMM for each weight, over operands that lie joined; in a graph of its own."""

    def __init__(self, ours: Ours) -> None:
        self.layers, self.tokens, self.ours = ours.linears, ours.size.tokens, ours
        generator = torch.Generator(ours.assembly.flat.device).manual_seed(2)
        self.scale = torch.tensor(20.0, device=ours.assembly.flat.device)
        self.operands = []
        for layer in self.layers:
            out_features, in_features = layer.grad_view().shape
            self.operands.append((self._drawn(out_features, E5M2, generator), self._drawn(in_features, E4M3, generator)))
        self.library = getattr(self.layers[0], "library", None)
        engine, register = ours.assembly.engine, HiddenStateRegister()
        register.add("grads", ours.assembly.flat.grad_buffer, owner="benchmark", rule=Rule.SCRATCH)
        tensors = {id(t): t for pair in self.operands for operand in pair for t in operand}
        for number, tensor in enumerate(tensors.values()):
            register.add(f"operand{number}", tensor, owner="benchmark", rule=Rule.CONSTANT)
        with engine.computing():
            self.run()
        self._graph = ours.backend().capture("coalesced W", self.run, register=register)

    def _drawn(self, features: int, fmt: Format, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(features, MICROBATCHES * self.tokens, device=self.scale.device, generator=generator)
        q = quantise(values.bfloat16(), self.scale, fmt, columns=False)
        assert q.rows is not None
        return q.rows, q.scale_inv

    def run(self) -> None:
        for layer, ((dy, dy_scale), (x, x_scale)) in zip(self.layers, self.operands, strict=True):
            accumulate_scaled_mm(layer.grad_view(), dy, dy_scale, x, x_scale, 0, library=self.library)

    def replay(self) -> None:
        with self.ours.assembly.engine.computing():
            self._graph.replay()

    def apart(self) -> float:
        """By how much one GEMM differs from four that accumulate, at most, of the largest element."""
        self.replay()
        most = 0.0
        for layer, ((dy, dy_scale), (x, x_scale)) in zip(self.layers, self.operands, strict=True):
            parts = torch.empty_like(layer.grad_view())
            with self.ours.assembly.engine.computing():
                for number in range(MICROBATCHES):
                    span = slice(number * self.tokens, (number + 1) * self.tokens)
                    mine = dy[:, span].contiguous(), x[:, span].contiguous()
                    beta = int(number > 0)
                    accumulate_scaled_mm(parts, mine[0], dy_scale, mine[1], x_scale, beta, library=self.library)
            largest = parts.abs().max().float()
            most = max(most, float((parts.float() - layer.grad_view().float()).abs().max() / largest))
        return most

    def release(self) -> None:
        self._graph.reset()


# ---- Transformer Engine alone ----------------------------------------------------------------------------------------


class Theirs:
    """Transformer Engine's modules with delayed weight gradients: per microbatch one graph of F and I and one of W. Inside a
    capture it rolls no scales, so they stay 1; that moves no time."""

    def __init__(self, size: Size, library: Any, recipe: Any, fused: bool) -> None:
        self.library, self.recipe, self.fused = library, recipe, fused
        self.stack = Stack(library.te, size, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
        for weight in self.stack.parameters():
            if weight.dim() == 2:
                weight.main_grad = torch.zeros_like(weight, dtype=getattr(torch, size.main_grads))  # type: ignore[attr-defined]
        self.xs, self.dys = borders(size)
        self.norms = [weight for weight in self.stack.parameters() if weight.dim() == 1]
        blocks = zip(self.stack.mlp, self.stack.out, self.stack.qkv, strict=True)
        self.modules: list[Any] = [module for block in reversed(list(blocks)) for module in block]
        self.graphs: dict[str, list[torch.cuda.CUDAGraph]] = {"inner": [], "outer": []}
        self._capture()

    def inner(self, number: int) -> None:
        """F and I of a microbatch."""
        with self.library.holding_still():
            with self.library.te.autocast(enabled=True, recipe=self.recipe, _graph=True):
                out = self.stack(self.xs[number], is_first_microbatch=number == 0)
            torch.autograd.grad(out, [self.xs[number], *self.norms], self.dys[number])

    def outer(self, number: int) -> None:
        """W of the microbatch whose I came last; without the fusion, into the main gradients too."""
        for module in self.modules:
            module.backward_dw()
            if self.fused:
                continue
            for weight in module.parameters():
                if weight.dim() != 2:
                    continue
                if number:
                    weight.main_grad.add_(weight.grad)
                else:
                    weight.main_grad.copy_(weight.grad)
                weight.grad = None

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            for number in (*range(MICROBATCHES), *range(MICROBATCHES)):  # libraries allocate and compile
                self.inner(number)
                self.outer(number)
            torch.cuda.synchronize()
            for number in range(MICROBATCHES):
                pool = torch.cuda.graph_pool_handle()
                for name, work in (("inner", self.inner), ("outer", self.outer)):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        work(number)
                    self.graphs[name].append(graph)
        torch.cuda.synchronize()

    def step(self) -> None:
        for inner, outer in zip(self.graphs["inner"], self.graphs["outer"], strict=True):
            inner.replay()
            outer.replay()

    def weight_grads(self) -> None:
        for graph in self.graphs["outer"]:
            graph.replay()


# ---- measuring -------------------------------------------------------------------------------------------------------


def device_ms(once: Round) -> float:
    """Milliseconds of one of some rounds in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(IN_A_ROW):
        once()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / IN_A_ROW


def interleaved(rounds: Mapping[str, Round], repetitions: int, clock: Clock) -> dict[str, float]:
    """Medians; who comes first moves on from repetition to repetition. The first two are warm-up."""
    names = list(rounds)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repetitions + 2):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            ms = clock(rounds[name])
            if turn >= 2:
                taken[name].append(ms)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(sizes: list[Size], repetitions: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each size. What Transformer Engine cannot run is said in its row and fails nothing."""
    rows = []
    for size in sizes:
        row = our_row(size, repetitions, device_ms)
        gc.collect()
        torch.cuda.empty_cache()
        try:
            row["te_ms"] = their_ms(size, repetitions, device_ms)
        except Exception as error:  # noqa: BLE001 (a peer that fails is a row that says so)
            row["te_error"] = f"{type(error).__name__}: {str(error)[:300]}"
            say(f"hidden {size.hidden} tokens {size.tokens}: Transformer Engine: {row['te_error']}")
        gc.collect()
        torch.cuda.empty_cache()
        rows.append(row)
        say(table([row]))
    return rows


def our_row(size: Size, repetitions: int, clock: Clock, graphs: str = "cuda_graphs") -> dict[str, Any]:
    """Ours at one size: results compared first, then times."""
    ours = Ours(size, graphs)
    placed, temporary = ours.gradients("placed"), ours.gradients("temporary")
    row: dict[str, Any] = {
        "hidden": size.hidden,
        "tokens": size.tokens,
        "layers": size.layers,
        "main_grads": str(placed.dtype).removeprefix("torch."),
        "gemms": ours.gemms,
        "eager_same_bits": same_bits(placed, ours.gradients("eager")),
        "difference": difference(ours, placed, temporary),
        "nodes": added(*(nodes_of(ours.graphs(name, Kind.F, Kind.I, Kind.W)) for name in ("placed", "temporary"))),
        "nodes_outside_w": added(*(nodes_of(ours.graphs(name, Kind.F, Kind.I)) for name in ("placed", "temporary"))),
    }
    del placed, temporary
    joined = Joined(ours)
    row["coalesced_apart"] = joined.apart()
    rounds: dict[str, Round] = {
        "placed": lambda: ours.step("placed"),
        "temporary": lambda: ours.step("temporary"),
        "placed W": ours.weight_grads("placed"),
        "temporary W": ours.weight_grads("temporary"),
        "coalesced W": joined.replay,
    }
    row["ms"] = interleaved(rounds, repetitions, clock)
    joined.release()
    ours.release()
    return row


def their_ms(size: Size, repetitions: int, clock: Clock) -> dict[str, float]:
    """Transformer Engine's two ways at one size."""
    from qeffect_lm.layers.te import load

    library = load(torch.device("cuda", torch.cuda.current_device()), "delayed")
    recipe = library.recipes.DelayedScaling(amax_history_len=16, amax_compute_algo="max", reduce_amax=False)
    with own_globals(library):
        ways = {name: Theirs(size, library, recipe, fused=name == "te fused") for name in ("te fused", "te unfused")}
        rounds = {name: made.step for name, made in ways.items()}
        rounds |= {f"{name} W": made.weight_grads for name, made in ways.items()}
        return interleaved(rounds, repetitions, clock)


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as promised, as sentences."""
    found = []
    for row in rows:
        place = f"hidden {row['hidden']}, {row['tokens']} tokens"
        nodes, ms = row["nodes"], row["ms"]
        if nodes["count"] != row["gemms"] or nodes["gone"]:
            found.append(
                f"{place}: the node lists differ by {nodes['added']} more and {nodes['gone']} fewer, not by {row['gemms']}"
            )
        if row["nodes_outside_w"]["count"] or row["nodes_outside_w"]["gone"]:
            found.append(f"{place}: F and I differ too: {row['nodes_outside_w']}")
        if not row["eager_same_bits"]:
            found.append(f"{place}: captured and eager main gradients differ")
        if not row["difference"]["of_bound"] <= 1:
            found.append(f"{place}: placed and temporary differ by {row['difference']['of_bound']:.3g} of the bound")
        if not row["difference"]["smallest_largest"] > 0:
            found.append(f"{place}: a weight gradient is all zeros, so the comparison shows nothing")
        wanted, ratio = WANTED.get((row["hidden"], row["tokens"]), 1.0), ms["temporary"] / ms["placed"]
        if ratio < wanted:
            found.append(f"{place}: temporary / placed is {ratio:.4f}, less than {wanted}")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of a rank-step and of its W alone; ratios are temporary over placed, unfused over fused."""
    heads = ("placed", "temporary", "ratio", "W placed", "temporary", "ratio", "coalesced", "te fused", "unfused", "ratio")
    lines = [f"{'hidden':>6} {'tokens':>6} " + " ".join(f"{head:>9}" for head in heads) + "  nodes   of bound  eager"]
    for row in rows:
        ms, te = row["ms"], row.get("te_ms")
        figures = [ms["placed"], ms["temporary"], ms["temporary"] / ms["placed"]]
        figures += [ms["placed W"], ms["temporary W"], ms["temporary W"] / ms["placed W"], ms["coalesced W"]]
        theirs = [te["te fused"], te["te unfused"], te["te unfused"] / te["te fused"]] if te else []
        text = [f"{value:>9.3f}" for value in figures + theirs] + [f"{'-':>9}"] * (3 - len(theirs))
        nodes, apart = row["nodes"]["count"], row["difference"]["of_bound"]
        end = f"{nodes:>+5} {apart:>10.2e}  {'same' if row['eager_same_bits'] else 'DIFFERS'}"
        lines.append(f"{row['hidden']:>6} {row['tokens']:>6} {' '.join(text)}  {end}")
    return "\n".join(lines)
