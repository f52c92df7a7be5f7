"""What the layers of a run cost: a short profile for ``pipeline.schedule: auto`` (of training's steps: step_profile.py).

Every rank runs a small model of the run's own layers by itself: the embedding, one decoder layer of each kind (in FP8, in high
precision), and the final norm with head and loss, each as a chunk, with the run's shapes, recipe and graph backend. It has
weights, scales and gradients of its own, and generators are put back: the run does not change by a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from pipeline.actions import Kind
from pipeline.batch import StepInput
from pipeline.measure import Meter, latency
from pipeline.p2p import Transport
from pipeline.rendezvous import Queue
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import DTYPES, Assembly, assemble
from qeffect_lm.app.device import device_of
from qeffect_lm.config import Config
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.rng import restore_generators, save_generators

WARM_UP, STEPS, MICROBATCHES = 1, 2, 4


@dataclass(frozen=True)
class Part:
    """One microbatch of a part of the model: seconds of F, I, W, and bytes held after F and after I."""

    t_f: float
    t_i: float
    t_w: float
    m_b: float
    m_w: float


@dataclass(frozen=True)
class Profile:
    """One rank's parts, and the seconds that a message takes between neighbours.

    Attributes:
        layers: by whether a decoder layer is in FP8.
    """

    embedding: Part
    layers: dict[bool, Part]
    head: Part
    t_comm: float


@dataclass(frozen=True)
class Microbatches:
    """As :class:`pipeline.batch.StepInput`."""

    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    tokens: int
    starts: torch.Tensor | None = None


def made_up_batch(config: Config) -> Microbatches:
    """A microbatch where there is no data yet (a dry run)."""
    data = config.data
    shape = (1, data.microbatch_size, data.seq_len)
    tokens = torch.arange(data.microbatch_size * data.seq_len).view(shape) % config.model.vocab_size
    starts = torch.zeros(shape, dtype=torch.int32) if data.documents == "reset" else None
    return Microbatches(tokens, tokens.roll(-1, -1), torch.ones(shape), tokens.numel() * config.pipeline.microbatches, starts)


def in_fp8(config: Config) -> list[bool]:
    """For each decoder layer whether its linears run in FP8."""
    fp8, layers = config.precision.fp8, config.model.num_layers
    last = layers - fp8.high_precision_last
    return [fp8.recipe != "none" and fp8.high_precision_first <= i < last for i in range(layers)]


def profile(config: Config, batch: StepInput) -> Profile:
    """Measure this process's layers on microbatch 0 of ``batch``; without messages."""
    generators = save_generators()
    try:
        kinds = sorted(set(in_fp8(config)))
        assembly = assemble(_small(config, kinds), Mesh({}))
        parts = _measured(assembly, batch)
    finally:
        restore_generators(generators)
    embedding, *layers, head = parts
    return Profile(embedding, dict(zip(kinds, layers, strict=True)), head, 0.0)


def message_seconds(config: Config, mesh: Mesh) -> float:
    """Seconds of an activation's way to the next rank; collective over all ranks."""
    p = mesh.size("pp")
    if p == 1:
        return 0.0
    queues = [Queue(a, b, d) for r in range(p - 1) for a, b, d in ((r, r + 1, "F"), (r + 1, r, "B"))]
    device = device_of(config)
    transport = Transport(mesh, queues, 1, config.launch.timeout_seconds, device)
    shape = config.data.microbatch_size, config.data.seq_len // mesh.size("cp"), config.model.hidden_size
    like = torch.zeros(shape, dtype=DTYPES[config.precision.dtype], device=device)
    seconds = latency(transport, Placement.linear(p), mesh, like)
    transport.close()
    return seconds


def _small(config: Config, kinds: list[bool]) -> Config:
    """One process, one decoder layer of each kind (high precision before FP8), each part a chunk."""
    small = config.to_dict()
    small["model"] |= {"num_layers": len(kinds)}
    small["precision"]["fp8"] |= {"high_precision_first": int(False in kinds and config.precision.fp8.recipe != "none")}
    small["precision"]["fp8"] |= {"high_precision_last": 0}
    small["parallel"] = {}
    small["pipeline"] = {
        "schedule": "interleaved-1f1b",
        "microbatches": MICROBATCHES,
        "chunks": len(kinds) + 2,
        "stage_layers": [0, *[1] * len(kinds), 0],
    }
    small["graphs"]["scope"] = "action"  # parts are timed one by one
    small["contract"] = {"mode": "off" if config.contract.mode == "off" else "enforce"}
    return Config.from_dict(small)


def _measured(assembly: Assembly, batch: StepInput) -> list[Part]:
    """Medians over some microbatches of some steps, chunk by chunk."""
    m = MICROBATCHES
    same = [tensor[:1].repeat(m, 1, 1) for tensor in (batch.inputs, batch.targets, batch.loss_mask)]
    starts = None if batch.starts is None else batch.starts[:1].repeat(m, 1, 1)
    repeated = Microbatches(same[0], same[1], same[2], batch.tokens, starts)
    assembly.prepare(repeated)
    meter = Meter(assembly.engine, assembly.register.knows)
    seconds: dict[tuple[Kind, int], list[float]] = {}
    for step in range(WARM_UP + STEPS):
        watch = meter.start()
        result = assembly.engine.step(step, repeated)
        float(result.loss)  # the host waits for the step, as training does
        if step >= WARM_UP:
            for key, values in watch.times().items():
                seconds.setdefault(key, []).extend(values)
    border = meter.slot_bytes()
    return [
        Part(
            t_f=median(seconds[Kind.F, chunk]),
            t_i=median(seconds[Kind.I, chunk]),
            t_w=median(seconds[Kind.W, chunk]),
            m_b=border[chunk] + meter.sizes.m_b[chunk],
            # Transformer Engine places what it saves by itself: one arena holds it all from F to W.
            m_w=(meter.sizes.m_b if assembly.config.model.backend == "te" else meter.sizes.m_w)[chunk],
        )
        for chunk in range(assembly.plan.placement.num_chunks)
    ]
