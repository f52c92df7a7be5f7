"""What a model owes the framework: a list of named blocks, cut into chunks for pipeline stages.

The engine knows a model as an ordered list of blocks; a chunk runs some of them. The first takes token ids
``[batch, sequence]``, the last gives the loss; between two there is one activation tensor ``[batch, sequence, hidden]``.

:class:`models.decoder.Decoder` makes such a list from parts: a :class:`Part` says which parameters it has and builds its layer,
wherever a :class:`Place` puts it (docs/extending.md adds one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.recompute import recomputed
from qeffect_lm.optim.muon import RowBlock
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.cuts import Cut
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.linear import ColumnParallelLinear, RowParallelLinear
from qeffect_lm.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter by logical name, with its initialisation and the mesh axis that cuts each dimension (None: none).

    ``cut``: how tensor parallelism cuts the dimension whose axis is ``tp``; None: in equal pieces. ``summed``: of a parameter
    that every tensor-parallel rank holds whole, where its gradient there is a part of a sum: ``tokens`` where tokens are cut
    (sequence parallelism), ``always`` where what it is applied to is cut otherwise, too. ``expert``: which of a layer's experts
    it belongs to (``active`` says of how many); such a parameter lies on its expert's rank alone.
    """

    name: str
    shape: tuple[int, ...]
    init_std: float | None  # None: ones; 0: zeros
    decay: bool
    axes: tuple[str | None, ...]
    embedding: bool = False  # a table of rows, of which a step uses a few
    matrices: tuple[RowBlock, ...] = ()  # of a hidden layer: its logical matrices, for optimizers of matrices
    active: tuple[int, int] = (1, 1)  # of so many such parameters (the second) a token uses the first: experts
    cut: Cut | None = None
    summed: str | None = None
    expert: int | None = None


class Kinds(NamedTuple):
    """Classes of linears: whole ones, and those that tensor parallelism cuts. ``norms``: where the gradient of a norm before
    them is a part of a sum (``summed`` of :class:`ParameterSpec`): ``always``, if they add up what leaves its backward."""

    whole: type[SplitLinear] = SplitLinear
    column: type[ColumnParallelLinear] = ColumnParallelLinear
    row: type[RowParallelLinear] = RowParallelLinear
    norms: str = "tokens"


