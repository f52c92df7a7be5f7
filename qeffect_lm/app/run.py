"""A training run: from a configuration and a launch environment to a finished or stopped run."""

from __future__ import annotations

import hashlib
import resource
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import Checkpoint, CheckpointError, GroupCommunicator, SingleProcess
from checkpoint.comm import Communicator
from checkpoint.saved_run import check_saved_run
from models import build_model
from pipeline.measure import Meter, StepWatch, latency
from qeffect_lm import __version__
from qeffect_lm.app.assemble import DTYPES, Assembly, assemble, mesh_of
from qeffect_lm.app.auto_plan import agree_on_plan, choose_plan
from qeffect_lm.app.counts import active_parameters
from qeffect_lm.app.device import device_of
from qeffect_lm.app.recording import Recorder
from qeffect_lm.app.resuming import branch_of, check_config, find_checkpoint, plan_of, restore_run
from qeffect_lm.app.saving import Saver
from qeffect_lm.app.sources import check_corpora, check_tokenizer, held_out_batch, make_loader
from qeffect_lm.app.starting import companions_of, open_start, start_from
from qeffect_lm.app.step_profile import StepProfiler, make_folder
from qeffect_lm.app.watching import Watcher
from qeffect_lm.config import Config
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.data.loader import StepBatch, StepLoader
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import naming
from qeffect_lm.runtime.launch import LaunchEnv, StopSignals, check_world, init_process_group, shared_folder_check
from qeffect_lm.runtime.lock import holding
from qeffect_lm.runtime.loop import Finish, Outcome, Parts, train
from qeffect_lm.runtime.metrics import MetricsWriter, StepMetrics, Value
from qeffect_lm.runtime.progress import Progress
from qeffect_lm.runtime.rng import seed_generators
from qeffect_lm.runtime.routing import routing_metrics
from qeffect_lm.runtime.tensorboard_logger import TensorboardLogger
from qeffect_lm.runtime.wandb_logger import WandbLogger

SAVE_FAILED = 4  # in the agreement on going on: more than any reason to stop


