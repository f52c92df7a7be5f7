"""``pipeline.schedule: auto`` in training: costs, limits, one plan on all ranks, no trace of the profile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.auto import auto
from pipeline.plan import Plan
from pipeline.simulate import peak_activations
from qeffect_lm.app import auto_plan
from qeffect_lm.app.auto_plan import agree_on_plan, choose_plan, decide, explain, needs_profile
from qeffect_lm.app.profile import Part, Profile, made_up_batch, profile
from qeffect_lm.app.resuming import plan_of
from qeffect_lm.config import Config
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.mesh import Mesh
from tests.tiny import assert_moved, batch, config, differing, merged, train
from tests.unit.in_process import Ranks

LAYER = Part(t_f=3.0, t_i=3.0, t_w=2.0, m_b=100.0, m_w=40.0)
A = Profile(Part(0.1, 0.1, 0.0, 20.0, 0.0), {True: LAYER}, Part(1.0, 1.0, 1.0, 60.0, 30.0), 0.2)
B = replace(A, layers={True: replace(LAYER, t_w=9.0, m_w=90.0)}, head=Part(8.0, 8.0, 0.5, 60.0, 30.0))


def auto_config(pp: int = 2, m: int = 4, **keys: Any) -> Config:
    return config(parallel__pp=pp, pipeline={"schedule": "auto", "microbatches": m, **keys})


class Threads:
    """Communicators of ranks that are threads of this process."""

    def __init__(self, world: int) -> None:
        self.world, self.box, self.barrier = world, [None] * world, threading.Barrier(world, timeout=20)

    def each(self, call: Callable[[Any], Any]) -> list[Any]:
        """``call`` on every rank's communicator; an error is a result."""
        results: list[Any] = [None] * self.world

        def body(rank: int) -> None:
            try:
                results[rank] = call(self.comm(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def comm(self, rank: int) -> Any:
        def exchange(value: Any) -> list[Any]:
            self.box[rank] = value
            self.barrier.wait()
            values = list(self.box)
            self.barrier.wait()
            return values

        return SimpleNamespace(
            rank=rank,
            world=self.world,
            gather=lambda value: exchange(value) if rank == 0 else (exchange(value), None)[1],
            broadcast=lambda value: exchange(value)[0],
        )


# ---- what is decided -----------------------------------------------------------------------------------------------


def test_given_costs_are_those_of_the_library_call():
    costs = {"t_f": [3.0, 4.0], "t_i": [3.0], "t_w": [2.0], "t_comm": 0.5, "m_b": [200.0], "m_w": [80.0]}
    found = decide(auto_config(m=6, memory_limit="1.5", costs=costs), [])
    wanted = auto(2, 6, (3.0, 4.0), 3.0, 2.0, 0.5, limit=300.0, M_B=200.0, M_W=80.0, objective="makespan")
    assert found.plan.text() == wanted.plan.text() and found.cost == pytest.approx(wanted.cost)
    assert not needs_profile(auto_config(costs=costs)) and needs_profile(auto_config())
    times = {"t_f": [1.0], "t_i": [1.0], "t_w": [1.0]}
    assert not needs_profile(auto_config(costs=times, memory_limit="2"))
    assert needs_profile(auto_config(costs=times, memory_limit="40GiB"))


def test_a_chunk_costs_what_its_parts_cost():
    """On a V rank 0 has the embedding and the head; alone in a line they are on different ranks. The slower replica counts."""
    slow = replace(A, layers={True: replace(LAYER, t_f=5.0)})
    settings = auto_config(chunks=2, stage_layers=[1, 0, 2, 1])
    found = decide(settings, [(0, A), (1, A), (0, slow)])
    problem = found.problem
    ranks = problem.placement.ranks
    assert ranks in ((0, 1, 1, 0), (0, 1, 0, 1))
    layer = [5.0 if rank == 0 else 3.0 for rank in ranks]
    wanted = [0.1 + layer[0], 0.0, 2 * layer[2], layer[3] + 1.0]
    assert problem.t_f == pytest.approx(tuple(wanted)) and problem.t_comm == 0.2
    assert problem.t_w == pytest.approx((2.0, 0.0, 4.0, 3.0)) and problem.objective == "makespan"
    linear = decide(auto_config(chunks=1), [(0, A), (1, A)]).problem
    assert linear.t_f == pytest.approx((6.1, 7.0)) and linear.m_b == pytest.approx((220.0, 260.0))


def test_high_precision_layers_cost_their_own():
    mixed = replace(A, layers={True: LAYER, False: replace(LAYER, t_f=7.0)})
    settings = config(
        parallel__pp=2,
        precision__fp8__high_precision_last=1,
        pipeline={"schedule": "auto", "microbatches": 4, "chunks": 1},
    )
    assert decide(settings, [(0, mixed), (1, mixed)]).problem.t_f == pytest.approx((6.1, 3.0 + 7.0 + 1.0))


@pytest.mark.parametrize("limit", ["1", "1.5", "300B"])
def test_the_limit_is_kept(limit):
    """In multiples of what the placement's fullest rank holds of one microbatch, or in bytes; without it nothing is slower."""
    found = decide(auto_config(m=5, memory_limit=limit), [(0, A), (1, A)])
    problem = found.problem
    fullest = max(sum(problem.m_b[c] for c in problem.placement.chunks(rank)) for rank in range(2))
    most = 300.0 if limit == "300B" else float(limit) * fullest
    peaks = peak_activations(found.plan.actions, problem.m_b, problem.m_w)
    assert max(peaks) <= most * (1 + 1e-9) and problem.limit == (most, most)
    assert decide(auto_config(m=5), [(0, A), (1, A)]).cost <= found.cost * (1 + 1e-9)


def test_an_impossible_limit_is_one_clear_error():
    with pytest.raises(UsageError, match=r"100B is below one microbatch, which holds 260 B on the fullest rank: raise it") as e:
        decide(auto_config(memory_limit="100B"), [(0, A), (1, A)])
    assert e.value.exit_code == 2
    with pytest.raises(UsageError, match="no placement with pipeline.chunks 2"):
        decide(auto_config(pp=1, chunks=2), [(0, A)])


def test_what_is_said():
    """What was measured, what was chosen, the predicted bubble, the distance from the bound."""
    settings = auto_config(memory_limit="2")
    said = "\n".join(explain(settings, decide(settings, [(0, A), (1, A)])))
    for part in ("measured: ", " ms; message 200 ms", "M_B, M_W per rank", "limit 2", "chose ", "predicted bubble 0."):
        assert part in said
    assert "above the lower bound" in said
    assert "1f1b +" in said


# ---- one plan on all ranks -----------------------------------------------------------------------------------------


def chosen(settings: Config, profiles: list[Profile], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every rank's plan; rank r measures ``profiles[r]``."""
    world = len(profiles)
    threads, said = Threads(world), []
    by_thread: dict[int, Profile] = {}
    monkeypatch.setattr(auto_plan, "profile", lambda config, batch: by_thread[threading.get_ident()])
    monkeypatch.setattr(auto_plan, "message_seconds", lambda config, mesh: 0.2)

    def call(comm: Any) -> Any:
        by_thread[threading.get_ident()] = profiles[comm.rank]
        mesh = Mesh({"pp": settings.parallel.pp, "dp": settings.parallel.dp}, comm.rank)
        return choose_plan(settings, mesh, comm, lambda: batch(0), said.append)

    plans = threads.each(call)
    assert not said or said[0].startswith("auto: T_F")
    return plans


def test_one_rank_computes_all_have_it(monkeypatch):
    plans = chosen(auto_config(memory_limit="2"), [A, B], monkeypatch)
    assert plans[0] == plans[1] and plans[0].schedule == "auto"
    assert plans[0].text() == decide(auto_config(memory_limit="2"), [(0, A), (1, B)]).plan.text()
    other = chosen(auto_config(memory_limit="2"), [B, B], monkeypatch)
    assert other[0].fingerprint() != plans[0].fingerprint()  # the measurements do decide


def test_an_impossible_limit_is_told_to_all(monkeypatch):
    for error in chosen(auto_config(memory_limit="100B"), [A, A], monkeypatch):
        assert isinstance(error, UsageError) and "below one microbatch" in str(error)


def test_another_plan_on_one_rank_is_an_error_on_all(monkeypatch):
    """A fault in what one rank was given: plan, or layers per chunk; both hashes and the ranks are named."""
    plans = [decide(auto_config(), [(0, A), (1, A)]).plan, auto(2, 4, 1.0, 1.0, 1.0, shapes=("linear",)).plan]
    assert plans[0].fingerprint() != plans[1].fingerprint()
    same = auto_config()
    assert Threads(3).each(lambda comm: agree_on_plan(same, plans[0], comm)) == [None] * 3
    for errors in (
        Threads(3).each(lambda comm: agree_on_plan(same, plans[comm.rank == 1], comm)),
        Threads(3).each(
            lambda comm: agree_on_plan(
                config(parallel__pp=2, pipeline__stage_layers=[3, 1] if comm.rank == 1 else [2, 2]),
                auto(2, 4, 1.0, 1.0, 1.0, shapes=("linear",)).plan,
                comm,
            )
        ),
    ):
        assert len({str(error) for error in errors}) == 1 and all(isinstance(error, PlanError) for error in errors)
        text = str(errors[0])
        assert "ranks 0, 2: " in text and "rank 1: " in text and "same configuration" in text
        hashes = [word.rstrip(".;") for word in text.split() if len(word.rstrip(".;")) == 64]
        assert len(set(hashes)) == 2


def test_slots_count_too(monkeypatch):
    """The same actions over other slots are another plan."""
    plan = decide(auto_config(), [(0, A), (1, A)]).plan
    other = Plan.from_json(plan.to_json())
    index = dict(other.slots[0].i_slots.index)
    (first, a), (second, b) = list(index.items())[:2]
    swapped = replace(other.slots[0].i_slots, index={**index, first: b + 1, second: a})
    object.__setattr__(other, "slots", (replace(other.slots[0], i_slots=swapped), *other.slots[1:]))
    assert other.text() == plan.text()
    errors = Threads(2).each(lambda comm: agree_on_plan(auto_config(), other if comm.rank else plan, comm))
    assert all(isinstance(error, PlanError) for error in errors)


def test_resumed_with_the_saved_plan_bit_for_bit():
    """Whatever would be measured now: the same pipeline section and ranks give the saved plan; others give none."""
    settings = auto_config()
    plan = decide(settings, [(0, A), (1, A)]).plan
    meta = {"config": settings.to_dict(), "layout": {"pp": 2, "dp": 1}, "plan": plan.to_json()}
    saved: Any = SimpleNamespace(meta=meta)
    assert plan_of(saved, Mesh({"pp": 2}), settings).text() == plan.text()
    assert plan_of(saved, Mesh({"pp": 2, "dp": 2}), auto_config()).text() == plan.text()
    del meta["config"]["pipeline"]["costs"]  # a checkpoint from before the key
    assert plan_of(saved, Mesh({"pp": 2}), settings).text() == plan.text()
    assert plan_of(saved, Mesh({"pp": 3}), auto_config(pp=3)) is None
    assert plan_of(saved, Mesh({"pp": 2}), auto_config(memory_limit="2")) is None
    assert plan_of(None, Mesh({"pp": 2}), settings) is None


# ---- the profile, and training -------------------------------------------------------------------------------------


def test_the_profile_leaves_no_trace():
    """The layers of both precisions are timed by themselves; generators stay; the run is the one without it."""
    settings = config(precision__fp8__high_precision_first=1, model__dropout=0.1)
    before = torch.get_rng_state()
    found: list[Profile] = []

    def between(assembly: Any, step: int) -> None:
        if step == 0:
            found.append(profile(settings, batch(3)))

    run, plain = train(settings, 3, between=between), train(settings, 3)
    assert_moved(plain)
    assert run.losses == plain.losses and differing(run.tensors, plain.tensors) == []
    assert torch.equal(torch.get_rng_state(), before)
    one = found[0]
    assert set(one.layers) == {True, False}
    for part in (one.embedding, *one.layers.values(), one.head):
        assert part.t_f > 0 and part.t_i > 0 and part.t_w > 0 and 0 <= part.m_w <= part.m_b and part.m_b > 0
    assert one.layers[True].m_w < one.layers[False].m_w  # a quarter of the bytes for W, and inverse scales
    assert one.layers[True].t_f > one.embedding.t_f


def test_sizes_do_not_depend_on_the_data():
    settings = config(graphs__backend="eager")
    real, made_up = profile(settings, batch(3)), profile(settings, made_up_batch(settings))
    assert (real.layers[True].m_b, real.head.m_w) == (made_up.layers[True].m_b, made_up.head.m_w)


def test_window_step_gives_the_same_bits_whatever_the_plan(monkeypatch):
    """No timing decides numerics: plans from other costs and limits, on other placements, train to one process's bits."""
    reference = train(config(model__dropout=0.1), 3)
    assert_moved(reference)
    seen = set()
    for keys, one in (({"memory_limit": "1"}, A), ({"chunks": 2}, B), ({"chunks": 1, "memory_limit": "3"}, B)):
        settings = config(parallel__pp=2, model__dropout=0.1, pipeline={"schedule": "auto", "microbatches": 4, **keys})
        plan = decide(settings, [(0, one), (1, one)]).plan
        seen.add(plan.fingerprint())
        monkeypatch.setattr("qeffect_lm.app.assemble.make_plan", lambda config, plan=plan: plan)
        ranks = Ranks(settings, monkeypatch)
        ranks.prepare(batch(0))
        losses = [{float(result.loss) for result in ranks.step(step, batch(step))} for step in range(3)]
        assert losses == [{loss} for loss in reference.losses]
        state = merged([dict(train_tensors(part)) for part in ranks.parts])
        assert differing(state, reference.tensors) == []
    assert len(seen) == 3


def train_tensors(assembly: Any) -> dict[str, torch.Tensor]:
    items = ((item.name, item.tensor) for item in assembly.logical_tensors())
    return {n: (t.view(torch.uint8) if t.dtype.itemsize == 1 else t).clone() for n, t in items}


def test_window_microbatch_runs_captured_as_eager(monkeypatch):
    """On a V, with a commit after each F and I: the saved plan gives the same bits from graphs."""
    results = []
    for backend in ("eager", "host_replay"):
        settings = config(
            parallel__pp=2,
            graphs__backend=backend,
            precision__fp8__window="microbatch",
            pipeline={"schedule": "auto", "microbatches": 2, "chunks": 2},
        )
        plan = decide(settings, [(0, A), (1, A)]).plan
        assert plan.window == "microbatch"
        monkeypatch.setattr("qeffect_lm.app.assemble.make_plan", lambda config, plan=plan: plan)
        ranks = Ranks(settings, monkeypatch)
        ranks.prepare(batch(0, 2))
        losses = [float(ranks.step(step, batch(step, 2))[0].loss) for step in range(2)]
        results.append((losses, merged([train_tensors(part) for part in ranks.parts])))
    assert results[0][0] == results[1][0] and differing(results[0][1], results[1][1]) == []
