"""Experts spread over ranks, the ranks being threads here: rows that travel, the splits, padding, losses of cut tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint.assembly import owns
from models import build_model
from models.moe import MoEPart
from models.spec import Place
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.holdings import block_order
from qeffect_lm.contract.timeline import EMPTY, Direction
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.moe import bind_statistics, mixtures
from qeffect_lm.parallel import expert
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import TensorParallel
from tests.tiny import config, same_bits
from tests.unit.layer_harness import Harness, random

HIDDEN, FFN, NAME = 32, 48, "layers.0.moe"
TOKENS = 12  # of a rank


class Line:
    """Ranks of a group, each a thread: its collectives through memory."""

    def __init__(self, size: int) -> None:
        self.size, self.rows = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=30)
        self.groups = [SimpleNamespace(line=self, rank=rank) for rank in range(size)]

    def swap(self, rank: int, mine: Any) -> list[Any]:
        self.rows[rank] = mine
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


def _all_to_all(made: torch.Tensor, rows: torch.Tensor, received: Any, sent: Any, group: Any) -> None:
    line, rank = group.line, group.rank
    parts = rows.split(rows.shape[0] // line.size if sent is None else sent)
    came = [told[rank] for told in line.swap(rank, parts)]
    assert received is None or [part.shape[0] for part in came] == received
    made.copy_(torch.cat(came))


def _all_reduce(values: torch.Tensor, group: Any) -> None:
    values.copy_(torch.stack(group.line.swap(group.rank, values.clone())).sum(0))


@pytest.fixture(autouse=True)
def through_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert, "_all_to_all", _all_to_all)
    monkeypatch.setattr(expert, "_all_reduce", _all_reduce)


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives on each rank, all at once."""
    found: list[Any] = [None] * size
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    own = [fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)]
    if faults:
        raise (own or faults)[0]
    return found


def harness(
    part: MoEPart, ep: ExpertParallel | None, dtype: torch.dtype, fp8: bool = False, tp: TensorParallel | None = None
) -> Harness:
    """The layer; the values of a parameter depend on its name alone."""
    place = Place(NAME, HIDDEN, 1, dtype, 0.02, 0, DelayedScaling() if fp8 else None, ep=ep, tp=tp)
    made = Harness(part.build(place))
    made.divisor = made.stage.divisor = torch.tensor(40.0, dtype=torch.float64)
    names = [spec.name for spec in part.parameters(place)]
    with torch.no_grad():
        for name, parameter in made.parameters.items():
            parameter.copy_(random(*parameter.shape, seed=names.index(name), scale=0.3))
    made.refresh()
    bind_statistics(made.module, torch.zeros(1, 2 + part.experts, dtype=torch.float64))
    return made


def steered(made: Harness, chosen: tuple[int, ...] | None) -> None:
    """Have the router send every token to these experts; None: as it likes."""
    if chosen is not None:
        router = mixtures(made.module)[0].router
        with torch.no_grad():
            router.weight.mul_(0.01)
            for place, number in enumerate(chosen):
                router.weight[number, 0] += 4.0 - place


Tensors = list[torch.Tensor]


def results(made: Harness, xs: Tensors, dys: Tensors, masks: Tensors) -> dict[str, torch.Tensor]:
    """F, I and W of microbatches."""
    told = [made.microbatch(m, x, dy, mask=mask) for m, (x, dy, mask) in enumerate(zip(xs, dys, masks, strict=True))]
    made.run(told)
    found = {f"out {m.number}": m.out for m in told} | {f"dx {m.number}": m.dx for m in told}
    router = mixtures(made.module)[0].router
    return found | made.grads | {"amax": made.timeline.open_amax, "statistics": router.statistics}


def data(size: int, dtype: torch.dtype, microbatches: int = 2) -> tuple[list[list[torch.Tensor]], ...]:
    """x, dy and mask of each rank's microbatches."""
    xs = [[random(1, TOKENS, HIDDEN, seed=10 * r + m, dtype=dtype) for m in range(microbatches)] for r in range(size)]
    for x in (x for mine in xs for x in mine):
        x[..., 0] = 2.0  # what a steered router looks at
    dys = [[random(1, TOKENS, HIDDEN, seed=500 + 10 * r + m, dtype=dtype) for m in range(microbatches)] for r in range(size)]
    masks = [[torch.ones(1, TOKENS) for _ in range(microbatches)] for _ in range(size)]
    for r, mine in enumerate(masks):
        mine[0][:, TOKENS - 2 * r :] = 0
    return xs, dys, masks


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max().item() <= 1e-12 * max(1.0, want.abs().max().item())


ROUTINGS = {
    "as it likes": (2, MoEPart(FFN, 6, 2, balance=0.7, z=0.3), None),
    "three ranks": (3, MoEPart(FFN, 6, 3, normalise=False, balance=0.7), None),
    "every token to two of one rank": (2, MoEPart(FFN, 4, 2, balance=0.7), (3, 2)),
    "every token to one": (2, MoEPart(FFN, 4, 1, z=0.3), (2,)),
    "all experts": (2, MoEPart(FFN, 4, 4, balance=0.7), None),
    "an expert a rank": (4, MoEPart(FFN, 4, 2, balance=0.7), None),
}