@dataclass(frozen=True)
class Place:
    """Where a part goes, and what it shares with the parts around it.

    Attributes:
        name: logical name of the layer there, such as ``layers.3.mlp``; its parameters' names begin with it.
        layer: number of the decoder layer; None outside of them.
        num_layers: decoder layers of the model.
        dtype: of parameters and activations.
        init_std: of fresh matrices.
        recipe: FP8 recipe of the linears there; None: none in FP8.
        kinds: classes of the linears there, the backend's.
        selective: a layer there keeps nothing between its products for I, which makes it again (``model.recompute``); a part
            may ignore it.
        tp: the rank's place among those that share each layer; None: there are no others. Only parts that say ``parallel`` get
            one.
        vocab_size: of the model.
        ep: the rank's place among those that share a layer's experts; None: every rank has all of them.
        cp: the rank's place among those that each have a part of every sequence; None: there are no others.
    """

    name: str
    hidden_size: int
    num_layers: int
    dtype: torch.dtype
    init_std: float
    layer: int | None = None
    recipe: Recipe | None = None
    kinds: Kinds = Kinds()
    selective: bool = False
    tp: TensorParallel | None = None
    vocab_size: int = 0
    ep: ExpertParallel | None = None
    cp: ContextParallel | None = None

    @property
    def residual_std(self) -> float:
        """Of fresh matrices whose product is added to the residual stream (Radford et al. 2019)."""
        return self.init_std / math.sqrt(2 * self.num_layers)

    # ---- layers ------------------------------------------------------------------------------------------------

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> SplitLinear:
        """The linear ``<place>.<name>``: ``[..., inputs]`` → ``[..., outputs]``."""
        return self.kinds.whole(f"{self.name}.{name}", inputs, outputs, bias=bias, recipe=self.recipe, dtype=self.dtype)

    def column(self, name: str, inputs: int, outputs: int, *, bias: bool = False, cut: Cut | None = None) -> SplitLinear:
        """:meth:`linear`, whose outputs tensor parallelism cuts as ``cut`` says (None: in equal pieces)."""
        if self.tp is None:
            return self.linear(name, inputs, outputs, bias=bias)
        at = f"{self.name}.{name}"
        return self.kinds.column(
            at, inputs, outputs, tp=self.tp, cut=cut, bias=bias, recipe=self.recipe, dtype=self.dtype
        )  # fmt: skip

    def row(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> SplitLinear:
        """:meth:`linear`, whose inputs tensor parallelism cuts in equal pieces: those that :meth:`column` gave."""
        if self.tp is None:
            return self.linear(name, inputs, outputs, bias=bias)
        at = f"{self.name}.{name}"
        return self.kinds.row(at, inputs, outputs, tp=self.tp, bias=bias, recipe=self.recipe, dtype=self.dtype)

    @property
    def before(self) -> int:
        """So many ranks hold the tokens before this rank's, where tokens are cut (with ``cp``, those that it holds)."""
        return self.tp.rank if self.tp is not None and self.tp.sequence else 0

    # ---- their parameters --------------------------------------------------------------------------------------

    def matrix(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        residual: bool = False,
        rows: Sequence[RowBlock] = (),
        cut: Cut | None = None,
    ) -> list[ParameterSpec]:
        """Of :meth:`linear`, :meth:`column` and, with ``residual``, :meth:`row`.

        Args:
            residual: its product goes to the residual stream: it starts smaller, and tensor parallelism cuts its inputs.
            rows: its logical matrices, for optimizers of matrices; none given: the whole.
            cut: as of :meth:`column`.
        """
        std, axes = (self.residual_std, (None, "tp")) if residual else (self.init_std, ("tp", None))
        blocks = tuple(rows) or ((1, 0, outputs),)
        at = f"{self.name}.{name}"
        specs = [ParameterSpec(f"{at}.weight", (outputs, inputs), std, True, axes, matrices=blocks, cut=cut)]
        if bias:
            summed = "tokens" if residual else None
            specs.append(ParameterSpec(f"{at}.bias", (outputs,), 0.0, False, (axes[0],), cut=cut, summed=summed))
        return specs

    def vector(self, name: str, size: int, init_std: float | None = None, summed: str = "tokens") -> ParameterSpec:
        """The parameter ``<place>.<name>``, a vector without weight decay; ones, or zeros with ``init_std`` 0. ``summed`` as of
        :class:`ParameterSpec`."""
        return ParameterSpec(f"{self.name}.{name}", (size,), init_std, False, (None,), summed=summed)


class Part(Protocol):
    """What fills a slot of a model. Its parameters and its layers must agree: assembly refuses a parameter without a spec.

    A part whose layers can be cut over tensor-parallel ranks says so by an attribute ``parallel`` that is True, and makes them
    by :meth:`Place.column` and :meth:`Place.row`, with the cuts and sums in its parameters' specs.
    """

    def parameters(self, place: Place) -> list[ParameterSpec]:
        """The parameters there, in the order in which the built layer holds them."""
        ...

    def build(self, place: Place) -> Layer:
        """The layer there, its parameters of any value, on the device that torch has as default."""
        ...


class ModelSpec(Protocol):
    """A model family with its sizes."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    def parameters(self, layers: Sequence[int] | None = None) -> list[ParameterSpec]:
        """All parameters in global order, or those of some decoder layers only."""
        ...

    @property
    def ties(self) -> dict[str, str]:
        """Weight of a layer → the parameter that it is, another layer's, perhaps on another rank; most models: none."""
        ...

    def chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """Build chunk ``index`` of ``len(stage_layers)``; ``stage_layers`` says how many decoder layers each gets."""
        ...


class Chunk(nn.Module):
    """Consecutive blocks of a model. Called with ``(x, context)``; gives activations, or on the last chunk the loss.

    In evaluation without targets the last chunk gives the logits ``[batch, sequence, vocab]``.
    """

    def __init__(self, blocks: Sequence[Layer], *, loss: Layer | None = None, first: bool = False) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.loss = loss
        self.first = first

    @property
    def last(self) -> bool:
        return self.loss is not None

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        once = context.phase is Phase.CALIBRATE and torch.is_grad_enabled()
        for block in self.blocks:
            # Calibration runs once, in high precision: it keeps borders only, or its activations would set a run's peak.
            if once:
                x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
            elif block.recompute:
                x = recomputed(block, x, context, [block], block.tail)
            else:
                x = block(x, context)
        if self.loss is not None and context.targets is not None:
            return self.loss(x, context)
        return x


def layer_range(index: int, counts: Sequence[int]) -> range:
    """The decoder layers of stage ``index``."""
    start = sum(counts[:index])
    return range(start, start + counts[index])
