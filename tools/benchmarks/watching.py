"""What following a run costs: metrics, progress, warnings, looks at FP8 histories, timelines, events, wandb, TensorBoard.

One training switches between ways of following it, each a block of steps long, so that they share objects, memory and machine;
every round has them in another order. Two figures of each: its steps over those that nothing follows, paired by round, which
has all that a way does anywhere (in the step, on other threads and processes), and as much noise as the control, a second
block that nothing follows, shows; and the time that the host spends in the way's own calls: exact, but of those only, and more
than the step takes longer where it is spent while a GPU works.

One process a pipeline rank; ranks exchange what they exchange in a run. Tokens are made up.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from checkpoint import GroupCommunicator, SingleProcess
from pipeline.measure import Meter, StepWatch, latency
from qeffect_lm.app.assemble import Assembly, assemble, mesh_of
from qeffect_lm.app.watching import Watcher
from qeffect_lm.config import Config
from qeffect_lm.runtime.metrics import MetricsWriter, StepMetrics, Value
from qeffect_lm.runtime.progress import Progress
from qeffect_lm.runtime.tensorboard_logger import TensorboardLogger
from qeffect_lm.runtime.wandb_logger import WandbLogger
from tools.benchmarks.training import batches
from tools.benchmarks.weights import drawn_on_device

OFF, CONTROL, CONFIGURED = "nothing", "nothing, once more", "all, at the default intervals"
BLOCK = 5  # steps in a row
TARGET = 0.01  # of a step, for all at the default intervals
COLUMNS = 160  # of the terminal that live lines are drawn on
Sink = Callable[[StepMetrics], object]


@dataclass(frozen=True)
class Way:
    """One way to follow a run.

    Attributes:
        timed: the engine's work is measured, and compared with the plan.
        logging: keys of ``logging`` for a :class:`Watcher`; None: without one.
        judged: the watcher completes metrics (memory, MFU) and warns.
        sinks: what gets each step's metrics.
    """

    name: str
    timed: bool = False
    logging: dict[str, Any] | None = None
    judged: bool = False
    sinks: tuple[str, ...] = ()


QUIET: dict[str, Any] = {"watch_every": 0, "timeline_every": 0, "underflow_every": 0}
ALL = ("metrics", "bar", "wandb", "tensorboard")
WAYS = (
    Way(OFF),
    Way(CONTROL),
    Way("metrics.jsonl", sinks=("metrics",)),
    Way("progress, plain lines", sinks=("plain",)),
    Way("progress, live lines", sinks=("bar",)),
    Way("an event each step", sinks=("events",)),
    Way("wandb, offline", sinks=("wandb",)),
    Way("TensorBoard", sinks=("tensorboard",)),
    Way("work timed, against the plan", timed=True),
    Way("warnings", logging=QUIET, judged=True),
    Way("FP8 histories, each step", logging={**QUIET, "watch_every": 1, "scales_every": 1}),
    Way("timeline, each step", timed=True, logging={**QUIET, "timeline_every": 1}),
    Way("underflow, each tenth step", logging={**QUIET, "underflow_every": 10}),
    Way(CONFIGURED, timed=True, logging={}, judged=True, sinks=ALL),
    Way(
        "all but underflow, each step",
        timed=True,
        logging={"watch_every": 1, "scales_every": 1, "timeline_every": 1},
        judged=True,
        sinks=(*ALL, "events"),
    ),
)


@dataclass
class Followed:
    """One rank's training, and everything that may follow it."""

    config: Config
    assembly: Assembly
    meter: Meter | None  # None where nothing of the work can be timed: the graph of a whole step
    watchers: dict[str, Watcher]
    sinks: dict[str, Sink]  # of the leading rank
    patient: bool  # as the loop: what follows a step waits until the next is launched
    typical: dict[str, Value] = field(default_factory=dict)  # further metrics, for ways that have none of their own
    steps: dict[str, int] = field(default_factory=dict)  # way → its last step
    number: int = 0
    waiting: Callable[[], None] | None = None

    def step(self, way: Way, batch: Any) -> tuple[float, float]:
        """One step as the loop runs it: seconds of all of it, and those in calls that follow it."""
        watcher, engine = self.watchers.get(way.name), self.assembly.engine
        step = self.steps[way.name] = self.steps.get(way.name, 0) + 1
        began = time.perf_counter()
        watch = self.meter.start() if way.timed and self.meter is not None else None
        ready = time.perf_counter()
        result = engine.step(self.number, batch)
        self.number += 1
        launched = time.perf_counter()
        self.catch_up()
        told = time.perf_counter()
        loss, skipped = float(result.loss), bool(result.skipped)
        done = time.perf_counter()
        if watcher is not None:
            watcher.observe(step, skipped)
            watcher.sample(step, batch)
        if watch is not None and self.meter is not None:
            self.meter.read(watch)
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=float(result.grad_norm) if way.sinks else None,
            lr=float(result.lr) if way.sinks else None,
            tokens=step * batch.tokens,
            tokens_per_second=batch.tokens / (done - began),
            step_ms=1000 * (done - began),
        )
        self.waiting = partial(self.tell, way, metrics, watch)
        if not self.patient:
            self.catch_up()
        end = time.perf_counter()
        return end - began, ready - began + told - launched + end - done

    def tell(self, way: Way, metrics: StepMetrics, watch: StepWatch | None) -> None:
        """What follows a step, and on a GPU is done while the next one runs."""
        watcher = self.watchers.get(way.name)
        told: dict[str, Value] = {}
        if watch is not None and self.meter is not None:
            told |= self.meter.report(watch)
        if watcher is not None:
            told |= watcher.publish(metrics.step, watch, self.meter.t_comm if self.meter else 0.0, 0.0)
        if self.sinks and (way.judged or way.sinks):
            metrics = replace(metrics, extra=told or self.typical)
            if way.judged and watcher is not None:
                metrics = watcher.complete(metrics)
            for name in way.sinks:
                self.sinks[name](metrics)
            self.typical = {**self.typical, **metrics.extra}

    def catch_up(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()


def measure(config: Config, rank: int, rounds: int, say: Callable[[str], None], block: int = BLOCK) -> dict[str, Any]:
    """Run ``rounds`` rounds, after one that does not count, of a block of each way. Collective; files go to ``run.dir``.

    Returns of each way: the leading rank's median step in ms, ``ratio`` to nothing (median over rounds, and all of them), its
    own time per step in microseconds (mean), and that as a share of a step that nothing follows.
    """
    data = batches(config)
    inputs = [next(data) for _ in range(4)]
    with ExitStack() as stack:
        followed = _followed(config, rank, stack, inputs[0], say)
        _settle(followed, inputs)
        ways = [way for way in WAYS if _applies(way, followed, config)]
        seconds: dict[str, list[list[float]]] = {way.name: [] for way in ways}
        own: dict[str, list[float]] = {way.name: [] for way in ways}
        order = random.Random(1)  # the same on all ranks
        feed = itertools.cycle(inputs)
        for turn in range(rounds + 1):
            for way in order.sample(ways, len(ways)):
                _, *pairs = [followed.step(way, next(feed)) for _ in range(block + 1)]  # before the first another way was on
                followed.catch_up()
                if turn:
                    seconds[way.name].append([whole for whole, _ in pairs])
                    own[way.name] += [mine for _, mine in pairs]
            say(f"round {turn} of {rounds}" + ("" if turn else " (does not count)"))
        followed.assembly.release()
        if followed.assembly.transport is not None:
            followed.assembly.transport.close()
    return {"rounds": rounds, "steps_of_a_block": block, "ways": _figures(seconds, own)}


def _figures(seconds: dict[str, list[list[float]]], own: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    bare = statistics.median(itertools.chain(*seconds[OFF]))
    found = {}
    for name, blocks in seconds.items():
        ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(blocks, seconds[OFF], strict=True)]
        sums = [sum(a) / sum(b) for a, b in zip(blocks, seconds[OFF], strict=True)]
        mine = statistics.fmean(own[name])
        found[name] = {
            "median_step_ms": 1000 * statistics.median(itertools.chain(*blocks)),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ratio_of_sums": statistics.median(sums),
            "own_us": 1e6 * mine,
            "own_share": mine / bare,
        }
    return found


def _applies(way: Way, followed: Followed, config: Config) -> bool:
    """Whether the run has what the way looks at."""
    wanted = {"wandb": "wandb", "tensorboard": "tensorboard"}
    if len(way.sinks) == 1 and way.sinks[0] in wanted and not _enabled(config, way.sinks[0]):
        return False
    if config.precision.fp8.recipe != "delayed" and way.name.startswith(("FP8", "underflow")):
        return False
    alone = way.timed and way.name not in (CONFIGURED, WAYS[-1].name)
    return followed.meter is not None or not alone


def _enabled(config: Config, sink: str) -> bool:
    return config.logging.wandb != "disabled" if sink == "wandb" else config.logging.tensorboard


def _followed(config: Config, rank: int, stack: ExitStack, first: Any, say: Callable[[str], None]) -> Followed:
    """A run ready to train, with every sink open on the leading rank."""
    mesh = mesh_of(config, rank)
    mesh.create_groups()
    comm = GroupCommunicator() if mesh.world > 1 else SingleProcess()
    if config.run.device == "cuda":
        with drawn_on_device():
            assembly = assemble(config, mesh)
    else:
        assembly = assemble(config, mesh)
    assembly.prepare(first)
    captured = assembly.engine.captured
    meter = None
    if captured is None or captured.step is None or captured.step.marks:
        seconds = 0.0
        if assembly.transport is not None:
            like = next(iter(assembly.engine.stages.values())).activation()
            seconds = latency(assembly.transport, assembly.plan.placement, mesh, like)
        meter = Meter(assembly.engine, assembly.register.knows, seconds)
    watchers: dict[str, Watcher] = {}
    for number, way in enumerate(WAYS):
        if way.logging is None:
            continue
        folder = Path(config.run.dir) / f"way-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        logging = config.logging.model_copy(update=way.logging)
        its = config.model_copy(update={"logging": logging, "run": config.run.model_copy(update={"dir": str(folder)})})
        watchers[way.name] = Watcher(its, assembly, mesh, comm, 0, False, rank == 0)
        stack.callback(watchers[way.name].close)
    followed = Followed(config, assembly, meter, watchers, {}, assembly.flat.device.type == "cuda")
    if rank == 0:
        followed.sinks = _sinks(config, stack, watchers["warnings"], say)
    return followed


def _settle(followed: Followed, inputs: list[Any]) -> None:
    """Two steps with everything: sizes are looked up, files opened, typical metrics known."""
    everything = WAYS[-1]
    for batch in inputs[:2]:
        followed.step(everything, batch)


def _sinks(config: Config, stack: ExitStack, watcher: Watcher, say: Callable[[str], None]) -> dict[str, Sink]:
    """Where a step's metrics go, each by itself. Steps of different ways go to one file, numbered anew."""
    folder, shown = Path(config.run.dir), config.to_dict()
    writer = stack.enter_context(MetricsWriter(folder / "metrics.jsonl"))
    wandb = WandbLogger(config.logging.wandb, project="bench", directory=folder, config=shown, notice=say)
    stack.callback(wandb.finish)
    board = TensorboardLogger(config.logging.tensorboard, folder, config=shown, notice=say)
    stack.callback(board.finish)
    total = 10_000_000
    bar = stack.enter_context(Progress(total, mode="bar", stream=stack.enter_context(terminal())))
    plain = stack.enter_context(Progress(total, mode="plain", stream=stack.enter_context(open(os.devnull, "w"))))
    numbers = {name: itertools.count(1) for name in ("metrics", "wandb", "tensorboard")}

    def numbered(name: str, sink: Sink) -> Sink:
        return lambda metrics: sink(replace(metrics, step=next(numbers[name])))

    def event(metrics: StepMetrics) -> None:
        watcher.events.add("warning", metrics.step, kind="bench", text="a warning as long as they are, of a role and its value")

    return {
        "metrics": numbered("metrics", writer.write),
        "wandb": numbered("wandb", wandb.log),
        "tensorboard": numbered("tensorboard", board.log),
        "bar": bar.update,
        "plain": plain.update,
        "events": event,
    }


@contextmanager
def terminal() -> Iterator[TextIO]:
    """A terminal of :data:`COLUMNS` columns whose other end a thread reads and throws away."""
    import fcntl
    import struct
    import termios

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))

    def drain() -> None:
        try:
            while os.read(master, 1 << 16):
                pass
        except OSError:  # the other end was closed
            pass

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream
    thread.join()
    os.close(master)