@dataclass
class Run:
    """One rank's run while it lasts."""

    config: Config
    env: LaunchEnv
    mesh: Mesh
    comm: Communicator
    assembly: Assembly
    loader: StepLoader
    held_out: StepBatch | None
    branch: str | None
    companions: dict[str, bytes] = field(default_factory=dict)  # on the rank that leads
    origin: dict[str, Any] | None = None
    start: int = 0
    tokens: int = 0
    wandb: WandbLogger | None = None
    tensorboard: TensorboardLogger | None = None
    meter: Meter | None = None
    batch: StepBatch | None = None  # the step's that runs
    waited: float = 0.0  # seconds for that batch
    done: int = 0  # the last step that ran in this process
    watcher: Watcher | None = None  # once the run is about to begin
    progress: Progress | None = None
    recorder: Recorder = field(init=False)
    saver: Saver = field(init=False)  # once the run is about to begin

    @property
    def leads(self) -> bool:
        """The rank that prints and logs."""
        return self.env.rank == 0

    def layout(self) -> dict[str, int]:
        return dict(self.mesh.sizes)

    # ---- what the loop drives ---------------------------------------------------------------------------------

    def next_batch(self) -> StepBatch:
        began = time.monotonic()
        self.batch = self.loader.next_step()
        self.waited = time.monotonic() - began
        return self.batch

    def evaluate(self) -> float | None:
        return None if self.held_out is None else self.assembly.evaluator.run(self.held_out)

    def epoch(self) -> int | None:
        timeline = self.assembly.timeline
        return timeline.epochs[Direction.FORWARD] if self.config.precision.fp8.recipe == "delayed" else None

    def watch(self) -> Callable[[], Finish]:
        """Watch the next step; what it returns reads what the next but one overwrites, and returns what measures the step
        against the plan, collective over the pipeline, and has the news of saves."""
        watched = self._start_meter()

        def measured() -> Finish:
            told: dict[str, Value] = {"data_wait_ms": 1000 * self.waited, **self.source_losses(), **self.saver.news()}
            step, waited, meter = self.done, self.waited, self.meter
            if meter is not None and watched is not None:
                meter.read(watched)

            def finish() -> dict[str, Value]:
                seconds = 0.0
                if meter is not None and watched is not None:
                    told.update(meter.report(watched))
                    seconds = meter.t_comm
                if self.watcher is not None:
                    told.update(self.watcher.publish(step, watched, seconds, 1000 * waited))
                return told

            return finish

        return measured

    def observe(self, step: int, skipped: bool) -> None:
        self.done = step
        if self.watcher is not None:
            self.watcher.observe(step, skipped)
            assert self.batch is not None
            self.watcher.sample(step, self.batch)

    def source_losses(self) -> dict[str, Value]:
        """The last step's loss of each corpus of a blend, in nats per counted token; collective where there is a blend."""
        rows = self.assembly.engine.end.row_losses
        if rows is None or self.batch is None or self.batch.sources is None:
            return {}
        count = len(self.loader.sources)
        which = self.batch.sources.reshape(-1)
        counted = self.assembly.engine.inputs.part(self.batch.loss_mask).sum(-1).reshape(-1)  # where rows are cut, of this part
        last = any(stage.last for stage in self.assembly.engine.stages.values())
        mine = torch.zeros(2, count, dtype=torch.float64)
        if last:  # who else has the same rows has no losses of them
            mine[0].index_add_(0, which, rows.reshape(-1).cpu())
            mine[1].index_add_(0, which, counted.double())
        gathered = self.comm.gather(mine)
        if gathered is None:
            return {}
        total, tokens = torch.stack(list(gathered)).sum(0)
        return {
            f"loss/{name}": float(total[i] / tokens[i]) for i, name in enumerate(self.loader.names) if float(tokens[i]) > 0
        }

    def _start_meter(self) -> StepWatch | None:
        """The graph of a whole step measures nothing unless ``graphs.timed`` has it record times."""
        captured = self.assembly.engine.captured
        if captured is not None and captured.step is not None and not captured.step.marks:
            return None
        if self.meter is None:
            assembly, seconds = self.assembly, 0.0
            if assembly.transport is not None:
                like = next(iter(assembly.engine.stages.values())).activation()
                seconds = latency(assembly.transport, assembly.plan.placement, self.mesh, like)
            self.meter = Meter(assembly.engine, assembly.register.knows, seconds)
        return self.meter.start()

    def save(self, step: int, tokens: int) -> None:
        """Write ``step_<step>``, or begin to; collective. A failure leaves the previous checkpoint and raises."""
        self.recorder.expect(secrets.token_hex(16))
        settle = nothing if self.wandb is None else self.wandb.settle
        self.saver.save(step, lambda contract: self._meta(step, tokens, contract), settle)

    def _meta(self, step: int, tokens: int, contract: dict[str, Any]) -> dict[str, Any]:
        return {
            "qeffect_lm": __version__,
            "save_id": self.recorder.save_id,
            "step": step,
            "tokens": tokens,
            "config": self.config.to_dict(),
            "data": self.loader.state(),
            "dataset_sha256": self.loader.blends[-1].sources[0],
            "tokenizer_sha256": tokenizer_hash(self.config),
            "layout": self.layout(),
            "schedule": self.config.pipeline.schedule,
            "plan": self.assembly.plan.to_json(),
            "plan_fingerprint": self.assembly.plan.fingerprint(),
            "branch": self.branch,
            "origin": self.origin,
            "wandb": None if self.wandb is None else self.wandb.state(wait=False),
            **contract,
        }


