"""How long a model's parts take on a device, from its measured ceilings or from a profile of the run's own layers.

A part is a sum of products at their rate, attention at its own, bytes that are written and read between them at the memory's
bandwidth, and launches. The ceilings lie in ``devices.json``, with what they were measured by.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.plan import Plan
from qeffect_lm.app.counts import tokens_here
from qeffect_lm.app.layout import Block, Layout
from qeffect_lm.app.profile import Part, Profile, in_fp8
from qeffect_lm.app.rehearsal import PartBytes, Rehearsed, layer_kinds
from qeffect_lm.errors import UsageError

TABLE = Path(__file__).with_name("devices.json")
TOUCHES = 2.5  # how often a byte that a layer makes crosses the memory bus: written once, read once or twice
UPDATE = 34  # bytes an element of the optimizer's step: gradient twice, master and moments read and written, parameter written
Times = tuple[float, float, float]


@dataclass(frozen=True)
class Ceilings:
    """A device: rates in TFLOP/s, TB/s and GB/s, launches of one layer and microbatch in µs."""

    key: str
    name: str
    memory_gib: float
    fp8_tflops: float
    bf16_tflops: float
    attention_tflops: float
    memory_tb_s: float
    layer_overhead_us: float
    link_gb_s: float
    network_gb_s: float
    gpus_per_node: int
    sources: tuple[str, ...]


def devices() -> list[str]:
    """The devices with ceilings."""
    return sorted(json.loads(TABLE.read_text(encoding="utf-8")))


def ceilings(device: str) -> Ceilings:
    """Raises UsageError: no such device in the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if device not in table:
        raise UsageError(f"no ceilings of device {device!r}: use one of {', '.join(table)}, or --profile FILE")
    entry: dict[str, Any] = table[device]
    return Ceilings(device, **{**entry, "sources": tuple(entry["sources"])})


