"""Assembly: a configuration becomes one rank's objects, wired.

Model chunks, flat storages, timeline, weight cache, ledger, plan and engine, and the register of what a capture may touch.
The training run (:mod:`qeffect_lm.app.run`) and the tools drive them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from models import build_model
from models.decoder import Decoder
from pipeline.batch import StepBuffers
from pipeline.calibrate import calibrate
from pipeline.capture import capture, capture_step
from pipeline.captured import Captured
from pipeline.engine import Engine
from pipeline.evaluate import Evaluator
from pipeline.fingerprint import document
from pipeline.p2p import Transport, queues_of
from pipeline.plan import Plan, build_plan
from pipeline.program import COMPUTE
from pipeline.prove import prove_rank
from pipeline.stage import BorderShape, Stage
from pipeline.step_end import StepEnd
from qeffect_lm import __version__
from qeffect_lm.app import optimizer as optimizers
from qeffect_lm.app.counts import routing_sums
from qeffect_lm.app.device import device_of
from qeffect_lm.app.holdings import block_order, initialise, param_specs, tied_weights
from qeffect_lm.app.sources import check_documents
from qeffect_lm.config import Config
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.ledger import Ledger, Mode
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.contract.trace import TraceWriter
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.cache import WeightCache
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling, Recipe
from qeffect_lm.graphs.backend import GraphBackend
from qeffect_lm.graphs.cuda_graphs import CudaGraphs
from qeffect_lm.graphs.document import fingerprint
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import HiddenStateRegister, Rule
from qeffect_lm.kernels import cudnn_attention
from qeffect_lm.kernels.cublaslt import CublasLt
from qeffect_lm.layers import te
from qeffect_lm.layers.attention import bind_attention
from qeffect_lm.layers.base import direct_layers, named_parameters
from qeffect_lm.layers.grouped import ExpertLinear
from qeffect_lm.layers.linear import SplitLinear, bind_products
from qeffect_lm.layers.moe import bind_experts, bind_statistics
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.optim.spikes import SpikeGate
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import TensorParallel
from qeffect_lm.runtime.watchdog import CompletionWatchdog
from qeffect_lm.state import LogicalTensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Assembly:
    """One rank's parts, wired."""

    config: Config
    mesh: Mesh
    model: Decoder
    plan: Plan
    engine: Engine
    evaluator: Evaluator
    flat: FlatBuffers
    optimizer: Optimizer
    timeline: ScaleTimeline
    cache: WeightCache
    ledger: Ledger
    register: HiddenStateRegister
    transport: Transport | None
    trace: TraceWriter | None
    gate: SpikeGate | None
    _document: tuple[Captured | None, list[str]] | None = field(default=None, init=False, repr=False)

    def logical_tensors(self) -> list[LogicalTensor]:
        """Everything a checkpoint saves of this rank, except generators."""
        return [
            *self.flat.logical_tensors(),
            *self.optimizer.logical_tensors(),
            *([] if self.gate is None else self.gate.logical_tensors()),
            *self.timeline.logical_tensors(),
            *self.cache.logical_tensors(self.flat),
        ]

    def rebuild_caches(self) -> None:
        """Quantise all weights from the masters with the current scales (fresh start, or after a load)."""
        if self.cache.names:
            with torch.no_grad(), self.engine.computing():
                self.cache.refresh_()
                self.engine.end.merge_weight_amax_()
            self.engine.account_refresh()

    def require_caches(self, reader: str) -> None:
        """Raises StaleWeightError where a weight cache was not made from the current parameters and scales."""
        if self.ledger.checks:
            reads = tuple((name, "rows") for name in self.cache.names)
            self.ledger.versions.require_all(reads, epoch=self.ledger.weight_epoch(), reader=reader)

    def prepare(self, batch: object | None) -> None:
        """Before the first step: calibration on ``batch`` (fresh start only; None: none), caches, capture."""
        if batch is not None and self.config.precision.fp8.recipe == "delayed" and self.timeline.window == "step":
            # Whether this rank has a role or not: its neighbours wait for its part of the microbatch.
            calibrate(self.engine, batch)  # type: ignore[arg-type]
        if batch is not None:
            self.rebuild_caches()
        self.capture()

    def capture(self) -> None:
        """Capture the plan's graphs where the configuration asks for them; with ``graphs.scope=step`` collective."""
        graphs = self.config.graphs
        backend: GraphBackend
        for name, tensor in self.cache.scratch().items():  # eager work has it too, and a save looks at all that parts hold
            if not self.register.knows(tensor):
                self.register.add(f"cache/{name}", tensor, owner="cache", rule=Rule.CONSTANT)
        if graphs.backend == "eager":
            return
        if graphs.backend == "host_replay":
            backend = HostReplay()
        else:
            stream = self.engine.streams.real(COMPUTE)
            assert stream is not None, "device_of has seen to it"
            backend = CudaGraphs(stream)
        if graphs.scope == "step":
            timed = graphs.timed and graphs.backend == "cuda_graphs"
            capture_step(self.engine, backend, self.register, optimizer=graphs.optimizer == "inside", timed=timed)
            others = [rank for rank in range(self.mesh.world) if rank != self.mesh.rank]
            if others and graphs.backend == "cuda_graphs" and self.engine.watchdog is None:
                self.engine.watchdog = CompletionWatchdog(self.config.launch.timeout_seconds, others)
        else:
            capture(self.engine, backend, self.register)

    def release(self) -> None:
        """Destroy the captured graphs, before the communicators that they hold are given back."""
        if self.engine.watchdog is not None:
            self.engine.watchdog.close()
            self.engine.watchdog = None
        if self.engine.captured is not None:
            self.engine.captured.release()
            self.engine.captured = self._document = None

    def graph_document(self) -> list[str]:
        """What a re-capture must reproduce, as lines (:mod:`pipeline.fingerprint`); in eager the plan alone."""
        captured = self.engine.captured
        if self._document is None or self._document[0] is not captured:  # made once: every save asks for it
            lines = self.plan.text().splitlines() if captured is None else document(self.plan, self.engine.rank, captured)
            self._document = captured, lines
        return self._document[1]

    def graph_fingerprint(self) -> str:
        """SHA-256 of the document."""
        return fingerprint(self.graph_document())


