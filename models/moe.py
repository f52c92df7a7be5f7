"""The part of a mixture of experts, for the slot ``mlp``: its parameters' names begin with ``layers.N.moe``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.spec import Kinds, ParameterSpec, Place
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.grouped import ExpertLinear
from qeffect_lm.layers.moe import Expert, MoE
from qeffect_lm.layers.router import Router, RouterLosses


@dataclass(frozen=True)
class MoEPart:
    """``experts`` SwiGLU MLPs, of which each token goes through ``top_k`` (:mod:`qeffect_lm.layers.moe`).

    Attributes:
        ffn_size: inner width of one expert.
        normalise: the weights of a token's experts are divided by their sum.
        balance, z: coefficients of the router's losses, which are means over the decoder layers.
    """

    slot = "moe"
    parallel = True

    ffn_size: int
    experts: int
    top_k: int
    normalise: bool = True
    balance: float = 0.0
    z: float = 0.0

    @property
    def without_te(self) -> str | None:
        return "a mixture of experts (model.moe.num_experts)"

    def parameters(self, place: Place) -> list[ParameterSpec]:
        f, h = self.ffn_size, place.hidden_size
        router = (self.experts, h)
        specs = [ParameterSpec(f"{place.name}.router.weight", router, place.init_std, True, (None, None), summed="tokens")]
        for e in range(self.experts):
            mine = place.matrix(f"experts.{e}.gate_up", h, 2 * f, rows=((1, 0, f), (1, f, 2 * f)))
            mine += place.matrix(f"experts.{e}.down", f, h, residual=True)
            whole = {"axes": (None, None), "active": (self.top_k, self.experts), "expert": e}
            specs += [replace(spec, **whole) for spec in mine]  # type: ignore[arg-type]
        return specs

    def build(self, place: Place) -> Layer:
        h, experts = place.hidden_size, []
        linears = replace(place, kinds=Kinds(ExpertLinear))
        for e in range(self.experts) if place.ep is None else place.ep.held(self.experts):
            gate_up = linears.linear(f"experts.{e}.gate_up", h, 2 * self.ffn_size)
            down = linears.linear(f"experts.{e}.down", self.ffn_size, h)
            assert isinstance(gate_up, ExpertLinear) and isinstance(down, ExpertLinear)
            gate_up.share = down.share = self.top_k / self.experts
            experts.append(Expert(f"{place.name}.experts.{e}", gate_up, down))
        losses = RouterLosses(self.balance, self.z, place.num_layers)
        router = Router(
            f"{place.name}.router", h, self.experts, self.top_k,
            normalise=self.normalise, losses=losses, dtype=place.dtype, parallel=place.ep, tp=place.tp,
        )  # fmt: skip
        return MoE(place.name, router, experts, place.layer, place.ep)
