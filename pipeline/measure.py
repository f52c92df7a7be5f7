"""What a step really did, beside what its plan foretells: bubble, leases, activation memory.

A :class:`Meter` watches one rank's engine for a step. Times are those of the launched work alone, without waiting: of the host
on a CPU, of two events on the compute stream on a GPU, which are read after the step's own host synchronisation, so that
measuring adds none. The cost model is that of :mod:`pipeline.simulate` (stage span).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

import torch

from pipeline.actions import Action, Kind
from pipeline.captured import Captured
from pipeline.engine import Engine
from pipeline.p2p import Transport, gather_rows
from pipeline.schedules import Placement
from pipeline.simulate import peak_activations, simulate
from qeffect_lm.graphs.register import storage_id
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.gpu_memory import allocated, peak_allocated

KINDS = (Kind.F, Kind.I, Kind.W)
ROUNDS, WARM_UP = 7, 2  # of a latency's measurement
Mark = float | torch.cuda.Event
Known = Callable[[torch.Tensor], bool]


@dataclass
class StepWatch:
    """One step of one rank while it runs.

    ``held`` is the most leases that the ledger's table held at once; ``most_retained`` the most activation memory, by what
    ``sizes`` says of each chunk; ``grown``, once read, what a GPU's allocator gave out more than at the step's start.
    """

    engine: Engine
    sizes: Sizes
    device: torch.device
    marks: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    held: int = 0
    retained: int = 0
    most_retained: int = 0
    grown: int | None = None
    _began: Mark = 0.0
    _read: list[tuple[float, float]] = field(default_factory=list)

    def begin(self, action: Action) -> None:
        self._began = mark(self.device)

    def end(self, action: Action) -> None:
        self.marks.append((action, self._began, mark(self.device)))
        m_b, m_w = self.sizes.of(self.engine, action)
        if action.kind is Kind.F:
            self.held = max(self.held, self.engine.ledger.leases.counts()["groups"])
            self.retained += m_b
            self.most_retained = max(self.most_retained, self.retained)
        else:
            self.retained -= m_b - m_w if action.kind is Kind.I else m_w

    def span(self) -> float:
        """Seconds from the first F's begin to the last work's end."""
        return self.read()[-1][1]

    def busy(self) -> float:
        """Seconds of all work."""
        return sum(end - begin for begin, end in self.read())

    def work(self) -> list[float]:
        """Begin and end of each piece of work in turn, in milliseconds from the first F's begin."""
        return [1000 * at for pair in self.read() for at in pair]

    def times(self) -> dict[tuple[Kind, int], list[float]]:
        """(kind, chunk) → seconds of each piece of its work, in order."""
        found: dict[tuple[Kind, int], list[float]] = {}
        for (action, _, _), (begin, end) in zip(self.marks, self.read(), strict=True):
            found.setdefault((action.kind, action.key[0]), []).append(end - begin)
        return found

    def read(self) -> list[tuple[float, float]]:
        """Begin and end of each piece of work, in seconds from the first F's begin; once the host has waited for the step.

        The marks are read once: an event takes some microseconds, and a graph records its own anew at each replay.
        """
        if len(self._read) != len(self.marks):
            first = self.marks[0][1]
            self._read = [(seconds_between(first, begin), seconds_between(first, end)) for _, begin, end in self.marks]
        return self._read