@pytest.mark.parametrize(("size", "part", "chosen"), ROUTINGS.values(), ids=ROUTINGS)
def test_as_one_process(size, part, chosen, monkeypatch) -> None:
    """Float64: outputs, input gradients, every gradient, and the routers' sums are those of one process that has all experts
    and all ranks' microbatches; with exact splits and in the static form the same bits."""
    xs, dys, masks = data(size, torch.float64)
    one = harness(part, None, torch.float64)
    steered(one, chosen)
    flat = [[value for mine in values for value in mine] for values in (xs, dys, masks)]
    want = results(one, *flat)
    told = []
    for exact in (True, False):
        monkeypatch.setattr(expert, "host_reads", lambda _, exact=exact: exact)
        line = Line(size)

        def run(rank: int, line: Line = line) -> dict[str, torch.Tensor]:
            made = harness(part, ExpertParallel(size, rank, group=line.groups[rank]), torch.float64)
            steered(made, chosen)
            return results(made, xs[rank], dys[rank], masks[rank])

        told.append(on_ranks(size, run))
    assert all(same_bits(a[name], b[name]) for a, b in zip(*told, strict=True) for name in a), "static is exact"
    for rank, got in enumerate(told[0]):
        for what in ("out", "dx"):
            for m in range(2):
                close(got[f"{what} {m}"], want[f"{what} {2 * rank + m}"])
        held = ExpertParallel(size, rank).held(part.experts)
        experts = [name for name in got if ".experts." in name]
        assert len(experts) == 2 * len(held) and all(int(name.split(".")[4]) in held for name in experts)
        for name in experts:
            close(got[name], want[name])
            assert bool(got[name].any()) == (chosen is None or int(name.split(".")[4]) in chosen), "an idle one's is zero"
    for name in (f"{NAME}.router.weight", "statistics"):
        close(torch.stack([got[name] for got in told[0]]).sum(0), want[name])


@pytest.mark.parametrize("chosen", [None, (0, 1)], ids=["as it likes", "a rank without any row"])
def test_static_is_exact_in_fp8(chosen, monkeypatch) -> None:
    """The same bits, amax included; an idle expert's slots stay EMPTY, padding reports nothing."""
    part = MoEPart(FFN, 4, 2, balance=0.1)
    xs, dys, masks = data(2, torch.bfloat16)
    told = []
    for exact in (True, False):
        monkeypatch.setattr(expert, "host_reads", lambda _, exact=exact: exact)
        line = Line(2)

        def run(rank: int, line: Line = line) -> dict[str, torch.Tensor]:
            made = harness(part, ExpertParallel(2, rank, group=line.groups[rank]), torch.bfloat16, True)
            steered(made, chosen)
            found = results(made, xs[rank], dys[rank], masks[rank])
            roles = made.timeline.roles
            idle = [float(found["amax"][i]) for i, role in enumerate(roles) if rank and not role.name.endswith("weight")]
            return found | {"idle": torch.tensor(idle)}

        told.append(on_ranks(2, run))
    assert all(same_bits(a[name], b[name]) for a, b in zip(*told, strict=True) for name in a)
    assert bool((told[0][1]["idle"] == EMPTY).all()) is (chosen is not None) and len(told[0][1]["idle"]) == 8
    assert bool((told[0][0]["amax"] > 0).all()) and all(bool(got["out 0"].any()) for got in told[0])


def test_tokens_of_one_microbatch_on_two_ranks(monkeypatch) -> None:
    """Sequence parallelism: the balance loss knows the loads of the whole microbatch, and the sums of both ranks are its."""
    part = MoEPart(FFN, 4, 2, balance=0.7, z=0.3)
    xs, dys, _ = data(2, torch.float64)
    mask = torch.ones(1, 2 * TOKENS)
    mask[:, -5:] = 0
    one = harness(part, None, torch.float64)
    want = results(one, *([torch.cat(parts, dim=1) for parts in zip(*values, strict=True)] for values in (xs, dys)), [mask] * 2)
    line, tokens = Line(2), Line(2)

    def run(rank: int) -> dict[str, torch.Tensor]:
        ep = ExpertParallel(2, rank, "tp", line.groups[rank], cut=2, cut_group=tokens.groups[rank])  # type: ignore[arg-type]
        made = harness(part, ep, torch.float64, tp=TensorParallel(2, rank))
        return results(made, xs[rank], dys[rank], [mask] * 2)

    told = on_ranks(2, run)
    for m in range(2):
        for what in ("out", "dx"):
            close(torch.cat([got[f"{what} {m}"] for got in told], dim=1), want[f"{what} {m}"])
    for got in told:
        for name in (name for name in got if ".experts." in name):
            close(got[name], want[name])
    for name in (f"{NAME}.router.weight", "statistics"):
        close(told[0][name] + told[1][name], want[name])
        assert not torch.equal(told[0][name], told[1][name])


