"""Mixture of experts (Shazeer et al. 2017; Mixtral: Jiang et al. 2024): each token goes through k of many gated MLPs. Dropless.

    router    weights and numbers of each token's k experts
    sort      tokens * k rows, by expert, stably: [rows, hidden], whatever the routing
    experts   y = down(w * silu(gate) * up)      products of groups (GroupedLinear); the router's weight w goes in before down
    combine   each token's k rows added, in the router's order

No expert has a capacity and no token is dropped: every expert takes as many rows as it gets, none included. No shape and no
launch depends on the routing, so a captured graph serves all of them, and no sum is left to atomics, so results repeat bit for
bit. With expert parallelism (:mod:`qeffect_lm.parallel.expert`) rows travel to the ranks of their experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.fp8.grouped import Groups, by_group
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.grouped import ExpertLinear, GroupedLinear
from qeffect_lm.layers.router import STATISTICS, Router
from qeffect_lm.parallel.expert import Dispatch, ExpertParallel


class Expert(Layer):
    """One expert's weights; ``gate_up`` holds gate's rows, then up's."""

    def __init__(self, name: str, gate_up: ExpertLinear, down: ExpertLinear) -> None:
        super().__init__(name)
        self.gate_up, self.down = gate_up, down


@dataclass(frozen=True)
class Routing:
    """Where rows go, all experts being here.

    Attributes:
        groups: rows by expert.
        order: ``[rows]`` int64, which of the ``tokens * k`` assignments each row is.
        rows: ``[tokens, k]`` int64, the inverse: the rows of each token, in the router's order.
    """

    groups: Groups
    order: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> Routing:
        """``experts`` ``[tokens, k]`` of ``count``; rows of one expert stay in the order of tokens."""
        groups, order, rows = by_group(experts.reshape(-1), count)
        return cls(groups, order, rows.view_as(experts))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.groups.offsets, self.groups.of_row, self.order, self.rows

    def of_tensors(self, tensors: tuple[torch.Tensor, ...]) -> Routing:
        """The same again, of what :meth:`tensors` gave."""
        offsets, of_row, order, rows = tensors
        return Routing(Groups(offsets, of_row), order, rows)

    def spread(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[tokens, features]`` → the rows, ``[rows, features]``."""
        return x.index_select(0, self.order // self.rows.shape[1])

    def weights_of_rows(self, weights: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[tokens, k]`` → ``[rows, 1]``."""
        return weights.reshape(-1).index_select(0, self.order)[:, None]

    def collect(self, rows: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, features]`` → all rows of the tokens here, and where among them each token's lie, ``[tokens, k]``."""
        return rows, self.rows

    def weights_of_tokens(self, of_rows: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """``[rows]`` → ``[tokens, k]``."""
        return of_rows.index_select(0, self.rows.reshape(-1)).view_as(self.rows)


def added(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each token's rows added: ``[rows, features]`` and their places ``[tokens, k]`` → ``[tokens, features]``; in float32 or
    wider, rounded once."""
    if kernels.usable(rows):
        from qeffect_lm.kernels import experts

        return experts.added(rows, places)
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.index_select(0, places[:, 0]).to(wide)
    for j in range(1, places.shape[1]):
        total = total + rows.index_select(0, places[:, j]).to(wide)
    return total.to(rows.dtype)


class MoE(Layer):
    """``sum over the k experts of weight * expert(x)``, for ``[..., hidden]``; of decoder layer ``layer``.

    ``experts`` are all, or with ``parallel`` those of this rank, in order of number.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        experts: list[Expert],
        layer: int | None = None,
        parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__(name)
        self.router, self.layer = router, layer
        self.parallel = None if parallel is None or parallel.size == 1 else parallel
        self.experts = nn.ModuleList(experts)
        self.gate_up = GroupedLinear(f"{name}.experts.gate_up", [expert.gate_up for expert in experts], self.most_rows)
        self.down = GroupedLinear(f"{name}.experts.down", [expert.down for expert in experts], self.most_rows)

    @property
    def tail(self) -> GroupedLinear:
        return self.down

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        """What F and I of it always exchange, as the scope is told."""
        if self.parallel is None:
            return {}
        there, back = ("dispatch", "weights", "combine"), ("dispatch", "combine", "weights")
        return {kind: tuple(f"{self.name}.{what}" for what in said) for kind, said in (("F", ("splits", *there)), ("I", back))}

    def most_rows(self, tokens: int) -> int:
        """Rows that the experts here could ever get of a microbatch of ``tokens``, whatever the routing."""
        tp = self.router.tp
        own = tokens if tp is None or not tp.sequence else tokens // tp.size  # that this rank routes
        if self.parallel is None:
            return own * self.router.top_k
        return self.parallel.most_rows(own, self.router.top_k, self.router.experts)

    def routing(self, numbers: torch.Tensor, context: LayerContext) -> Routing | Dispatch:
        """Where the rows of tokens with these experts ``[tokens, k]`` go."""
        here = Routing.of(numbers, self.router.experts)
        if self.parallel is None:
            return here
        return self.parallel.dispatched(numbers, here.groups.offsets, here.order, here.rows, context, self.name)

    def forward(
        self, x: torch.Tensor, context: LayerContext, norm: Layer | None = None, *, residual: bool = False
    ) -> torch.Tensor:
        """``norm``, if given, comes first; with ``residual`` ``x`` is added to the result."""
        entering = x if norm is None else norm(x, context)
        flat = entering.reshape(-1, entering.shape[-1])
        weights, numbers = self.router(flat, context)
        y = _Experts.apply(flat, weights, self, self.routing(numbers, context), context).view_as(x)
        return x + y if residual else y


class _Experts(torch.autograd.Function):
    """Saves gate_up's output and the rows' weights: the activation is cheap to make again in I."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, moe: MoE, routing: Routing | Dispatch, context: LayerContext
    ) -> torch.Tensor:
        hidden = moe.gate_up.product(routing.spread(x, context), routing.groups, context)
        row_weights = routing.weights_of_rows(weights, context)
        activation, amax = weighted(hidden, row_weights, routing.groups, amax=moe.down.recipe is not None)
        rows = moe.down.product(activation, routing.groups, context, amax)
        ctx.save_for_backward(hidden, row_weights, *routing.tensors())
        ctx.moe, ctx.routing, ctx.context = moe, routing.of_tensors((x.new_empty(0),) * len(routing.tensors())), context
        rerun = context.rerun if context.training else None
        if rerun is not None and not rerun.first and rerun.tail is moe.down:
            return torch.zeros_like(x)  # the rows are zeros that nobody reads: they need not travel
        return added(*routing.collect(rows, context))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden, row_weights, *tensors = ctx.saved_tensors
        moe, context = ctx.moe, ctx.context
        routing = ctx.routing.of_tensors(tuple(tensors))
        d_hidden, of_rows, amax = weighted_backward(
            hidden,
            row_weights,
            moe.down.input_grad(routing.spread(dy, context), routing.groups, context),
            routing.groups,
            amax=moe.gate_up.recipe is not None,
        )
        dx = added(*routing.collect(moe.gate_up.input_grad(d_hidden, routing.groups, context, amax), context))
        return dx, routing.weights_of_tokens(of_rows, context), None, None, None


def weighted(
    hidden: torch.Tensor, row_weights: torch.Tensor, groups: Groups, *, amax: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``silu(gate) * up * weight`` of ``[rows, 2 f]`` and ``[rows, 1]`` → ``[rows, f]``, in float32 or wider, rounded once.

    With ``amax`` what :func:`amax_of_groups` says of it comes along, ``[groups]`` float32, where that costs no pass of its own;
    else None.
    """
    if kernels.usable(hidden):
        from qeffect_lm.kernels import experts

        return experts.forward(hidden, row_weights, groups, amax=amax)
    return (_activated(hidden)[0] * row_weights).to(hidden.dtype), None


def weighted_backward(
    hidden: torch.Tensor, row_weights: torch.Tensor, d_weighted: torch.Tensor, groups: Groups, *, amax: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of what :func:`weighted` takes, of its result's ``[rows, f]``: of ``hidden``, of the rows' weights ``[rows]``,
    in float32 or wider; ``amax`` as there, of the first."""
    if kernels.usable(hidden):
        from qeffect_lm.kernels import experts

        return experts.backward(hidden, row_weights, d_weighted, groups, amax=amax)
    d_weighted = d_weighted.to(row_weights.dtype)
    activation, sigmoid, gate, up = _activated(hidden)
    of_rows = (d_weighted * activation).sum(dim=-1)
    d_activation = d_weighted * row_weights
    silu = gate * sigmoid
    d_gate = d_activation * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([d_gate, d_activation * silu], dim=-1).to(hidden.dtype), of_rows, None


def _activated(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``silu(gate) * up`` of ``[rows, 2 f]``, sigmoid(gate), gate and up, in float32 or wider."""
    gate, up = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    return gate * sigmoid * up, sigmoid, gate, up


def mixtures(module: nn.Module) -> list[MoE]:
    """All of ``module``'s."""
    return [found for found in module.modules() if isinstance(found, MoE)]


def bind_experts(module: nn.Module) -> None:
    """Once weights, caches and main gradients lie where they stay, on a GPU: tell the kernels where."""
    for moe in mixtures(module):
        for part in (moe.router, moe.gate_up, moe.down):
            part.bind()


def bind_statistics(module: nn.Module, statistics: torch.Tensor | None) -> None:
    """``statistics`` ``[layers, 2 + experts]`` float64: each router sums its own into its decoder layer's row."""
    for moe in mixtures(module):
        if statistics is not None and moe.layer is not None:
            moe.router.statistics = statistics[moe.layer, : STATISTICS + moe.router.experts]