def make_recipe(config: Config) -> Recipe | None:
    """The FP8 recipe of the configuration; None without FP8."""
    fp8 = config.precision.fp8
    if fp8.recipe == "none":
        return None
    if fp8.recipe == "block":
        return te.BlockScaling()
    return CurrentScaling(fp8.margin) if fp8.recipe == "current" else DelayedScaling()


def make_plan(config: Config) -> Plan:
    """The plan of the configuration's named schedule, validated; ``auto`` is made by :mod:`qeffect_lm.app.auto_plan`."""
    pipeline = config.pipeline
    return build_plan(
        pipeline.schedule,
        config.parallel.pp,
        pipeline.microbatches,
        pipeline.w_delay,
        config.precision.fp8.window,
        pipeline.chunks,
        coalesce_w=pipeline.coalesce_w,
    )


def make_timeline(
    config: Config, recipe: Recipe | None, layers: list[SplitLinear], device: torch.device
) -> ScaleTimeline:
    """Roles of all FP8 linears, under the configuration's window and history."""
    fp8 = config.precision.fp8
    roles = [
        replace(role, shared=not isinstance(layer, ExpertLinear))
        for layer in layers
        if layer.recipe is not None
        for role in layer.recipe.roles(layer.name)
    ]
    timeline = ScaleTimeline(
        roles,
        window=fp8.window,
        history=fp8.history,
        amax=fp8.amax,
        margin=fp8.margin,
        device=device,
    )
    if isinstance(recipe, DelayedScaling):
        recipe.bind(timeline)
    return timeline


def mesh_of(config: Config, rank: int = 0) -> Mesh:
    """The mesh of a configuration's layout, as ``rank`` sees it; its groups are yet to be made."""
    return Mesh(config.parallel.sizes, rank)


