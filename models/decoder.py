"""A decoder-only transformer of typed slots: a norm before attention and before the MLP, residual streams around both.

Every slot holds a part (:mod:`models.parts`, or anybody's): what fills them is a family's whole business (:mod:`models.llama`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.parts import CrossEntropyPart, EmbeddingPart, HeadPart
from models.spec import Chunk, Kinds, ParameterSpec, Part, Place, layer_range
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.layers.base import Deferred, Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.te import TEBlock, TEColumnLinear, TELinear, TERowLinear
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.tensor import TensorParallel


class DecoderBlock(Layer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with residual dropout.

    ``attention`` and ``mlp`` are called with ``(x, context, norm, residual=…)``: a layer may put the norm into its first kernel
    and the residual into its last.
    """

    def __init__(
        self,
        name: str,
        attention_norm: Layer,
        attention: Layer,
        mlp_norm: Layer,
        mlp: Layer,
        dropout: float,
        before: int = 0,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(name)
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout = KeyedDropout(f"{name}.attention_dropout", dropout, before, cp)
        self.mlp_dropout = KeyedDropout(f"{name}.mlp_dropout", dropout, before, cp)

    @property
    def tail(self) -> Deferred | None:
        return self.mlp.tail

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.attention_dropout.p == 0:
            x = self.attention(x, context, self.attention_norm, residual=True)
        else:
            x = x + self.attention_dropout(self.attention(x, context, self.attention_norm), context)
        if self.mlp_dropout.p == 0:
            return self.mlp(x, context, self.mlp_norm, residual=True)
        return x + self.mlp_dropout(self.mlp(x, context, self.mlp_norm), context)


@dataclass(frozen=True)
class Decoder:
    """Slots and sizes of a decoder, and how to build any part of it.

    Attributes:
        embedding, attention, mlp, norm, head, loss: the parts; ``norm`` is used twice in a decoder layer and once at the end.
        recipe: FP8 recipe of the decoder layers' linears (embedding and head stay in ``dtype``); None: no FP8.
        high_precision_first, high_precision_last: that many decoder layers at either end stay out of FP8.
        backend: who runs the decoder layers, ``native`` or ``te`` (Transformer Engine).
        recompute: activations that I makes again, ``none``, ``full`` or ``selective`` (:mod:`qeffect_lm.layers.recompute`).
        recompute_layers: of which decoder layers; None: of all.
        tp: this rank's place among those that share each layer (``dataclasses.replace`` gives one); None: there are no others.
        ep: this rank's place among those that share a layer's experts; None: every rank has all of them.
        cp: its place among those that each have a part of every sequence; None: there are no others.

    Raises:
        UsageError: the backend cannot run a part, or a part cannot be cut over ranks, or does not know of parts of sequences.
    """

    hidden_size: int
    num_layers: int
    embedding: EmbeddingPart
    attention: Part
    mlp: Part
    norm: Part
    head: HeadPart
    loss: Part = CrossEntropyPart()
    dropout: float = 0.0
    init_std: float = 0.02
    dtype: torch.dtype = torch.float32
    recipe: Recipe | None = field(default=None, compare=False)
    high_precision_first: int = 0
    high_precision_last: int = 0
    backend: str = "native"
    recompute: str = "none"
    recompute_layers: tuple[int, ...] | None = None
    tp: TensorParallel | None = None
    ep: ExpertParallel | None = None
    cp: ContextParallel | None = None

    def __post_init__(self) -> None:
        if self.tp is not None:
            for part in (self.embedding, self.norm, self.attention, self.mlp, self.head, self.loss):
                if not getattr(part, "parallel", False):
                    raise UsageError(
                        f"parallel.tp {self.tp.size}: {type(part).__name__} cannot be cut over tensor-parallel ranks: set "
                        "parallel.tp=1"
                    )
        if self.cp is not None:
            for part in (self.embedding, self.attention):  # the others are about single tokens
                if not getattr(part, "sequences", False):
                    raise UsageError(
                        f"parallel.cp {self.cp.size}: {type(part).__name__} does not say that it knows of sequences cut over "
                        "ranks: set parallel.cp=1"
                    )
        if self.backend != "te":
            return
        for part in (self.norm, self.attention, self.mlp):
            why = getattr(part, "without_te", f"{type(part).__name__}, a part that it does not know")
            if why is not None:
                raise UsageError(f"model.backend te does not run {why}: set model.backend=native")

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    # ---- parameters --------------------------------------------------------------------------------------------

    def place(self, name: str, layer: int | None = None) -> Place:
        """Where a part goes: the decoder layer ``layer``, or outside of them."""
        in_fp8 = layer is not None and self.high_precision_first <= layer < self.num_layers - self.high_precision_last
        recipe = self.recipe if in_fp8 else None
        native = self.backend == "native" or layer is None
        kinds = Kinds() if native else Kinds(TELinear, TEColumnLinear, TERowLinear, "always")
        selective = layer is not None and self.recomputes(layer) == "selective"
        return Place(
            name, self.hidden_size, self.num_layers, self.dtype, self.init_std, layer, recipe, kinds, selective,
            self.tp, self.vocab_size, self.ep, self.cp,
        )  # fmt: skip

    def recomputes(self, layer: int) -> str:
        """What I makes again of a decoder layer: ``none``, ``full`` or ``selective``."""
        return self.recompute if self.recompute_layers is None or layer in self.recompute_layers else "none"

    def slots(self, layer: int) -> list[tuple[Part, Place]]:
        """The parts of a decoder layer in order, with their places."""
        named = {
            "attention_norm": self.norm,
            "attention": self.attention,
            "mlp_norm": self.norm,
            "mlp": self.mlp,
        }
        return [
            (part, self.place(f"layers.{layer}.{getattr(part, 'slot', name)}", layer)) for name, part in named.items()
        ]

    def parameters(self, layers: Sequence[int] | None = None) -> list[ParameterSpec]:
        """All parameters in global order (embedding, layers, final norm, head), or those of ``layers`` only."""
        specs = []
        if layers is None:
            specs += self.embedding.parameters(self.place("embedding_block"))
        for i in range(self.num_layers) if layers is None else layers:
            for part, place in self.slots(i):
                specs += part.parameters(place)
        if layers is None:
            specs += self.norm.parameters(self.place("final_norm"))
            specs += self.head.parameters(self.place("head"))
            specs += self.loss.parameters(self.place("loss"))
        return specs

    @property
    def ties(self) -> dict[str, str]:
        """Weight of a layer → the parameter that it is, another layer's. It is no parameter of its own."""
        return {"head.weight": "embedding.weight"} if self.head.tied else {}

    # ---- modules -----------------------------------------------------------------------------------------------

    def chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """One chunk per entry of ``stage_layers`` (its decoder layers): the first also holds the embedding, the last the
        final norm, head and loss."""
        blocks: list[Layer] = []
        if index == 0:
            blocks.append(self.embedding.build(self.place("embedding_block")))
        blocks += [self.block(i) for i in layer_range(index, stage_layers)]
        loss = None
        if index == len(stage_layers) - 1:
            blocks.append(self.norm.build(self.place("final_norm")))
            blocks.append(self.head.build(self.place("head")))
            loss = self.loss.build(self.place("loss"))
        return Chunk(blocks, loss=loss, first=index == 0)

    def meta_chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """The chunk's structure without storage, to ask what another rank holds."""
        with torch.device("meta"):
            return self.chunk(index, stage_layers)

    def block(self, i: int) -> DecoderBlock | TEBlock:
        """Decoder layer ``i``."""
        attention_norm, attention, mlp_norm, mlp = (part.build(place) for part, place in self.slots(i))
        before = self.place(f"layers.{i}", i).before
        block = DecoderBlock(f"layers.{i}", attention_norm, attention, mlp_norm, mlp, self.dropout, before, self.cp)
        block.recompute = self.recomputes(i) == "full"
        return block if self.backend == "native" else TEBlock(block)
