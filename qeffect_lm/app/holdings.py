"""What of the model's parameters a rank holds: specs of its storages, first values, and where it counts in the norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from models.decoder import Decoder
from models.spec import ParameterSpec
from pipeline.plan import Plan
from pipeline.tied import TIED, TiedWeights
from qeffect_lm.app import optimizer as optimizers
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.optim.norm import BlockOrder
from qeffect_lm.parallel.cuts import Even, length_of
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import TensorParallel
from qeffect_lm.runtime.init import initialise_
from qeffect_lm.state import EXPERT_REPLICAS


def param_specs(
    config: Config,
    chunks: Mapping[int, torch.nn.Module],
    specs: Mapping[str, ParameterSpec],
    ties: Mapping[str, str],
    tp: TensorParallel | None = None,
) -> list[ParamSpec]:
    """What the flat storage of a rank with these chunks holds; with ``tp`` its pieces.

    Raises:
        UsageError: a chunk has a parameter that ``specs`` does not list.
    """
    found = []
    for index, chunk in chunks.items():
        for name, parameter in named_parameters(chunk):
            source = ties.get(name)
            if (source or name) not in specs:
                raise UsageError(
                    f"the model's layers hold a parameter {name!r} that its parameters() does not list: add a ParameterSpec "
                    "for it (name, shape, initialisation, weight decay, mesh axes) in the model's file"
                )
            spec = specs[source or name]
            made = local_spec(spec, tp)
            decay = optimizers.decays(config, spec)
            group = TIED if name in ties.values() else index
            found.append(
                replace(made, name=name, decay=decay, trainable=parameter.requires_grad, group=group, tied_to=source)
            )
    return found


def shape_only(config: Config) -> tuple[TensorParallel | None, ExpertParallel | None]:
    """The first tensor- and expert-parallel rank of a configuration's layout, for structures without storage; no rank has more
    than it."""
    parallel = config.parallel
    tp = TensorParallel(parallel.tp, 0, parallel.sequence_parallel) if parallel.tp > 1 else None
    return tp, ExpertParallel.of(Mesh(parallel.sizes))


def local_spec(spec: ParameterSpec, tp: TensorParallel | None) -> ParamSpec:
    """What a tensor-parallel rank holds of a parameter; all of it without ``tp``. An expert's is whole on the expert's rank.

    Raises:
        UsageError: it cannot be cut so; names the parameter.
    """
    if spec.expert is not None:
        return ParamSpec(spec.name, spec.shape, spec.decay, (None,) * len(spec.shape), replicated=EXPERT_REPLICAS)
    if tp is None or "tp" not in spec.axes:
        uncut = tuple(None for _ in spec.shape)  # what the mesh cuts here; spec.axes says what it may cut
        summed = tp is not None and (spec.summed == "always" or (spec.summed == "tokens" and tp.sequence))
        return ParamSpec(spec.name, spec.shape, spec.decay, uncut, summed=summed)
    d = spec.axes.index("tp")
    try:
        pieces = (spec.cut or Even(spec.shape[d])).pieces(tp.size, tp.rank)
    except UsageError as error:
        raise UsageError(f"{spec.name}: {error}") from None

    def along(value: int, other: Sequence[int]) -> tuple[int, ...]:
        return (*other[:d], value, *other[d + 1 :])

    axes = tuple("tp" if number == d else None for number in range(len(spec.shape)))
    return ParamSpec(
        spec.name,
        along(length_of(pieces), spec.shape),
        spec.decay,
        axes,
        spec.shape,
        along(pieces[0].start, (0,) * len(spec.shape)),
        pieces=pieces if len(pieces) > 1 or pieces[0].shared else (),
    )


def initialise(flat: FlatBuffers, specs: dict[str, ParameterSpec], seed: int) -> None:
    """First weights. Where masters are cut or sharded each is made whole in turn: values do not depend on who holds what."""
    for name in flat.tied_param_buffers:
        source = flat.tied[name].tied_to
        assert source is not None
        flat.fill_(name, _first_values(flat, specs[source], seed))
    if flat.whole_masters and not any(flat.entry(name).spec.dimension is not None for name in flat.names):
        initialise_({n: (flat.master(n), specs[n].init_std) for n in flat.names}, seed)
        flat.gather()
        return
    for name in flat.names:
        flat.fill_(name, _first_values(flat, specs[name], seed))


def _first_values(flat: FlatBuffers, spec: ParameterSpec, seed: int) -> torch.Tensor:
    """Of a whole parameter."""
    whole = torch.empty(spec.shape, dtype=flat.master_buffer.dtype, device=flat.device)
    initialise_({spec.name: (whole, spec.init_std)}, seed)
    return whole


def block_order(
    model: Decoder, plan: Plan, counts: list[int], flat: FlatBuffers, mesh: Mesh
) -> tuple[BlockOrder, dict[str, str]]:
    """Every rank's trainable parameters in the model's order; which rank holds what follows from the plan. And which of this
    rank's parameters count under which name: an expert's where it is, of others a piece of a cut one on the first
    expert-parallel rank, under a name of its own, an uncut one on the first of all ranks that hold it."""
    peers, line = mesh.size("tp"), mesh.size("experts")
    me = mesh.coord("pp"), mesh.coord("experts")
    specs = {spec.name: spec for spec in model.parameters()}
    spread = line > 1 and any(spec.expert is not None for spec in specs.values())
    if spread:
        model = replace(model, ep=None)  # of which every rank has all experts
    holders: list[list[str]] = []
    sizes: dict[str, int] = {}
    counted: dict[str, str] = {}
    for rank in range(plan.num_ranks):
        names = _trainable_names(model, plan, counts, rank, flat if rank == me[0] and not spread else None)
        for place in range(line):
            first, peer = divmod(place, peers)
            here = {}
            for name in names:
                spec = specs[name]
                if spec.expert is not None:
                    if spec.expert in ExpertParallel(line, place).held(spec.active[1]):
                        here[name] = name
                elif not first:
                    local = local_spec(spec, None if peers == 1 else TensorParallel(peers, peer))
                    if local.dimension is not None:
                        here[f"{name} of tp {peer}"] = name
                    elif peer == 0:
                        here[name] = name
            holders.append(list(here))
            counted = here if (rank, place) == me else counted
    held = {name for names in holders for name in names}
    for spec in specs.values():
        for peer in range(peers):
            label = f"{spec.name} of tp {peer}"
            if label in held:
                sizes[label] = local_spec(spec, TensorParallel(peers, peer)).counted
        if spec.name in held:
            sizes[spec.name] = int(torch.Size(spec.shape).numel())
    return BlockOrder(list(sizes.items()), holders), counted


def _trainable_names(model: Decoder, plan: Plan, counts: list[int], rank: int, flat: FlatBuffers | None) -> list[str]:
    """Of a pipeline rank; ``flat``: this one's storages."""
    if flat is not None:
        return flat.trainable_names
    names = []
    for index in plan.placement.chunks(rank):
        held_there = named_parameters(model.meta_chunk(index, counts))
        names += [name for name, parameter in held_there if parameter.requires_grad and name not in model.ties]
    return names


def tied_weights(model: Decoder, plan: Plan, counts: list[int], flat: FlatBuffers, mesh: Mesh) -> TiedWeights | None:
    """Who holds the layers of each tied weight; None where the model ties none.

    Raises:
        UsageError: one of two layers that share a weight is frozen, the other is not; or the one that ties it is in FP8.
    """
    if not model.ties:
        return None
    places, trainable = {}, {}
    for chunk in range(plan.placement.num_chunks):
        built = model.meta_chunk(chunk, counts)
        for name, parameter in named_parameters(built):
            places[name], trainable[name] = plan.placement.ranks[chunk], parameter.requires_grad
        for module in built.modules():
            if isinstance(module, SplitLinear) and module.recipe is not None and module.weight_name in model.ties:
                raise UsageError(f"{module.weight_name} is tied and in FP8, whose caches need a master: keep it out of FP8")
    for copy, source in model.ties.items():
        if trainable[copy] != trainable[source]:
            frozen, other = (copy, source) if trainable[source] else (source, copy)
            raise UsageError(f"{frozen} is frozen and {other} is not, but they are one weight: freeze both or neither")
    return TiedWeights(flat, mesh, model.ties, places)