def cases(device: str, pp: int) -> dict[str, list[str]]:
    """Name → overrides of the configuration."""
    base = [f"parallel.pp={pp}", "logging.tensorboard=true", "logging.wandb=offline"]
    if pp == 1:
        base.append("pipeline.stage_layers=null")
    if device == "cpu":
        return {"host_replay": base}
    return {
        "eager": [*base, "graphs.backend=eager"],
        "a graph for each action": [*base, "graphs.backend=cuda_graphs", "graphs.scope=action"],
        "the step as one graph": [*base, "graphs.backend=cuda_graphs", "graphs.scope=step"],
        "the step as one graph, timed": [*base, "graphs.backend=cuda_graphs", "graphs.scope=step", "graphs.timed=true"],
    }


def table(case: str, found: dict[str, Any]) -> str:
    """For people."""
    ways = found["ways"]
    lines = [f"{case + ', followed by':38} {'step ms':>9} {'over nothing':>13} {'sum over':>9} {'own us':>9} {'of a step':>10}"]
    for name, row in ways.items():
        lines.append(
            f"{name:38} {row['median_step_ms']:>9.2f} {row['ratio']:>13.4f} {row['ratio_of_sums']:>9.4f} {row['own_us']:>9.1f} "
            f"{row['own_share']:>10.3%}"
        )
    return "\n".join(lines)