def train_run(config: Config, env: LaunchEnv, say: Callable[[str], None] = print, signals: StopSignals | None = None) -> int:
    """Train as configured; returns the process's exit code. ``signals`` (entered) may come from the caller.

    Raises:
        UsageError, QEffectError: see their messages; every rank raises or dies.
    """
    build_model(config, None, DTYPES[config.precision.dtype])  # first: nobody should start more processes for what is refused
    check_world(config.parallel, env.world)
    check_tokenizer(config)
    check_corpora(config)
    if config.train.profile.ranges():
        make_folder(config)
    with ExitStack() as stack:
        signals = signals or stack.enter_context(StopSignals())
        device = device_of(config, env.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if config.launch.backend == "gloo" or device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if init_process_group(env, backend, config.launch.timeout_seconds):
            stack.callback(_leave_group)
        if env.rank == 0:
            stack.enter_context(holding(Path(config.run.dir)))
        run, checkpoint = _set_up(config, env, stack, say)
        stack.callback(run.assembly.release)  # before the process group is left
        stack.callback(run.loader.close)
        start = run.start
        if checkpoint is not None and run.leads:
            say(f"resumed at {start} from {checkpoint.path}")
        if run.leads:
            say(describe_run(run))
        outcome = _drive(run, checkpoint, stack, signals, say)
        if run.leads:
            _say_end(run, outcome, start, checkpoint is not None, say)
        return exit_code(config, env, outcome.stopped is not None)


def exit_code(config: Config, env: LaunchEnv, stopped: bool) -> int:
    """0, or for a stopped run ``checkpoint.requeue_exit_code``; never under torchrun, whose agent takes any other code for a
    failure and starts the ranks again."""
    return config.checkpoint.requeue_exit_code if stopped and env.launcher != "torchrun" else 0


def describe_run(run: Run) -> str:
    """One line of what is about to train."""
    config, plan = run.config, run.assembly.plan
    specs = run.assembly.model.parameters()
    total, active = sum(prod(spec.shape) for spec in specs), active_parameters(specs)
    parameters = f"{total:,} parameters" + (f" ({active:,} of them active)" if active < total else "")
    tokens = config.data.seq_len * config.data.microbatch_size * plan.microbatches * config.parallel.samples
    layout = " ".join(f"{axis}={size}" for axis, size in run.layout().items() if size > 1) or "one process"
    fp8 = config.precision.fp8
    numbers = config.precision.dtype if fp8.recipe == "none" else f"FP8 {fp8.recipe} ({fp8.window})"
    return (
        f"{config.run.name}: {parameters}, {numbers}, {layout}, {plan.schedule} with {plan.microbatches} "
        f"microbatches, {tokens:,} tokens per step, {config.graphs.backend}, contract {config.contract.mode}"
    )


def _set_up(
    config: Config, env: LaunchEnv, stack: ExitStack, say: Callable[[str], None]
) -> tuple[Run, Checkpoint | None]:
    """Everything before the first step, in the order of the restore; ``stack`` holds the checkpoints' folder."""
    mesh, comm = join(config, env)
    shared_folder_check(config.checkpoint_dir(), env)
    if env.rank == 0 and not config.checkpoint_dir().samefile(config.run.dir):  # that one is held
        stack.enter_context(holding(config.checkpoint_dir(), "wait for it, stop it, or choose another checkpoint.dir"))
    checkpoint = find_checkpoint(config, comm)
    run = build(config, env, mesh, comm, checkpoint, say)
    return run, checkpoint


def join(config: Config, env: LaunchEnv) -> tuple[Mesh, Communicator]:
    """This rank's place among the others, which it meets here."""
    mesh = mesh_of(config, env.rank)
    mesh.create_groups(config.launch.timeout_seconds)
    return mesh, GroupCommunicator() if env.world > 1 else SingleProcess()


def build(
    config: Config, env: LaunchEnv, mesh: Mesh, comm: Communicator, checkpoint: Checkpoint | None, say: Callable[[str], None]
) -> Run:
    """A run that is ready for its first step: fresh, or restored from ``checkpoint``; nothing is written. Collective."""
    if checkpoint is not None:
        check_saved_run(checkpoint)
    changed = [] if checkpoint is None else check_config(config, checkpoint, env, say)
    first = open_start(config) if checkpoint is None else None
    seed_generators(config.run.seed, env.rank)
    loader = make_loader(config, mesh, device_of(config).type == "cuda")
    peek = loader.peek  # the first step's data; nothing is consumed
    plan = plan_of(checkpoint, mesh, config)
    if plan is not None and env.rank == 0 and config.pipeline.schedule == "auto":
        say("auto: the checkpoint's plan, nothing is measured")
    if plan is None:
        plan = choose_plan(config, mesh, comm, peek, say)
    agree_on_plan(config, plan, comm)
    assembly = assemble(config, mesh, plan)
    held_out, branch = held_out_batch(config), branch_of(config, checkpoint)
    run = Run(config, env, mesh, comm, assembly, loader, held_out, branch)
    run.recorder = Recorder(assembly, loader, mesh, comm, config, say)
    if run.leads:
        run.companions = companions_of(config, checkpoint or first, say)
    if checkpoint is None:
        _begin(run, first, peek, say)
    else:
        run.origin = checkpoint.meta.get("origin")
        note = restore_run(checkpoint, assembly, loader, comm, mesh, changed, say)
        if note is not None and env.rank == 0:
            say(note)
        run.start, run.tokens = checkpoint.step, int(checkpoint.meta["tokens"])
        if note is None and "save_id" in checkpoint.meta:  # else the step is another one, or the checkpoint older than records
            run.recorder.expect(checkpoint.meta["save_id"])
    return run


def _begin(run: Run, first: Checkpoint | None, peek: Callable[[], StepBatch], say: Callable[[str], None]) -> None:
    """The first step's state: random weights, or those of ``first``."""
    if first is None:
        run.assembly.prepare(peek())
        return
    start = start_from(first, run.assembly, run.comm)
    run.origin, run.start, run.tokens = start.origin, start.step, start.tokens
    run.loader.load_state({**run.loader.state(), "next_sample": start.next_sample})
    if start.calibrated:
        run.assembly.rebuild_caches()
        run.assembly.prepare(None)
    else:
        run.assembly.prepare(peek())
    if run.leads:
        what = f"training goes on after step {start.step}" if run.config.checkpoint.init_state == "training" else "its weights"
        say(f"started from {first.path}: {what}")


def _drive(
    run: Run, checkpoint: Checkpoint | None, stack: ExitStack, signals: StopSignals, say: Callable[[str], None]
) -> Outcome:
    """Open the sinks, run the loop, close them."""
    config, resumed = run.config, checkpoint is not None
    run.saver = Saver(config, run.assembly, run.mesh, run.comm, run.leads, run.companions)
    stack.callback(run.saver.close)
    run.done = run.start
    run.watcher = watcher = Watcher(config, run.assembly, run.mesh, run.comm, run.start, resumed, run.leads)
    stack.callback(watcher.close)
    sinks: list[Callable[[StepMetrics], None]] = []
    if run.leads:
        sinks = _open_sinks(run, checkpoint, watcher, stack, say)
    if run.start == 0 and config.train.eval_every:
        before = run.evaluate()
        if before is not None and run.leads:
            zero = StepMetrics(
                step=0, loss=None, grad_norm=None, lr=None, tokens=0, tokens_per_second=None, step_ms=None, eval_loss=before
            )
            watcher.events.add("evaluation", 0, loss=before)
            for sink in sinks[:-1]:
                sink(zero)
            say(f"held-out loss before training: {before:.3f} nats per token")

    def report(metrics: StepMetrics) -> None:
        if run.leads:
            told = watcher.complete(metrics)
            for sink in sinks:
                sink(told)

    parts = Parts(
        next_batch=run.next_batch,
        step=run.assembly.engine.step,
        evaluate=run.evaluate,
        save=run.save,
        epoch=run.epoch,
        stop=_stopper(config, signals, run.env, run.saver),
        report=report,
        watch=run.watch,
        observe=run.observe,
        record=run.recorder.record,
        describe=lambda result: routing_metrics(result.routing),
        patient=run.assembly.flat.device.type == "cuda",
    )
    profiler = _profiler(run, say)
    if profiler is not None:
        stack.callback(profiler.close)
        parts = profiler.around(parts)
    try:
        outcome = train(config, parts, run.start, run.tokens)
        if profiler is not None:
            profiler.finish()  # a run that was stopped in the midst of the chosen steps
        run.saver.finish()
    except BaseException as error:
        if run.leads:
            watcher.events.add("error", run.done, kind=type(error).__name__, text=str(error).split("\n")[0])
        raise
    finally:
        if run.progress is not None:
            run.progress.close()  # what is said from here on stands below it
    if run.leads:
        watcher.events.add("end", outcome.step, stopped=outcome.stopped)
    return outcome


def _profiler(run: Run, say: Callable[[str], None]) -> StepProfiler | None:
    """None where no step is to be profiled."""
    if not run.config.train.profile.ranges():
        return None
    told = nothing if not run.leads else say if run.progress is None else run.progress.message
    return StepProfiler(run.config, run.assembly.engine, run.comm, run.start, told)


def _open_sinks(
    run: Run, checkpoint: Checkpoint | None, watcher: Watcher, stack: ExitStack, say: Callable[[str], None]
) -> list[Callable[[StepMetrics], None]]:
    """On the leading rank: what takes each step's metrics, the progress line last."""
    config = run.config
    config_file = _save_config(config, run.start)
    resume_step = None if checkpoint is None else run.start
    writer = stack.enter_context(MetricsWriter(Path(config.run.dir) / "metrics.jsonl", resume_step))
    for notice in writer.notices:
        say(notice)
    facts = watcher.facts()
    shown = {**config.to_dict(), "facts": facts}
    run.wandb = WandbLogger(
        config.logging.wandb,
        project=config.logging.wandb_project,
        name=config.run.name,
        directory=config.run.dir,
        config=shown,
        entity=config.logging.wandb_entity,
        group=config.logging.wandb_group,
        resumed=None if checkpoint is None else checkpoint.meta.get("wandb"),
        resume_step=run.start,
        notice=say,
    )
    stack.push(lambda kind, *_: run.wandb.finish(0 if kind is None else 1) if run.wandb is not None else None)
    run.tensorboard = TensorboardLogger(
        config.logging.tensorboard, config.run.dir, config=shown, resume_step=resume_step, notice=say
    )
    stack.callback(run.tensorboard.finish)
    plan, picture = watcher.write_plan()
    run.wandb.picture("plan", picture, run.start)
    resumed_from = None if checkpoint is None else str(checkpoint.path)
    about = {"resumed_from": resumed_from, "config": config_file, "plan": plan, "wandb": run.wandb.state(wait=False)}
    watcher.events.add("start", run.start, **about, **facts)
    watcher.events.listeners += [run.wandb.event, run.tensorboard.event]
    if watcher.peak is None and run.assembly.flat.device.type == "cuda":
        say(f"no MFU: the peak of {torch.cuda.get_device_name()} is not known (qeffect_lm/runtime/peaks.py)")
    run.progress = progress = stack.enter_context(Progress(config.train.steps, run.start, mode=config.logging.progress))
    run.saver.say = run.recorder.say = watcher.say = progress.message
    run.saver.events = watcher.events
    return [writer.write, run.wandb.log, run.tensorboard.log, progress.update]


def _stopper(config: Config, signals: StopSignals, env: LaunchEnv, saver: Saver) -> Callable[[], str | None]:
    """Why to stop, agreed by all ranks: a signal to any of them, or the time limit of any of them.

    Where a save in the background failed on any of them, all raise its error instead.
    """
    began = time.monotonic()
    limit = config.train.max_minutes
    others = [rank for rank in range(env.world) if rank != env.rank]
    reasons = {1: f"train.max_minutes={limit:g}" if limit else "", 2: "SIGTERM", 3: "SIGUSR1"}

    def stop() -> str | None:
        code = 0
        if limit is not None and time.monotonic() - began >= 60 * limit:
            code = 1
        if signals.requested is not None:
            code = 3 if signals.requested == "SIGUSR1" else 2
        if saver.failed:
            code = SAVE_FAILED
        if env.world > 1:
            agreed = torch.tensor(code)
            with naming(others, "the agreement on going on"):
                dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            code = int(agreed)
        if code == SAVE_FAILED:
            saver.finish()
            raise CheckpointError("a save in the background failed on another rank; the checkpoint before it survives")
        return reasons[code] if code else None

    return stop


def _say_end(run: Run, outcome: Outcome, start: int, resumed: bool, say: Callable[[str], None]) -> None:
    ran = f"ran {start + 1}…{outcome.step}" if outcome.step > start else "ran no step"
    head = f"resumed at {start}, {ran}" if resumed else ran
    total = run.config.train.steps
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    say(
        f"peak memory of rank 0: {peak:,.0f} MiB; metrics {run.config.run.dir}/metrics.jsonl; "
        f"checkpoints {run.config.checkpoint_dir()}"
    )
    if outcome.stopped:
        saved = "saved" if outcome.step > start else "nothing new to save"
        say(f"{head}; stopped by {outcome.stopped} at step {outcome.step} of {total}, {saved}")
    else:
        say(f"{head} of {total}")


def _save_config(config: Config, start: int) -> str:
    """The resolved configuration beside the run; a resume with another one keeps both. Returns the file's name."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    text = config.dump_yaml()
    if path.exists() and path.read_text() != text and start:
        path = folder / f"config.resumed-at-{start}.yaml"
    path.write_text(text)
    return path.name


def tokenizer_hash(config: Config) -> str | None:
    """SHA-256 of ``data.tokenizer``; None without one."""
    return None if config.data.tokenizer is None else hashlib.sha256(Path(config.data.tokenizer).read_bytes()).hexdigest()


def nothing(*_: object) -> None:
    """There is nothing to wait for."""


def _leave_group() -> None:
    dist.destroy_process_group()