def mark(device: torch.device) -> Mark:
    """Now: of a GPU an event on the current stream, else the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Between two marks of one device, once the host has waited for the later one."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000


@dataclass
class Sizes:
    """Bytes that one microbatch of a chunk holds after F (``m_b``) and after I (``m_w``), besides the slots' own buffers
    (those of W-slots among them, where W of several microbatches is one product).

    Looked up once: shapes do not change. Eagerly ``m_b`` is what autograd and the leases keep alive; of a captured plan it is
    all that F's graph made, which its pool keeps.

    Args:
        known: whether a tensor is one of the run's own (a parameter, a buffer), which no microbatch holds.
    """

    known: Known
    m_b: dict[int, int] = field(default_factory=dict)
    m_w: dict[int, int] = field(default_factory=dict)

    def of(self, engine: Engine, action: Action) -> tuple[int, int]:
        """(m_b, m_w) of the chunk that has just run ``action``; m_w is 0 before its first I."""
        chunk = action.key[0]
        if action.kind is Kind.F and chunk not in self.m_b:
            self.m_b[chunk] = self._after_forward(engine, action)
        elif action.kind is Kind.I and chunk not in self.m_w:
            self.m_w[chunk] = min(self._for_weight_grad(engine, action), self.m_b[chunk])
        return self.m_b[chunk], self.m_w.get(chunk, 0)

    def _after_forward(self, engine: Engine, action: Action) -> int:
        chunk = action.key[0]
        key = engine.plan.graph_key(action)
        if engine.captured is not None:
            retained = self._unique(engine.captured.retained[chunk, key.i_slot, key.w_slot])
            return max(engine.captured.actions[key][0].pool_bytes, retained)
        saved = engine.stages[chunk].slots[key.i_slot].saved
        payloads = engine.ledger.leases.payloads(*action.key).values()
        tensors = [tensor for payload in payloads for tensor in payload.tensors()]
        return self._unique([*tensors, *(saved_tensors(saved[1]) if saved is not None else ())])

    def _for_weight_grad(self, engine: Engine, action: Action) -> int:
        key = engine.plan.graph_key(action)
        if engine.captured is not None:
            return self._unique(engine.captured.retained[key.chunk, key.i_slot, key.w_slot])
        payloads = engine.ledger.leases.payloads(*action.key).values()
        return self._unique([tensor for payload in payloads for tensor in payload.tensors()])

    def _unique(self, tensors: Sequence[torch.Tensor]) -> int:
        storages = {storage_id(t): t.untyped_storage().nbytes() for t in tensors if not self.known(t)}
        return sum(storages.values())


def saved_tensors(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Everything that autograd keeps for the backward of ``out``."""
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield from getattr(node, "held", list)()  # what a node keeps besides: the tape of another library
        names = ["saved_tensors"] if hasattr(node, "saved_tensors") else [n for n in dir(node) if n.startswith("_saved_")]
        for name in names:
            value = getattr(node, name)
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(one, torch.Tensor):
                    yield one
        waiting += [following for following, _ in node.next_functions]