def assemble(
    config: Config,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    device: torch.device | None = None,
    *,
    rehearsal: bool = False,
) -> Assembly:
    """Build one rank's part, with freshly initialised weights.

    Args:
        mesh: None: this process alone (all parallel sizes 1, or the plan's chunks all on one rank).
        plan: None: the configuration's.
        device: of all tensors; None: the configuration's.
        rehearsal: of tensors without data (:mod:`qeffect_lm.app.rehearsal`): they get no values, and none is registered.

    Raises:
        UsageError: the configuration asks for something that does not exist.
        PlanError: the plan cannot run; names rank, position, action and reason.
    """
    device = device or device_of(config)
    library = te.load(device, config.precision.fp8.recipe) if config.model.backend == "te" else None
    mesh = mesh or mesh_of(config)
    plan = plan or make_plan(config)
    dtype = DTYPES[config.precision.dtype]
    recipe = make_recipe(config)
    tp, cp = TensorParallel.of(mesh, config.parallel.sequence_parallel), ContextParallel.of(mesh)
    model = build_model(config, recipe, dtype, tp, cp, ep=ExpertParallel.of(mesh))
    if config.contract.mode != "off":
        # All ranks together prove the plan, before anything is allocated.
        prove_rank(plan, mesh.coord("pp"), replicas=mesh.size("data") > 1, tied=bool(model.ties), peers=mesh.size("peers") > 1)
    counts = config.chunk_layers(plan.placement.num_chunks)
    chunks = {i: _chunk(model, device, i, counts) for i in plan.placement.chunks(mesh.coord("pp"))}
    specs = {spec.name: spec for spec in model.parameters()}

    flat = _flat_storages(config, param_specs(config, chunks, specs, model.ties, tp), dtype, device, shard_of(config, mesh))
    for chunk in chunks.values():
        _bind_parameters(chunk, flat)
        if config.data.documents == "reset":
            check_documents(chunk)
    if not rehearsal:
        initialise(flat, specs, config.run.seed)
    tied = tied_weights(model, plan, counts, flat, mesh)

    linears = [m for chunk in chunks.values() for m in chunk.modules() if isinstance(m, SplitLinear)]
    timeline = make_timeline(config, recipe, linears, device)
    cache = _weight_cache(flat, linears, library)
    for linear in linears:
        linear.cached = cache.cached.get(linear.weight_name)
    _bind_libraries(chunks.values(), device, native=library is None)
    routing = routing_sums(model.num_layers, specs.values(), device)
    for chunk in chunks.values():
        bind_statistics(chunk, routing)
    hidden: dict[str, torch.Tensor] = {}
    if library is not None and isinstance(cache, te.TEWeightCache):
        shape = (config.data.microbatch_size, config.data.seq_len)
        hidden = te.connect(chunks.values(), library, recipe, timeline, cache, shape)

    trace = _trace_writer(config, mesh)
    ledger = Ledger(
        timeline,
        WeightVersions(flat.names),
        GradSlots(GradSlot(name, flat.grad(name)) for name in flat.gradient_names),
        mode=Mode(config.contract.mode),
        trace=trace,
    )
    optimizer, gate = optimizers.make(config, flat, specs), optimizers.gate_of(config, device)
    order, counted = block_order(model, plan, counts, flat, mesh)
    end = StepEnd(
        mesh=mesh,
        flat=flat,
        optimizer=optimizer,
        timeline=timeline,
        cache=cache,
        order=order,
        microbatches=plan.microbatches,
        gate=gate,
        tied=tied,
        routing=routing,
        rows=config.data.microbatch_size if config.data.blend is not None else 0,
        counted=counted,
    )
    divisor = torch.ones((), dtype=torch.float64 if dtype is torch.float64 else torch.float32, device=device)
    stages = _stages(config, plan, mesh, chunks, flat, divisor, dtype)
    inputs = StepBuffers(
        (plan.microbatches, config.data.microbatch_size, config.data.seq_len),
        divisor,
        first=any(stage.first for stage in stages.values()),
        last=any(stage.last for stage in stages.values()),
        seed=config.run.seed,
        **{"replica": mesh.coord("samples"), "replicas": mesh.size("samples")},
        masked=any(stage.masked for stage in stages.values()),
        documents=config.data.documents == "reset",
        cp=cp,
    )
    transport = None
    if plan.num_ranks > 1:
        most = max(plan.microbatches, config.train.eval_microbatches)
        transport = Transport(mesh, queues_of(plan), most, config.launch.timeout_seconds, device)
    engine = Engine(
        plan=plan,
        mesh=mesh,
        stages=stages,
        ledger=ledger,
        cache=cache,
        end=end,
        inputs=inputs,
        transport=transport,
        poison=config.contract.poison,
    )
    for index, chunk in chunks.items():
        _declare_roles(ledger, index, chunk)
        _declare_collectives(ledger, index, chunk)
    register = HiddenStateRegister() if rehearsal else _register(flat, timeline, cache, optimizer, end, stages, inputs)
    for name, tensor in hidden.items():
        register.add(f"transformer_engine/{name}", tensor, owner="transformer_engine", rule=Rule.SCRATCH)
    evaluator = Evaluator(engine)
    return Assembly(
        config, mesh, model, plan, engine, evaluator, flat, optimizer, timeline, cache, ledger, register, transport, trace, gate
    )


