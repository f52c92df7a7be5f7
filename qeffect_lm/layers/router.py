"""The router of a mixture of experts: softmax over all experts, the best k, and the losses that keep experts in use.

    p = softmax(x @ w.T)         over all experts, in float32 or wider; those of the k largest logits are taken, of equal ones
                                 the lowest number
    weights = p of those k       divided by their sum, where the configuration says so

    balance   E * sum_e f_e P_e         f_e: assignments to e per valid token, P_e: mean of p_e over valid tokens
    z         mean of logsumexp(x @ w.T)**2 over valid tokens

The first is Switch Transformer's loss (Fedus et al. 2021, eq. 4 to 6) with top-k assignments, as ``load_balancing_loss_func``
of ``transformers`` has it for one layer and one batch; the second ST-MoE's (Zoph et al. 2022). Each is made of one layer's
tokens of one microbatch, and counts as the main loss does: by the microbatch's share of the step's valid tokens over all
replicas. So a token's part of either is divided by the step's divisor, and I makes their gradient right here, where no path
leads from the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qeffect_lm import kernels
from qeffect_lm.fp8.grouped import Groups, Matrices, Rows, accumulate_grouped_mm, addresses, grouped_mm
from qeffect_lm.layers.base import DirectGradLayer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.tensor import TensorParallel

STATISTICS = 2  # balance and z, before the counts of the experts


@dataclass(frozen=True)
class RouterLosses:
    """Coefficients, and the number of layers that the losses are the mean over."""

    balance: float = 0.0
    z: float = 0.0
    layers: int = 1


class Router(DirectGradLayer):
    """``[tokens, hidden]`` → the weights ``[tokens, k]`` (float32 or wider) and numbers ``[tokens, k]`` (int64) of its experts.

    The weight is never in FP8, and the logits are not rounded to a narrow dtype; its gradient is finished in I. ``statistics``
    (``[2 + experts]`` float64, bound at assembly) takes both losses, before their coefficients, and how many valid tokens each
    expert got, summed over the step's microbatches in the order of I.

    Where several ranks have parts of a microbatch's tokens (``parallel``, ``tp``) each routes its own. The balance loss takes
    how many tokens of the whole microbatch each expert got: one sum over those ranks, in I; ``statistics`` are this rank's
    part.
    """

    statistics: torch.Tensor | None = None

    def __init__(
        self,
        name: str,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        normalise: bool = True,
        losses: RouterLosses = RouterLosses(),
        dtype: torch.dtype = torch.float32,
        parallel: ExpertParallel | None = None,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__(name)
        self.parallel, self.tp = parallel, tp
        self.experts, self.top_k, self.normalise, self.losses = experts, top_k, normalise, losses
        self.weight = nn.Parameter(torch.zeros(experts, hidden, dtype=dtype))
        self.register_buffer("weight_table", None, persistent=False)
        self.register_buffer("grad_table", None, persistent=False)

    @property
    def collectives(self) -> dict[str, tuple[str, ...]]:
        """What F and I of it always exchange, as the scope is told."""
        cut = self.parallel is not None and self.parallel.cut > 1
        return {"I": (f"{self.name}.sum",)} if cut else {}

    def forward(self, x: torch.Tensor, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = _Route.apply(x, self, context)
        return weights, experts

    # ---- products: a group of one, whose rows and sums keep float32 ----------------------------------------------

    @property
    def _weight(self) -> Matrices:
        return Matrices((self.weight.detach(),), self.weight_table)  # type: ignore[arg-type]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, experts]``, in float32 or wider."""
        return grouped_mm(Rows(x), self._weight, Groups.one(x.shape[0], x.device), wide_dtype(x))

    def input_grad(self, d_logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, experts]`` → ``[tokens, hidden]``."""
        weight = self.weight.detach()
        groups = Groups.one(d_logits.shape[0], d_logits.device)
        if kernels.usable(d_logits):
            return grouped_mm(Rows(d_logits), self._weight.t, groups, dtype)
        return torch.mm(d_logits, weight.to(d_logits.dtype)).to(dtype)

    def weight_grad(self, d_logits: torch.Tensor, x: torch.Tensor, context: LayerContext) -> None:
        """Into the main gradient, in I."""
        if context.training and self.weight.requires_grad:
            beta = context.active_scope().write_grad(self.weight_name)
            out = Matrices((self.grad_view(),), self.grad_table)  # type: ignore[arg-type]
            accumulate_grouped_mm(out, Rows(d_logits), Rows(x), Groups.one(x.shape[0], x.device), beta)

    def bind(self) -> None:
        """Make the tables of addresses that kernels read."""
        self.weight_table = addresses([self.weight])
        self.grad_table = None if self.main_grad is None else addresses([self.main_grad])


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, router: Router, context: LayerContext) -> tuple[torch.Tensor, torch.Tensor]:
        logits = router.logits(x)
        weights, experts = chosen(logits, router.top_k, normalise=router.normalise)
        ctx.save_for_backward(x, logits, experts)
        ctx.router, ctx.context = router, context
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    def backward(ctx: Any, d_weights: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        x, logits, experts = ctx.saved_tensors
        router: Router = ctx.router
        made = _fused_backward if kernels.usable(logits) else _backward
        d_logits = made(router, ctx.context, logits, experts, d_weights)
        router.weight_grad(d_logits, x, ctx.context)
        return router.input_grad(d_logits, x.dtype), None, None


def chosen(logits: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``[tokens, experts]`` → each token's experts' weights, in the logits' dtype, and numbers, int64: ``[tokens, top_k]``.

    A NaN is above all numbers, and makes its token's weights NaN.
    """
    if kernels.usable(logits):
        from qeffect_lm.kernels import router as fused

        return fused.choose(logits, top_k, normalise=normalise)
    probabilities = torch.softmax(logits, dim=-1)
    order = torch.argsort(logits, dim=-1, descending=True, stable=True)  # probabilities may underflow, and tie at 0
    experts = order[:, :top_k].contiguous()
    best = probabilities.gather(1, experts)
    return best / best.sum(dim=-1, keepdim=True) if normalise else best, experts