class Meter:
    """Measures steps of one rank and reports those of its whole pipeline.

    Args:
        known: as of :class:`Sizes`.
        t_comm: seconds that a message takes, for the prediction.
    """

    def __init__(self, engine: Engine, known: Known, t_comm: float = 0.0) -> None:
        self._engine, self.t_comm = engine, t_comm
        self._device = engine.divisor.device
        self.sizes = Sizes(known)
        self._slots = sum(size * len(engine.stages[chunk].slots) for chunk, size in self.slot_bytes().items())
        self._slots += sum(stage.joined.nbytes for stage in engine.stages.values() if stage.joined is not None)
        self._leases = _most_leases(engine.actions)
        self._allocated = 0
        self._pools: tuple[Captured, int] | None = None  # the graphs whose pools were added up

    def slot_bytes(self) -> dict[int, int]:
        """Chunk → bytes of one I-slot's own buffers."""
        return {
            chunk: sum(tensor.untyped_storage().nbytes() for tensor in stage.slots[0].tensors().values())
            for chunk, stage in self._engine.stages.items()
        }

    def start(self) -> StepWatch:
        """Watch the engine's next step. A captured whole step is its own watch: its graph records the times."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._allocated = allocated(self._device)
        watch = StepWatch(self._engine, self.sizes, self._device)
        captured = self._engine.captured
        if captured is not None and captured.step is not None:
            watch.marks = list(captured.step.marks)
        else:
            self._engine.watch = watch
        return watch

    def read(self, watch: StepWatch) -> None:
        """The step is over, and the host has waited for it: take down what the next one overwrites."""
        self._engine.watch = None
        captured = self._engine.captured
        if captured is not None and captured.step is not None:
            watch.read()  # of other steps each has events of its own, which :meth:`report` reads
        if watch.grown is None:
            watch.grown = peak_allocated(self._device) - self._allocated if self._device.type == "cuda" else 0

    def report(self, watch: StepWatch) -> dict[str, float | list[float] | list[int]]:
        """Measured against predicted; equal on all ranks of a pipeline, collective over it. Lists have one entry per rank.

        Call it after the host has waited for the step; once :meth:`read` was called, later too. The ranks exchange numbers of
        the host, so the pipeline's group must take tensors of the CPU (gloo, or ``cpu:gloo,cuda:nccl``).

        Raises:
            PeerLostError: a peer was lost.
        """
        engine, plan = self._engine, self._engine.plan
        self.read(watch)
        chunks = plan.placement.num_chunks
        times = watch.times()
        means = [_mean(times.get((kind, chunk), ())) for kind in KINDS for chunk in range(chunks)]
        whole = engine.captured is not None and engine.captured.step is not None
        held = [0, 0, 0, 0] if whole else [watch.held, self._leases, *self._bytes(watch)]
        mine = [watch.span(), watch.busy(), *held, *means]
        rows = torch.zeros(plan.num_ranks, len(mine), dtype=torch.float64)
        gather_rows(rows, torch.tensor(mine, dtype=torch.float64), engine.mesh, "pp")
        span, busy = rows[:, 0].tolist(), rows[:, 1].tolist()
        t_f, t_i, t_w = rows[:, 6:].sum(0).view(3, chunks).tolist()  # a chunk is on one rank, the others say 0
        counts = rows[:, 2:6].to(torch.int64).t().tolist()
        bubbles = {
            "bubble": (max(span) - max(busy)) / max(span),
            "bubble_predicted": simulate(plan, t_f, t_i, t_w, self.t_comm).bubble,
            "bubble_per_rank": [(a - b) / a for a, b in zip(span, busy, strict=True)],
        }
        if whole:  # one pool for everything: what a microbatch holds in it cannot be told apart
            return bubbles
        return {
            **bubbles,
            "peak_leases": counts[0],
            "peak_leases_predicted": counts[1],
            "peak_activation_bytes": counts[2],
            "peak_activation_bytes_predicted": counts[3],
        }

    def _bytes(self, watch: StepWatch) -> tuple[int, int]:
        """Activation memory of this rank at its peak, measured and predicted."""
        engine, plan = self._engine, self._engine.plan
        chunks = range(plan.placement.num_chunks)
        m_b, m_w = ([float(size.get(chunk, 0)) for chunk in chunks] for size in (self.sizes.m_b, self.sizes.m_w))
        predicted = self._slots + int(peak_activations([plan.actions[engine.rank]], m_b, m_w)[0])
        retained = watch.most_retained
        if engine.captured is not None:
            if self._pools is None or self._pools[0] is not engine.captured:
                self._pools = engine.captured, sum(graph.pool_bytes for graph, _ in engine.captured.actions.values())
            retained = self._pools[1]
        if self._device.type == "cuda":
            grown = watch.grown or 0
            retained = grown if engine.captured is None else retained + grown
        return self._slots + retained, predicted


def _most_leases(actions: Sequence[Action]) -> int:
    """The most microbatches of a rank's chunks that are between F and W."""
    changes = [(action.kind is Kind.F) - (action.kind is Kind.W) for action in actions]
    return max(accumulate(changes), default=0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def latency(transport: Transport, placement: Placement, mesh: Mesh, like: torch.Tensor) -> float:
    """Seconds that a message of the shape and dtype of ``like`` takes between two neighbours, the slowest pair's.

    Half of a round trip, the median of a few after a warm-up. Collective over the pipeline.

    Raises:
        PeerLostError: a peer was lost.
    """
    pairs = {(a, b) for a, b in zip(placement.ranks, placement.ranks[1:], strict=False) if a != b}
    mine, worst = mesh.coord("pp"), 0.0
    buffer = torch.zeros_like(like)
    for a, b in sorted(pairs):  # one order on all ranks
        if mine not in (a, b):
            continue
        seconds = []
        for _ in range(WARM_UP + ROUNDS):
            _synchronise(like.device)
            began = time.perf_counter()
            if mine == a:
                transport.send(buffer, b, "F", 0, 0).wait()
                transport.receive(buffer, b, "B", 0, 0).wait()
            else:
                transport.receive(buffer, a, "F", 0, 0).wait()
                transport.send(buffer, a, "B", 0, 0).wait()
            _synchronise(like.device)
            seconds.append((time.perf_counter() - began) / 2)
        worst = max(worst, median(seconds[WARM_UP:]))
    rows = torch.zeros(mesh.size("pp"), 1, dtype=torch.float64)
    gather_rows(rows, torch.tensor([worst], dtype=torch.float64), mesh, "pp")
    return float(rows.max())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