def write_profile(path: Path, profile: Profile, about: dict[str, Any]) -> None:
    """A profile as a file for :func:`read_profile`; ``about`` says of what."""
    parts = {"embedding": asdict(profile.embedding), "head": asdict(profile.head), "t_comm": profile.t_comm}
    layers = {"fp8" if fp8 else "plain": asdict(part) for fp8, part in profile.layers.items()}
    path.write_text(json.dumps({"format": 1, "about": about, **parts, "layers": layers}, indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> tuple[Profile, dict[str, Any]]:
    """Raises UsageError: no file of :func:`write_profile`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        layers = {name == "fp8": Part(**part) for name, part in found["layers"].items()}
        profile = Profile(Part(**found["embedding"]), layers, Part(**found["head"]), float(found["t_comm"]))
        return profile, dict(found["about"])
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no profile: write one with `python -m tools.plan CONFIG.yaml --measure FILE`") from None


class Clock:
    """Seconds of a configuration's chunks, messages and step's end on a device.

    Args:
        layout: of the configuration.
        rehearsed: the parts' bytes, which say what crosses the memory bus.
        device: its ceilings; None where ``profile`` alone gives times.
        profile: measured parts, which then count instead.
    """

    def __init__(self, layout: Layout, rehearsed: Rehearsed, device: Ceilings | None, profile: Profile | None) -> None:
        self.layout, self.rehearsed, self.device, self.profile = layout, rehearsed, device, profile
        self.config = layout.config
        self._fp8, self._kinds = in_fp8(self.config), layer_kinds(self.config)
        self._known: dict[Any, Times] = {}

    def chunk(self, plan: Plan, index: int) -> Times:
        """(F, I, W) of one microbatch of a chunk."""
        blocks = self.layout.chunk(plan, index)
        times = [self._layer(block) for block in blocks if block.layer is not None]
        if any(block.first for block in blocks):
            times.append(self._embedding())
        if index == plan.placement.num_chunks - 1:
            times.append(self._head([block for block in blocks if block.layer is None and not block.first]))
        return tuple(sum(column) for column in zip(*times, strict=True)) if times else (0.0, 0.0, 0.0)  # type: ignore[return-value]

    def message(self) -> float:
        """An activation's way to the next stage."""
        if self.profile is not None and (self.profile.t_comm or self.device is None):
            return self.profile.t_comm
        assert self.device is not None
        parallel = self.config.parallel
        inside = 2 * parallel.dp * parallel.tp <= self.device.gpus_per_node  # stages are dp · tp ranks apart
        return 1e-5 + self.layout.border / (1e9 * (self.device.link_gb_s if inside else self.device.network_gb_s))

    def end(self, plan: Plan, rank: int) -> float:
        """Reduction over replicas, optimizer and refresh of the caches; 0 without ceilings."""
        device, dp = self.device, self.config.parallel.dp
        if device is None:
            return 0.0
        size = sum(param.numel for param in self.layout.params(plan, rank) if param.tied_to is None)
        cached = sum(block.cached for block in self.layout.rank(plan, rank))
        owned = size / dp if self.config.optim.zero else size
        seconds = (owned * UPDATE + cached * 6) / (1e12 * device.memory_tb_s)
        inside = dp * self.config.parallel.tp <= device.gpus_per_node
        bandwidth = device.link_gb_s if inside else device.network_gb_s
        return seconds + 2 * (dp - 1) / dp * size * self.layout.grad_size / (1e9 * bandwidth)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _embedding(self) -> Times:
        if self.profile is not None:
            return _times(self.profile.embedding)
        return self._moved(self.rehearsed.embedding)

    def _layer(self, block: Block) -> Times:
        assert block.layer is not None
        kind = self._kinds[block.layer]
        if self.profile is not None:
            if kind[0] not in self.profile.layers:
                where = "in" if kind[0] else "out of"
                raise UsageError(f"the profile has no decoder layer {where} FP8: measure this configuration")
            return _times(self.profile.layers[kind[0]])
        if kind not in self._known:
            self._known[kind] = self._of_layer(block)
        return self._known[kind]

    def _of_layer(self, block: Block) -> Times:
        assert self.device is not None and block.layer is not None
        fp8, recompute = self._kinds[block.layer]
        made = self._moved(self.rehearsed.layers[fp8, recompute])
        used, every = self._elements([block])
        product = self._product(used, fp8)
        scores = self._attention()
        again = {"none": 0.0, "selective": 2 * scores, "full": 2 * scores + product}[recompute]
        third, peers = self.device.layer_overhead_us * 1e-6 / 3, self._exchanges()
        again += peers if recompute == "full" else 0.0
        return (
            product + 2 * scores + made[0] + third + peers,
            product + 5 * scores + again + made[1] + third + peers,
            product + self._gradients(every) + third,
        )

    def _head(self, blocks: list[Block]) -> Times:
        if self.profile is not None:
            return _times(self.profile.head)
        used, every = self._elements(blocks)
        model = self.config.model
        if model.tie_word_embeddings:
            tied = model.vocab_size * model.hidden_size / self.config.parallel.tp
            used, every = used + tied, every + tied
        product, made = self._product(used, False), self._moved(self.rehearsed.head)
        return product + made[0], product + made[1], product + self._gradients(every)

    def _exchanges(self) -> float:
        """Tensor parallelism: two activations are gathered and two summed in a layer's F, as many in its I."""
        assert self.device is not None
        tp = self.config.parallel.tp
        whole = self._tokens * self.config.model.hidden_size * self.layout.dtype.itemsize
        return 4 * whole * (tp - 1) / tp / (1e9 * self.device.link_gb_s)

    def _elements(self, blocks: list[Block]) -> tuple[float, float]:
        """Of matrices: those that a token goes through, and all."""
        specs = self.layout.specs
        found = [param for block in blocks for param in block.params if param.tied_to is None and len(param.shape) == 2]
        active = (param.numel * specs[param.name].active[0] / specs[param.name].active[1] for param in found)
        return sum(active), sum(param.numel for param in found)

    def _product(self, elements: float, fp8: bool) -> float:
        assert self.device is not None
        rate = self.device.fp8_tflops if fp8 else self.device.bf16_tflops
        return 2 * elements * self._tokens / (1e12 * rate)

    def _attention(self) -> float:
        """Half of a forward: two products of causal scores are two of these."""
        assert self.device is not None
        model, sequence = self.config.model, self.config.data.seq_len
        window = min(sequence, model.sliding_window or sequence)
        seen = (window * (window + 1) / 2 + (sequence - window) * window) / sequence
        heads = model.num_heads / self.config.parallel.tp
        return 2 * heads * model.head_dim * seen * self._tokens / (1e12 * self.device.attention_tflops)

    def _moved(self, part: PartBytes) -> tuple[float, float, float]:
        assert self.device is not None
        f, i = (TOUCHES * made / (1e12 * self.device.memory_tb_s) for made in (part.f.made, part.i.made))
        return f, i, 0.0

    def _gradients(self, elements: float) -> float:
        """The main gradient, read and written by W's product; once for several microbatches where they share one."""
        assert self.device is not None
        return 2 * self.layout.grad_size * elements / self.config.pipeline.coalesce_w / (1e12 * self.device.memory_tb_s)

    @property
    def _tokens(self) -> int:
        return tokens_here(self.config)


def _times(part: Part) -> Times:
    return part.t_f, part.t_i, part.t_w