def _backward(
    router: Router, context: LayerContext, logits: torch.Tensor, experts: torch.Tensor, d_weights: torch.Tensor
) -> torch.Tensor:
    """The gradient of the logits: of the weights' ``d_weights``, and of both losses, whose values go into the statistics."""
    probabilities = torch.softmax(logits, dim=-1)
    d_best = d_weights
    if router.normalise:
        best = probabilities.gather(1, experts)
        total = best.sum(dim=-1, keepdim=True)
        d_best = (d_weights - (d_weights * best).sum(dim=-1, keepdim=True) / total) / total
    numbers = torch.arange(router.experts, device=logits.device)
    d_probabilities = torch.zeros_like(probabilities)
    assigned = torch.zeros_like(probabilities)
    for j in range(router.top_k):
        mine = experts[:, j : j + 1] == numbers
        d_probabilities = torch.where(mine, d_best[:, j : j + 1], d_probabilities)
        assigned = assigned + mine
    d_z = None
    if context.divisor is not None:
        d_balance, d_z = _losses(router, context, logits, probabilities, assigned)
        d_probabilities = d_probabilities + d_balance
    d_logits = probabilities * (d_probabilities - (d_probabilities * probabilities).sum(dim=-1, keepdim=True))
    return d_logits if d_z is None else d_logits + d_z


def _losses(
    router: Router, context: LayerContext, logits: torch.Tensor, probabilities: torch.Tensor, assigned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both losses, of the probabilities and of the logits; their values into the statistics."""
    assert context.divisor is not None
    divisor, mask = context.divisor.to(logits.dtype), _mask(router, context, logits)
    valid = torch.ones_like(logits[:, :1]) if mask is None else mask[:, None]
    counts = (assigned * valid).sum(dim=0)
    told = _everywhere(router, context, torch.cat([valid.sum()[None], counts]))
    tokens, everywhere = told[0], told[1:]
    share = everywhere / tokens.clamp(min=1)  # of a microbatch of padding alone: 0
    size = torch.logsumexp(logits, dim=-1, keepdim=True)
    balance, z = _coefficients(router)
    part = valid / divisor  # a token's part of a mean over the step
    if router.statistics is not None and context.training:
        values = router.experts * (share * (probabilities * part).sum(dim=0)).sum(), (size.square() * part).sum()
        made = torch.cat([torch.stack(values), counts]).double()
        out = router.statistics
        out.add_(made) if context.active_scope().beta else out.copy_(made)
    return balance * share * part, z * size * part * probabilities


def _fused_backward(
    router: Router, context: LayerContext, logits: torch.Tensor, experts: torch.Tensor, d_weights: torch.Tensor
) -> torch.Tensor:
    """:func:`_backward` by kernels: one over the microbatch for the sums that both losses take, one for the gradient."""
    from qeffect_lm.kernels import router as fused

    losses = None
    if context.divisor is not None:
        mask = _mask(router, context, logits)
        sums = fused.sums(logits, experts, mask, context.divisor)
        told = _everywhere(router, context, sums[: 1 + router.experts])
        statistics = router.statistics if context.training else None
        adds = statistics is not None and bool(context.active_scope().beta)
        losses = fused.Losses(mask, context.divisor, sums, told, *_coefficients(router), statistics, adds)
    return fused.backward(logits, experts, d_weights, losses, normalise=router.normalise)


def _coefficients(router: Router) -> tuple[float, float]:
    """What the balance loss's gradient of a probability is multiplied with, and the z-loss's of logsumexp."""
    losses = router.losses
    return losses.balance / losses.layers * router.experts, 2 * losses.z / losses.layers


def _mask(router: Router, context: LayerContext, logits: torch.Tensor) -> torch.Tensor | None:
    """``[tokens]`` in the logits' dtype, 0 where one of these tokens does not count; None: all do."""
    if context.loss_mask is None:
        return None
    mask = context.loss_mask.reshape(-1)
    return mask[slice(None) if router.tp is None else router.tp.tokens(mask.shape[0])].to(logits.dtype)


def _everywhere(router: Router, context: LayerContext, told: torch.Tensor) -> torch.Tensor:
    """``told``, the valid tokens and how many of them each expert got, over all ranks with parts of the microbatch's tokens."""
    if router.parallel is None or router.parallel.cut == 1:
        return told
    return router.parallel.sum_over_tokens(told.clone(), context, router.name)  # whole numbers: exact in any order