def _flat_storages(
    config: Config, params: list[ParamSpec], dtype: torch.dtype, device: torch.device, shard: Shard | None
) -> FlatBuffers:
    return FlatBuffers(
        params,
        master_dtype=torch.float64 if dtype is torch.float64 else torch.float32,
        param_dtype=dtype,
        grad_dtype=optimizers.grad_dtype(config),
        moment_dtype=optimizers.moment_dtype(config),
        device=device,
        shard=shard,
    )


def shard_of(config: Config, mesh: Mesh) -> Shard | None:
    """The part of the optimizer's state that a rank holds; None for all of it (``optim.zero`` 0, or a single replica)."""
    if not config.optim.zero or mesh.size("replicas") == 1:
        return None
    return Shard(mesh.size("replicas"), mesh.coord("replicas"), int(config.parallel.bucket_mib * 2**20))


def _bind_parameters(chunk: torch.nn.Module, flat: FlatBuffers) -> None:
    """Make every parameter a view of the flat storage, and give direct layers their main gradients."""
    for name, parameter in named_parameters(chunk):
        parameter.data = flat.param(name)
    for module in chunk.modules():  # what is left: buffers
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(flat.device))
    for layer in direct_layers(chunk):
        if layer.weight.requires_grad:
            layer.main_grad = flat.grad(layer.weight_name)


def _chunk(model: Decoder, device: torch.device, index: int, counts: list[int]) -> torch.nn.Module:
    return model.meta_chunk(index, counts) if device.type == "meta" else model.chunk(index, counts)


def _bind_libraries(chunks: Iterable[torch.nn.Module], device: torch.device, native: bool) -> None:
    """On a GPU its products and, but for Transformer Engine's layers, its attention."""
    if device.type != "cuda":
        return
    products, attention = CublasLt(device), cudnn_attention.load(device) if native else None
    for chunk in chunks:
        bind_products(chunk, products)
        bind_attention(chunk, attention)
        bind_experts(chunk)


def _weight_cache(flat: FlatBuffers, linears: list[SplitLinear], library: te.Library | None) -> WeightCache:
    """One cached form of every FP8 weight: of the master natively, of the compute-dtype parameter by Transformer Engine.

    A sharded master is whole on no rank: its parameter serves, with the same bits, since a cache is made of BF16(master).
    """
    quantised = [(m, m.recipe) for m in linears if m.recipe is not None]
    if library is None:
        source = _master_of if flat.whole_masters else _param_of
        return WeightCache({m.weight_name: (m.name, recipe, source(flat, m.weight_name)) for m, recipe in quantised})
    return te.TEWeightCache({m.weight_name: (m.name, recipe, _param_of(flat, m.weight_name)) for m, recipe in quantised})


def _param_of(flat: FlatBuffers, name: str):  # noqa: ANN202 (a closure over the live view)
    parameter = flat.param(name)
    return lambda: parameter


def _master_of(flat: FlatBuffers, name: str):  # noqa: ANN202 (a closure over the live view)
    master = flat.master(name)
    return lambda: master


def _declare_roles(ledger: Ledger, index: int, chunk: torch.nn.Module) -> None:
    """Which scale roles every F and I of a chunk owes the timeline."""
    layers = [m for m in chunk.modules() if isinstance(m, SplitLinear) and isinstance(m.recipe, DelayedScaling)]
    ledger.declare_roles("F", index, [f"{layer.name}.input" for layer in layers])
    ledger.declare_roles("I", index, [f"{layer.name}.grad_output" for layer in layers])


def _declare_collectives(ledger: Ledger, index: int, chunk: torch.nn.Module) -> None:
    """What every F and I of a chunk exchanges with other ranks, if there are any."""
    told: list[dict[str, tuple[str, ...]]] = [getattr(module, "collectives", {}) for module in chunk.modules()]
    for kind in ("F", "I"):
        names = [name for layer in told for name in layer.get(kind, ())]
        if names:
            ledger.collectives.declare(kind, index, names)


