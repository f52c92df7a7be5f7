"""FP8 for converted linears: delayed scaling under the contract, cached weights with versions, state for a checkpointer.

Scales belong to a window of one optimizer step: F and I read the scale of an epoch, their maxima go into the open window, and
the schedule commits once, after the last W (:class:`~qeffect_lm.contract.timeline.ScaleTimeline`). Until maxima of an operand
were rolled in, each of its tensors has a scale of its own, from its own maximum: under a scale of 1 gradients of a mean over
many tokens are zeros in E5M2. Weights are cast
once for each step or evaluation, right before it, whoever wrote them and however. One that autograd counts a write of in the
middle of a step is a :class:`~qeffect_lm.contract.errors.StaleWeightError`; it does not count those of fused optimizers, nor of
foreach ones into sharded weights (FSDP2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from qeffect_lm.contract.errors import StaleWeightError
from qeffect_lm.contract.ledger import Ledger, Scope
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.cache import LAYOUTS, WeightCache
from qeffect_lm.fp8.gemm import accumulate_scaled_mm, scaled_mm
from qeffect_lm.fp8.quantise import E4M3, Quantised, current_scale
from qeffect_lm.fp8.recipes import FORMATS, DelayedScaling, roles_of
from qeffect_lm.integrations.pipelining.sharded import whole

if TYPE_CHECKING:
    from qeffect_lm.integrations.pipelining.convert import SplitLinear, Tape


class FP8Linear:
    """One linear's FP8: operands by its recipe, its cached weight. x ``[tokens, in]``, dY ``[tokens, out]``."""

    def __init__(self, name: str, recipe: DelayedScaling, cached: Quantised, state: FP8State) -> None:
        self.name, self.recipe, self.cached, self.state, self.ran = name, recipe, cached, state, False

    def forward(self, x: torch.Tensor, tape: Tape) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """F: the product, and what backward needs of x. Inside of I (activations made again) nothing is reported."""
        scope = None if tape.again else tape.scope
        self.ran = True
        if x.is_cuda and x.shape[0] % 16:
            raise UsageError(f"{self.name}: a microbatch of {x.shape[0]} tokens; FP8 products on a GPU take multiples of 16")
        q = self._operand("input", x.detach(), scope)
        weight = self._weight("rows", tape)
        assert q.rows is not None and q.columns is not None and weight.rows is not None
        library = self.state.library
        y = scaled_mm(
            q.rows, q.scale_inv, weight.rows, weight.scale_inv, x.dtype, library=library, fast_accumulation=True
        )  # fmt: skip
        return y, (q.columns, q.scale_inv.clone())

    def backward(
        self, dy: torch.Tensor, kept: Sequence[torch.Tensor], tape: Tape, needs_dx: bool
    ) -> tuple[torch.Tensor | None, tuple[Any, Any]]:
        """I: dx, and the operands of W."""
        q = self._operand("grad_output", dy, tape.scope)
        dx = None
        if needs_dx:
            weight = self._weight("columns", tape)
            assert q.rows is not None and weight.columns is not None
            dx = scaled_mm(q.rows, q.scale_inv, weight.columns, weight.scale_inv, dy.dtype, library=self.state.library)
        return dx, (tuple(kept), (q.columns, q.scale_inv.clone()))

    def weight_grad(self, x: Any, dy: Any, grad: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """W: ``grad + dY.T @ x`` into ``grad``, made where there is none."""
        beta = 0 if grad is None else 1
        if grad is None:
            grad = torch.empty(dy[0].shape[0], x[0].shape[0], dtype=dtype, device=dy[0].device)
        accumulate_scaled_mm(grad, dy[0], dy[1], x[0], x[1], beta, library=self.state.library)
        return grad

    def _operand(self, kind: str, x: torch.Tensor, scope: Scope | None) -> Quantised:
        first = f"{self.name}.{kind}" in self.state.unrolled
        scale = current_scale(x, FORMATS[kind], self.state.timeline.margin) if first else None
        return self.recipe.operand(self.name, kind, x, scope, scale=scale)

    def _weight(self, layout: str, tape: Tape) -> Quantised:
        self.state.check_fresh(self.name)
        if tape.scope is not None and not tape.again:
            tape.scope.read_weight(f"{self.name}.weight", layout)
        return self.cached


class FP8State:
    """Scales, histories and cached weights of one rank's converted linears. A ``Stateful`` of torch's checkpointing.

    Made by a schedule for its stages (``fp8=``); :meth:`state_dict` holds typed tensors by stage and the linears' paths.

    Args:
        linears: path in the whole model → converted linear, in any order.
        history: windows that a scale looks back.
        idle: whether linears may be there that do not run in the first step (experts, say); else that is refused: a linear that
            runs past its conversion would be in no FP8, and nobody would know.
        amax_group: ranks that share these scales (tensor or data parallel); their maxima are merged in the commit.

    Raises:
        UsageError: a device without FP8 products, or sizes that FP8 products do not take (multiples of 16 on a GPU).
    """

    def __init__(
        self,
        linears: dict[str, SplitLinear],
        *,
        history: int = 16,
        margin: int = 0,
        idle: bool = False,
        amax_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.linears, self._group = dict(linears), amax_group
        self._history, self._idle = history, idle
        self.versions = WeightVersions([f"{name}.weight" for name in self.linears])
        roles = [role for name in self.linears for role in roles_of(name)]
        self.timeline = ScaleTimeline(roles, history=history, margin=margin)
        self.recipe = DelayedScaling()
        self.cache: WeightCache | None = None
        self.library: Any = None
        self._masters: dict[str, torch.Tensor] = {}  # what the optimizer writes, which is not what runs under FSDP
        self._seen: dict[str, tuple[int, ...]] = {}  # what was cast: see _version
        self.unrolled = {role.name for role in roles}  # operands without a maximum in their history
        self._skip = torch.zeros((), dtype=torch.bool)  # no step is left out here
        self._begun = self.timeline.begun()
        self._ledger: Ledger | None = None  # once a step has run
        self._loaded: dict[str, torch.Tensor] | None = None  # casts to come must equal these

    def prepare(self) -> None:
        """Storages on the weights' device, which is known once the model has been moved there."""
        device = next(iter(self.linears.values())).weight.device
        if device.type == "meta":
            raise UsageError("FP8 linears are on the meta device: materialise the model (to_empty, init) before the first step")
        if self.cache is not None:
            return
        if device.type == "cuda":
            from qeffect_lm.kernels.cublaslt import CublasLt

            for name, linear in self.linears.items():
                if linear.in_features % 16 or linear.out_features % 16:
                    shape = f"[{linear.out_features}, {linear.in_features}]"
                    raise UsageError(f"{name}.weight is {shape}: FP8 products on a GPU take multiples of 16; leave it whole")
            self.library = CublasLt(device)
        for name in ("scale", "history", "open_amax", "fp8_max", "spoilt"):
            setattr(self.timeline, name, getattr(self.timeline, name).to(device))
        self._skip = self._skip.to(device)
        self.recipe.bind(self.timeline)
        sources = {
            f"{name}.weight": (name, self.recipe, lambda linear=linear: whole(linear.weight))
            for name, linear in self.linears.items()
        }
        self.cache = WeightCache(sources)
        for name, linear in self.linears.items():
            linear.fp8 = FP8Linear(name, self.recipe, self.cache.cached[f"{name}.weight"], self)

    def refresh(self, ledger: Ledger) -> None:
        """Before a step, an evaluation, and a save: cast the weights."""
        self.prepare()
        self._ledger = ledger
        assert self.cache is not None
        self._masters = {name: linear.weight for name, linear in self.linears.items()}
        now = {name: self._version(name) for name in self.linears}
        changed = [name for name in self.linears if self._seen.get(name) != now[name]]
        self.versions.bump([f"{name}.weight" for name in changed])
        with torch.no_grad():
            self._first_weight_scales()
            self.cache.refresh_()
        self._seen = now
        ledger.refreshed({name: self.cache.layer_of(name) for name in self.cache.names}, LAYOUTS)

    def begin(self, ledger: Ledger) -> None:
        """A step begins: weights are cast that were written, and what :meth:`abandon` puts back is kept."""
        self.refresh(ledger)
        self.check_cast()
        begun = self.timeline.begun()
        tensors = {name: getattr(self.timeline, name).clone() for name in ("open_amax", "scale", "history")}
        self._begun = begun._replace(tensors=tensors)

    def abandon(self) -> None:
        """It failed: its maxima are forgotten, and scales that it rolled are those of before."""
        self.timeline.begin_again(self._begun)
        self._find_unrolled(anew=True)

    def _first_weight_scales(self) -> None:
        """What the cast reads is the timeline's, which nobody else reads of weights, and nobody at all between two steps."""
        for name, linear in self.linears.items():
            if f"{name}.weight" in self.unrolled:
                weight = whole(linear.weight).bfloat16()  # as it is cast
                self.timeline.scale_of(f"{name}.weight").copy_(current_scale(weight, E4M3, self.timeline.margin))

    def _find_unrolled(self, anew: bool = False) -> None:
        """Waits for the device, so only while there are any, which are few after the first step: experts that never ran."""
        if self.unrolled or anew:
            rolled = (self.timeline.history > 0).any(dim=1).tolist()
            self.unrolled = {role.name for role, known in zip(self.timeline.roles, rolled, strict=True) if not known}

    def _version(self, name: str) -> tuple[int, ...]:
        """Where the weight lies, autograd's count of its writes, and the step, as no optimizer's write need be counted."""
        master = self._masters[name]
        local = master._local_tensor if isinstance(master, DTensor) else master
        return local.data_ptr(), local._version, master._version, self.timeline.commits

    def check_fresh(self, name: str) -> None:
        """Raises: StaleWeightError: the weight was written since it was cast (unless the contract is off)."""
        assert self._ledger is not None
        if self._ledger.checks and self._seen.get(name) != self._version(name):
            raise StaleWeightError(
                f"{name}.weight was written after it was cast to FP8 for this step: the optimizer steps between two calls of "
                "step(), not in the middle of one",
                layer=name,
            )

    def commit(self, ledger: Ledger) -> None:
        """After the last W: merge the maxima over ``amax_group``, roll the histories, make the next scales.

        Raises:
            UsageError: a linear did not run in its first step.
        """
        if not self._idle:
            still = [name for name, linear in self.linears.items() if linear.fp8 is None or not linear.fp8.ran]
            if still:
                raise UsageError(
                    f"{still[0]} ({len(still)} of {len(self.linears)}) is to multiply in FP8 and did not run so in "
                    "this step: leave it whole, or say fp8={'idle': True} if it need not run"
                )
        if self._group is not None:
            dist.all_reduce(self.timeline.open_amax, op=dist.ReduceOp.MAX, group=self._group)
        ledger.commit(self.timeline.epochs[Direction.FORWARD])
        with torch.no_grad():
            self.timeline.roll_(self._skip)
        self._find_unrolled()

    # ---- torch.distributed.checkpoint.stateful.Stateful --------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the next step will use: weights that the optimizer wrote since the last one are cast first.

        ``<path>/scale.<operand>`` (0-dim float32), ``<path>/amax_history.<operand>`` (float32 ``[history]``),
        ``<path>/cached_weight`` (E4M3 ``[out, in]``), its inverse scale, and as int64 epochs and weight versions.
        """
        self.prepare()
        if self._ledger is not None and self._loaded is None:
            self.refresh(self._ledger)
        assert self.cache is not None
        state: dict[str, Any] = {"epochs": torch.tensor([self.timeline.epochs[d] for d in Direction])}
        state["commits"] = torch.tensor(self.timeline.commits)
        for role in self.timeline.roles:
            layer, _, operand = role.name.rpartition(".")
            row = self.timeline.index[role.name]
            state[f"{layer}/scale.{operand}"] = self.timeline.scale[row].clone()
            state[f"{layer}/amax_history.{operand}"] = self.timeline.history[row].clone()
        for name, version in self.versions.versions.items():
            layer = self.cache.layer_of(name)
            cached = self.cache.cached[name]
            assert cached.rows is not None
            state[f"{layer}/weight_version"] = torch.tensor(version)
            state[f"{layer}/cached_weight"] = cached.rows.clone()
            state[f"{layer}/cached_weight_scale_inv"] = cached.scale_inv.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; the weights themselves are loaded by their owner, before the next step, which casts them anew and
        must find the bytes that were saved (:meth:`check_cast`).

        Raises:
            UsageError: a linear without its state, or an amax history of another length.
        """
        self.prepare()
        assert self.cache is not None
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise UsageError(f"the checkpoint has no FP8 state {missing[0]} ({len(missing)} of such): it is of another model")
        for role in self.timeline.roles:
            layer, _, operand = role.name.rpartition(".")
            row, history = self.timeline.index[role.name], state[f"{layer}/amax_history.{operand}"]
            if history.shape[0] != self._history:
                raise UsageError(f"{layer}: the checkpoint's amax history has {history.shape[0]} windows, not {self._history}")
            self.timeline.scale[row].copy_(state[f"{layer}/scale.{operand}"])
            self.timeline.history[row].copy_(history)
        epochs = {str(d): int(epoch) for d, epoch in zip(Direction, state["epochs"], strict=True)}
        self.timeline.load_state({"epochs": epochs, "commits": int(state["commits"]), "window": "step"})
        self._find_unrolled(anew=True)
        for name in self.versions.versions:
            layer = self.cache.layer_of(name)
            self.versions.versions[name] = int(state[f"{layer}/weight_version"]) - 1  # the cast to come counts once
        self._seen.clear()
        self._loaded = {name: state[f"{self.cache.layer_of(name)}/cached_weight"] for name in self.cache.names}

    def check_cast(self) -> None:
        """After a resume's first cast: the cached weights have the saved bytes.

        Raises:
            StaleWeightError: they do not: the weights are not those that were saved with these scales.
        """
        if self._loaded is None or self.cache is None:
            return
        for name, saved in self._loaded.items():
            rows = self.cache.cached[name].rows
            assert rows is not None
            if not torch.equal(rows.view(torch.uint8), saved.to(rows.device).view(torch.uint8)):
                raise StaleWeightError(f"{name}, cast with its saved scale, is not the saved cast: load the weights, too")
        self._loaded = None


def state_of(stages: Iterable[Any], fp8: bool | dict[str, Any]) -> FP8State | None:
    """Of the converted linears of ``stages``, by stage and path; None where ``fp8`` (True, or options) is not asked for.

    Raises:
        UsageError: it is, and there is no converted linear.
    """
    from qeffect_lm.integrations.pipelining.convert import SplitLinear

    if fp8 is False:
        return None
    linears: dict[str, SplitLinear] = {}
    for stage in stages:
        for path, child in stage.submod.named_modules(prefix=f"stage{stage.stage_index}"):
            if isinstance(child, SplitLinear):
                linears[path] = child
    if not linears:
        raise UsageError("fp8 is asked for, and no linear of this rank's stages is split")
    return FP8State(linears, **(fp8 if isinstance(fp8, dict) else {}))