def test_who_holds_what() -> None:
    assert list(ExpertParallel(4, 2).held(8)) == [4, 5]
    with pytest.raises(UsageError, match="num_experts 6 is not divisible by the 4 ranks .*parallel.ep x parallel.tp"):
        ExpertParallel(4, 0, "ep x tp").held(6)


# ---- the configuration, and what a rank holds ------------------------------------------------------------------------

MIXTRAL: dict[str, Any] = {"model__family": "mixtral", "model__moe": {"num_experts": 4}, "model__head_dim": 32}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"parallel__ep": 3}, "num_experts 4 is not divisible by parallel.ep 3, the ranks that share them"),
        ({"parallel__ep": 4, "parallel__tp": 2}, "num_experts 4 is not divisible by parallel.ep 4 x parallel.tp 2"),
        ({"parallel__tp": 2, "parallel__sequence_parallel": False}, "set parallel.sequence_parallel=true, or parallel.tp=1"),
        ({"parallel__ep": 2, "pipeline__schedule": "auto", "pipeline__w_delay": 0}, "auto measures all experts on one rank"),
    ],
)
def test_what_cannot_be_spread_is_refused(keys, words) -> None:
    """Which number to change, before anything starts."""
    with pytest.raises(UsageError, match=words):
        config(**MIXTRAL, **keys)


def test_a_model_without_experts() -> None:
    with pytest.raises(UsageError, match="parallel.ep 2: model.family 'llama' has no experts: set parallel.ep=1"):
        build_model(config(parallel__ep=2), None, torch.float32)


def test_experts_are_cut_by_nothing() -> None:
    """ffn_size need not divide by tp: an expert is whole on its rank."""
    assert config(**MIXTRAL | {"model__ffn_size": 80}, parallel__tp=2).parallel.tp == 2


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"ep": 2, "tp": 2}, {"pp": 2, "ep": 2, "dp": 2}])
def test_every_parameter_counts_once(sizes, monkeypatch) -> None:
    """C4: over all ranks of one replica each trainable parameter is in one rank's sums, whole, or its pieces are; an expert's
    tensors are written by one rank, and no replica holds others'."""
    monkeypatch.setattr("qeffect_lm.app.assemble.Transport", lambda *_: None)
    keys = {f"parallel__{axis}": size for axis, size in sizes.items()}
    settings = config(**MIXTRAL | keys, model__num_layers=2, contract__mode="off", pipeline__w_delay=0)
    writers: dict[str, int] = {}
    experts: dict[int, set[str]] = {}
    counted: list[str] = []
    world = Mesh(sizes).world
    for rank in range(world):
        mesh = Mesh(sizes, rank)
        part = assemble(settings, mesh, device=torch.device("meta"), rehearsal=True)
        order, mine = block_order(part.model, part.plan, settings.chunk_layers(sizes.get("pp", 1)), part.flat, mesh)
        place = mesh.coord("pp") * mesh.size("experts") + mesh.coord("experts")
        assert order.num_stages == mesh.size("pp") * mesh.size("experts")
        assert sorted(mine) == sorted(order.local_names(place))
        if not mesh.coord("replicas"):
            counted += mine
        held = {name for name in part.flat.names if ".experts." in name}
        assert experts.setdefault(place, held) == held, "replicas hold the same"
        assert len(held) == 2 * 2 * 4 // mesh.size("pp") // mesh.size("experts")
        line = part.timeline
        roles = {role.name.rpartition(".")[0] for role in line.roles if ".experts." in role.name}
        assert roles == {name.removesuffix(".weight") for name in held}
        for direction in Direction:
            shared = [".experts." in role.name for role in line.roles[line.rows(direction, shared=True)]]
            every = [".experts." in role.name for role in line.roles[line.rows(direction)]]
            assert not any(shared) and all(every[len(shared) :]) and 0 < len(shared) < len(every)
        for item in part.logical_tensors():
            if ".experts." in item.name:
                writers[item.name] = writers.get(item.name, 0) + owns(item, mesh.coords)
    assert len(counted) == len(set(counted)) and sum(".experts." in name for name in counted) == 16
    assert set(writers.values()) == {1} and len({name for name in writers if name.startswith("scale/")}) == 48


def test_the_dry_run_says_what_a_rank_holds() -> None:
    """Half the experts, less memory; the exchanges' buffers are in the activations."""
    one, two = (describe(config(**MIXTRAL, parallel__ep=ep, precision__dtype="bfloat16")) for ep in (1, 2))
    held = [float(page.split("activations with slots and workspaces:")[1].split("\n")[2].split()[1]) for page in (one, two)]
    assert held[1] < 0.8 * held[0], held
    assert "each of 2 expert-parallel ranks" in two and "expert-parallel" not in one.split("memory per pipeline rank")[1]
