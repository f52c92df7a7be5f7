"""How long a model's parts take on a device, and how long its ranks exchange.

A part is a sum of products (by shape, as measured), attention, bytes that are written and read between them, launches, and
exchanges with other ranks, which the stream that computes waits for: all of that counts in F, I and W. Messages between stages
and reductions of gradients run beside the work; what of them shows is the simulation's to say (:mod:`qeffect_lm.app.forecast`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.plan import Plan
from qeffect_lm.app.ceilings import Ceilings
from qeffect_lm.app.layout import Block, Layout
from qeffect_lm.app.profile import Part, Profile, in_fp8
from qeffect_lm.app.rehearsal import PartBytes, Rehearsed, layer_kinds
from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import ParamSpec

UPDATE = 34  # bytes an element of the optimizer's step: gradient twice, master and moments read and written, parameter written
REFRESH = 6  # bytes an element of a cached weight: the parameter read, both layouts written
TP, EP, CP, PP = "activations over tp", "experts' rows over ep x tp", "keys and values over cp", "activations over pp"
GRADIENTS, PARAMETERS = "gradients over replicas", "parameters over replicas (ZeRO)"
EXCHANGES = TP, EP, CP, PP, GRADIENTS, PARAMETERS
Times = tuple[float, float, float]


@dataclass(frozen=True)
class Cost:
    """One microbatch of a piece of the model: seconds of F, I and W, and how many of them are exchanges, by kind."""

    times: Times = (0.0, 0.0, 0.0)
    exchanges: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        both = {kind: self.exchanges.get(kind, 0.0) + other.exchanges.get(kind, 0.0) for kind in EXCHANGES}
        f, i, w = (a + b for a, b in zip(self.times, other.times, strict=True))
        return Cost((f, i, w), {kind: seconds for kind, seconds in both.items() if seconds})

    def with_exchanges(self, kind: str, f: float, i: float) -> Cost:
        """These seconds of exchanges more in F and in I."""
        return self + Cost((f, i, 0.0), {kind: f + i})


class Clock:
    """Seconds of a configuration's chunks, messages and step's end on a device.

    Args:
        layout: of the configuration.
        rehearsed: the parts' bytes, which say what crosses the memory bus; None: nothing does (a lower bound).
        device: its ceilings; None where ``profile`` alone gives times.
        profile: measured parts, which then count instead.
    """

    def __init__(self, layout: Layout, rehearsed: Rehearsed | None, device: Ceilings | None, profile: Profile | None) -> None:
        self.layout, self.rehearsed, self.device, self.profile = layout, rehearsed, device, profile
        self.config = layout.config
        self._sizes = self.config.parallel.sizes
        self._fp8, self._kinds = in_fp8(self.config), layer_kinds(self.config)
        self._known: dict[Any, Cost] = {}

    # ---- the pipeline --------------------------------------------------------------------------------------------

    def cost(self, plan: Plan, index: int) -> Cost:
        """One microbatch of a chunk."""
        blocks = self.layout.chunk(plan, index)
        total = sum((self._layer(block) for block in blocks if block.layer is not None), Cost())
        if any(block.first for block in blocks):
            total += self._embedding()
        if index == plan.placement.num_chunks - 1:
            total += self._head([block for block in blocks if block.layer is None and not block.first])
        return total

    def chunk(self, plan: Plan, index: int) -> Times:
        """(F, I, W) of one microbatch of a chunk."""
        return self.cost(plan, index).times

    def whole(self) -> float:
        """F, I and W of one microbatch of all of the model."""
        blocks = self.layout.blocks
        total = self._embedding() + self._head([block for block in blocks if block.layer is None and not block.first])
        return sum(sum((self._layer(block) for block in blocks if block.layer is not None), total).times)

    def message(self) -> float:
        """An activation's way to the next stage; over the network if any stage's neighbour is on another node."""
        if self.profile is not None and (self.profile.t_comm or self.device is None):
            return self.profile.t_comm
        assert self.device is not None
        inside = self.config.parallel.world <= self.device.gpus_per_node
        return self.device.message(self.layout.border, inside)

    # ---- the step's end ------------------------------------------------------------------------------------------

    def reduction(self, every: int, dense: int) -> float:
        """Gradients of so many elements, of which no expert has ``dense``: those summed over ep, then all over dp and cp; 0
        without ceilings."""
        device, size = self.device, self.layout.grad_size
        if device is None:
            return 0.0
        replicas, over_ep = self._line("replicas"), device.all_reduce(self._line("ep"), size * dense)
        reduce = device.all_reduce if self.layout.shard is None else device.gather
        return over_ep + reduce(replicas, size * every)

    def update(self, plan: Plan, rank: int) -> float:
        """Optimizer and refresh of the caches; 0 without ceilings."""
        if self.device is None:
            return 0.0
        owned = self.layout.held(plan, rank).size / (self._line("replicas").size if self.layout.shard is not None else 1)
        cached = sum(block.cached for block in self.layout.rank(plan, rank))
        return (owned * UPDATE + cached * REFRESH) / (1e12 * self.device.memory_tb_s)

    def parameters(self, plan: Plan, rank: int) -> float:
        """With shared state: the new parameters to all replicas."""
        if self.device is None or self.layout.shard is None:
            return 0.0
        size = self.layout.held(plan, rank).size * self.layout.dtype.itemsize
        return self.device.gather(self._line("replicas"), size)

    def _line(self, axis: str) -> Any:
        assert self.device is not None
        return self.device.line(self._sizes, axis)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def _embedding(self) -> Cost:
        if self.profile is not None:
            return Cost(_times(self.profile.embedding))
        made = self._moved(None if self.rehearsed is None else self.rehearsed.embedding)
        return Cost((*made, 0.0)).with_exchanges(TP, self._summed_over_tp(), self._gathered_over_tp())

    def _layer(self, block: Block) -> Cost:
        assert block.layer is not None
        kind = self._kinds[block.layer]
        if kind not in self._known:
            self._known[kind] = self._measured(kind[0]) if self.profile is not None else self._of_layer(block, *kind)
        return self._known[kind]

    def _measured(self, fp8: bool) -> Cost:
        assert self.profile is not None
        if fp8 not in self.profile.layers:
            raise UsageError(f"the profile has no decoder layer {'in' if fp8 else 'out of'} FP8: measure this configuration")
        return Cost(_times(self.profile.layers[fp8]))

    def _of_layer(self, block: Block, fp8: bool, recompute: str) -> Cost:
        assert self.device is not None
        f, i, w = self._products(block, fp8)
        attend, attend_back = self._attention()
        made = self._moved(None if self.rehearsed is None else self.rehearsed.layers[fp8, recompute])
        third = (self.device.layer_overhead_us + block.routes * self.device.routing_us) * 1e-6 / 3
        rerun = {"none": 0.0, "selective": attend, "full": attend + f - self._tail(block, fp8)}[recompute]
        cost = Cost((f + attend + made[0] + third, i + attend_back + rerun + made[1] + third, w + third))
        return self._exchanging(cost, block, fp8, recompute)

    def _exchanging(self, cost: Cost, block: Block, fp8: bool, recompute: str) -> Cost:
        """Exchanges of a decoder layer; what runs again is exchanged again, but for the last sum, whose value nobody reads."""
        gathered, summed, full = self._gathered_over_tp(fp8), self._summed_over_tp(), recompute == "full"
        pairs = 1 if block.routes else 2  # attention and MLP each: tokens gathered, parts summed
        # Selective recompute gathers for W's columns, which joined ones had in F already.
        regathers = full or (recompute == "selective" and not (fp8 and self.config.pipeline.coalesce_w > 1))
        again = regathers * pairs * gathered + full * (pairs - (not block.routes)) * summed
        cost = cost.with_exchanges(TP, pairs * (gathered + summed), pairs * (gathered + summed) + again)
        if self.config.parallel.cp > 1:
            keys, gradients = self._keys_and_values()
            cost = cost.with_exchanges(CP, keys, (1 + (recompute != "none")) * keys + gradients)
        if block.routes and self._line("experts").size > 1:
            rows, small = self._rows_over_ep(), self._small()
            cost = cost.with_exchanges(EP, 2 * rows + 2 * small, 2 * rows + small + full * (rows + small))
        return cost

    def _products(self, block: Block, fp8: bool) -> Times:
        """F, I and W of a block's matrices; experts' together."""
        assert self.device is not None
        dense = self.device.products["fp8" if fp8 else "bf16"]
        tokens, joined = self.layout.tokens, self.config.pipeline.coalesce_w if fp8 else 1
        f = i = w = 0.0
        experts: list[ParamSpec] = []
        for param in self._matrices(block):
            if self.layout.specs[param.name].expert is not None:
                experts.append(param)
                continue
            out, inputs = param.shape
            f += dense.seconds("F", tokens, out, inputs)
            i += dense.seconds("I", tokens, out, inputs)
            w += dense.seconds("W", tokens * joined, out, inputs) / joined
        if experts:
            of_one = self._rows() * self.device.expert_imbalance / (self.config.model.moe.num_experts or 1)
            of_one *= self._line("experts").size
            flop = 2 * of_one * sum(param.numel for param in experts)
            rates = self.device.experts["fp8" if fp8 else "bf16"]
            rows = of_one, of_one, of_one * joined
            f, i, w = (a + flop / rates.at(work, n) for a, work, n in zip((f, i, w), "FIW", rows, strict=True))
        return f, i, w

    def _tail(self, block: Block, fp8: bool) -> float:
        """F of the last product, which a full recompute leaves out."""
        assert self.device is not None
        params = self._matrices(block)
        last = params[-1]
        if self.layout.specs[last.name].expert is None:
            return self.device.products["fp8" if fp8 else "bf16"].seconds("F", self.layout.tokens, *last.shape)
        return self._products(block, fp8)[0] / 3  # down is a third of an expert

    def _matrices(self, block: Block) -> list[ParamSpec]:
        return [param for param in block.params if param.tied_to is None and len(param.shape) == 2]

    def _head(self, blocks: list[Block]) -> Cost:
        if self.profile is not None:
            return Cost(_times(self.profile.head))
        f = i = w = 0.0
        for block in blocks:
            f, i, w = (a + b for a, b in zip((f, i, w), self._products(block, False), strict=True))
        if self.config.model.tie_word_embeddings:
            assert self.device is not None
            shape = self.config.model.vocab_size / self.config.parallel.tp, self.config.model.hidden_size
            more = (self.device.products["bf16"].seconds(work, self.layout.tokens, *shape) for work in "FIW")
            f, i, w = (a + b for a, b in zip((f, i, w), more, strict=True))
        made = self._moved(None if self.rehearsed is None else self.rehearsed.head)
        in_f = self._gathered_over_tp() + self._small_over_tp()
        return Cost((f + made[0], i + made[1], w)).with_exchanges(TP, in_f, self._summed_over_tp())

    def _attention(self) -> tuple[float, float]:
        """F and I: two products of causal scores, and five."""
        assert self.device is not None
        model, parallel, sequence = self.config.model, self.config.parallel, self.config.data.seq_len
        window = min(sequence, model.sliding_window or sequence)
        seen = (window * (window + 1) / 2 + (sequence - window) * window) / sequence
        one = 2 * model.num_heads / parallel.tp * model.head_dim * seen * self.layout.tokens
        rows = parallel.cp > 1 or self.config.data.documents == "reset"
        rates = self.device.row_attention if rows else self.device.attention
        return 2 * one / rates.at("F", sequence), 5 * one / rates.at("I", sequence)

    def _moved(self, part: PartBytes | None) -> tuple[float, float]:
        if part is None:
            return 0.0, 0.0
        assert self.device is not None
        each = self.device.touches / (1e12 * self.device.memory_tb_s)
        return each * part.f.made, each * part.i.made

    # ---- exchanges -----------------------------------------------------------------------------------------------

    def _gathered_over_tp(self, fp8: bool = False) -> float:
        """A microbatch's activations, where tokens are cut. Native layers in FP8 gather a byte an element."""
        assert self.device is not None
        if not self.config.parallel.sequence_parallel:
            return 0.0
        narrow = fp8 and self.config.model.backend == "native"
        return self.device.gather(self._line("tp"), self._elements() * (1 if narrow else self.layout.dtype.itemsize))

    def _summed_over_tp(self) -> float:
        """Parts of a microbatch's activations, of which each rank keeps its tokens, where they are cut."""
        assert self.device is not None
        line, whole = self._line("tp"), self._elements() * self.layout.dtype.itemsize
        return (self.device.gather if self.config.parallel.sequence_parallel else self.device.all_reduce)(line, whole)

    def _elements(self) -> int:
        return self.layout.tokens * self.config.model.hidden_size

    def _keys_and_values(self) -> tuple[float, float]:
        """Of the whole sequences: gathered, and their gradients summed in float32."""
        assert self.device is not None
        model, data, line = self.config.model, self.config.data, self._line("cp")
        heads = max(1, model.num_kv_heads // self.config.parallel.tp)
        elements = 2 * data.seq_len * data.microbatch_size * heads * model.head_dim
        gather = self.device.gather
        return gather(line, elements * self.layout.dtype.itemsize), gather(line, elements * max(4, self.layout.dtype.itemsize))

    def _rows(self) -> float:
        """Of a rank's own tokens for experts."""
        parallel, top_k = self.config.parallel, self.config.model.moe.top_k
        return self.layout.tokens / (parallel.tp if parallel.sequence_parallel else 1) * top_k

    def _rows_over_ep(self) -> float:
        """One way. A graph has one shape for every routing, so in one each pair of ranks exchanges the most that it could."""
        assert self.device is not None
        moe, line = self.config.model.moe, self._line("experts")
        rows = self._rows()
        if self.config.graphs.backend != "eager":
            rows *= line.size * min(moe.top_k, (moe.num_experts or 1) // line.size) / moe.top_k
        return self.device.all_to_all(line, rows * self.config.model.hidden_size * self.layout.dtype.itemsize)

    def _small(self) -> float:
        """Counts or weights of rows: no more than a launch."""
        assert self.device is not None
        return self.device.all_to_all(self._line("experts"), 0.0)

    def _small_over_tp(self) -> float:
        assert self.device is not None
        return self.device.gather(self._line("tp"), 0.0)


def _times(part: Part) -> Times:
    return part.t_f, part.t_i, part.t_w