def _trace_writer(config: Config, mesh: Mesh) -> TraceWriter | None:
    if config.contract.mode != "trace":
        return None
    path = Path(config.contract.trace_file or Path(config.run.dir) / "trace.jsonl")
    path = path if mesh.world == 1 else path.with_name(f"{path.stem}.rank{mesh.rank}{path.suffix}")
    return TraceWriter(path, {"rank": mesh.rank, "world": mesh.world, "qeffect_lm": __version__})


def _stages(
    config: Config,
    plan: Plan,
    mesh: Mesh,
    chunks: Mapping[int, torch.nn.Module],
    flat: FlatBuffers,
    divisor: torch.Tensor,
    dtype: torch.dtype,
) -> dict[int, Stage]:
    share = mesh.size("tp") if config.parallel.sequence_parallel else 1
    sequence = config.data.seq_len // mesh.size("cp")
    shape = BorderShape(config.data.microbatch_size, sequence, config.model.hidden_size, dtype, share)
    slots = plan.slots[mesh.coord("pp")]
    grads = {name: flat.grad(name) for name in flat.gradient_names}
    last = plan.placement.num_chunks - 1
    return {
        index: Stage(
            chunk,
            index,
            first=index == 0,
            last=index == last,
            i_slots=slots.i_slots.count[index],
            w_slots=slots.w_slots.count[index],
            coalesce_w=plan.coalesce_w,
            shape=shape,
            divisor=divisor,
            main_grads=grads,
            device=flat.device,
            **{"documents": config.data.documents == "reset", "row_losses": config.data.blend is not None},
        )
        for index, chunk in chunks.items()
    }


def _register(
    flat: FlatBuffers,
    timeline: ScaleTimeline,
    cache: WeightCache,
    optimizer: Optimizer,
    end: StepEnd,
    stages: dict[int, Stage],
    inputs: StepBuffers,
) -> HiddenStateRegister:
    """Everything a capture may touch, with its owner."""
    register = HiddenStateRegister()
    register.add("divisor", inputs.divisor, owner="engine")
    staged = {name: tensor for name, tensor in vars(inputs).items() if isinstance(tensor, torch.Tensor) and name != "divisor"}
    for name, tensor in staged.items():
        register.add(f"inputs/{name}", tensor, owner="engine", rule=Rule.SCRATCH)
    trained = dict.fromkeys(("master_buffer", "moment1_buffer", "moment2_buffer"), Rule.GUARDED)
    if flat.separate_params:
        trained["param_buffer"] = Rule.GUARDED
    trained |= {f"tied_param_buffers.{name}": Rule.GUARDED for name in flat.tied_param_buffers}
    scratch = ["grad_buffer", *(f"tied_grad_buffers.{name}" for name in flat.tied_grad_buffers)]
    register.add_object("flat", flat, trained | dict.fromkeys(scratch, Rule.SCRATCH))
    for name, tensor in cache.tensors():
        register.add(f"cache/{name}", tensor, owner="cache", rule=Rule.GUARDED)
    received = dict.fromkeys(end.scratch, Rule.SCRATCH)
    for owner, part in (("timeline", timeline), ("optimizer", optimizer), ("step_end", end)):
        # What they share with flat and cache has its rule already.
        register.add_object(owner, part, received if part is end else None)
    for index, stage in stages.items():
        for number, slot in enumerate(stage.slots):
            for name, tensor in slot.tensors().items():
                constant = name == "anchor" or (name == "dy" and stage.last)
                label = f"chunk{index}/slot{number}/{name}"
                register.add(label, tensor, owner="stage", rule=Rule.CONSTANT if constant else Rule.SCRATCH)
                register.watch(label, lambda slot=slot, name=name: slot.tensors()[name])  # type: ignore[misc]
        for name, tensor in ({} if stage.joined is None else stage.joined.tensors()).items():
            register.add(f"chunk{index}/joined/{name}", tensor, owner="stage", rule=Rule.SCRATCH)
        for name, buffer in stage.chunk.named_buffers():
            register.add(f"chunk{index}/{name}", buffer, owner="layers", rule=Rule.CONSTANT)
        for name, parameter in named_parameters(stage.chunk):
            if not register.knows(parameter):
                raise UsageError(f"parameter {name} of chunk {index} does not lie in the flat storage")
            register.watch(name, lambda parameter=parameter: parameter)  # type: ignore[misc]
    for attribute in ("scale", "history", "open_amax"):
        register.watch(f"timeline/{attribute}", lambda attribute=attribute: getattr(timeline, attribute))  # type: ignore[misc]
    return register
