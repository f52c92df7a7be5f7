"""Mixture of experts in whole steps: idle experts (case S2), every schedule, replicas, what a step reports, resumed runs."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import SingleProcess, open_checkpoint
from checkpoint.record import read_record
from checkpoint.resume import restore
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.inference import _unseen, load_for_inference
from qeffect_lm.app.replay import replay
from qeffect_lm.config import Config
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.grouped import Groups, RoleRows, amax_of_groups, group_scales, merge_amax
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.graphs.recorder import Recorder
from qeffect_lm.graphs.register import Rule
from qeffect_lm.layers.moe import bind_experts, mixtures
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.launch import LaunchEnv
from qeffect_lm.runtime.routing import routing_metrics
from tests.resharding import Anywhere, save
from tests.runs import CONFIG, assert_same_run, checkpoint_of, metrics_of, run_here, write_config
from tests.tiny import Batch, batch, config, differing, local_plan, logits_of, merged, same_bits, train
from tests.unit.engine_support import tensors
from tests.unit.in_process import Ranks
from tools.replay import told, verdict

EXPERTS = 6
ASLEEP, AWAKE = (4, 5), (0, 1)  # who is idle, while 4 and 5 sleep and after they woke up


def settings(**keys: Any) -> dict[str, Any]:
    moe = {"num_experts": EXPERTS, "aux_loss_coef": 0.0}
    base = {"model__family": "mixtral", "model__moe": moe, "model__num_layers": 2, "pipeline__microbatches": 2}
    return {**base, **keys}


def two(step: int) -> Batch:
    return batch(step, microbatches=2)


def finished(assembly: Assembly) -> None:
    """Writes from outside and the engine's work are on different streams of a GPU; nothing but this orders them."""
    if assembly.config.run.device == "cuda":
        torch.cuda.synchronize()


def route(assembly: Assembly, idle: tuple[int, ...]) -> None:
    """Routers that never choose ``idle``: of each of two opposite pairs one logit is positive, and the idle ones' are 0."""
    pairs = [e for e in range(EXPERTS) if e not in idle]
    flat = assembly.flat
    for name in flat.names:
        if name.endswith("router.weight"):
            hidden = flat.master(name).shape[1]
            rows = torch.randn(2, hidden, generator=torch.Generator().manual_seed(len(name)))
            master = torch.zeros(EXPERTS, hidden)
            for pair, row in enumerate(rows):
                master[pairs[2 * pair]], master[pairs[2 * pair + 1]] = row, -row
            flat.master(name).copy_(master)
    flat.gather()
    finished(assembly)


def scales_of(assembly: Assembly, experts: tuple[int, ...], kinds: tuple[str, ...] = ("input", "grad_output")) -> Any:
    """Scale, history and open amax of the experts' rows."""
    line = assembly.timeline
    names = [role.name for role in line.roles if any(f".experts.{e}." in role.name for e in experts)]
    rows = [line.index[name] for name in names if name.endswith(kinds)]
    assert rows
    return line.scale[rows].clone(), line.history[rows].clone(), line.open_amax[rows].clone()


STEPS = [ASLEEP, ASLEEP, AWAKE, ASLEEP, ASLEEP]  # who is idle in each step


def sleepers(assembly: Assembly, step: Callable[[int], Any], checked: bool = False) -> list[float]:
    """Five steps: experts 4 and 5 sleep, sleep, work, sleep, sleep."""
    losses = []
    for number, idle in enumerate(STEPS):
        route(assembly, idle)
        if checked:
            assembly.flat.grad_buffer.fill_(7.0)
            before = scales_of(assembly, idle), scales_of(assembly, ASLEEP, ("weight",))
            finished(assembly)
        result = step(number)
        losses.append(float(result.loss))
        if checked:
            finished(assembly)
            after = scales_of(assembly, idle), scales_of(assembly, ASLEEP, ("weight",))
            assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)), "nothing of an idle one moves"
            assert bool((after[0][2] == EMPTY).all()) and not torch.equal(before[1][1], after[1][1]), "weights are never idle"
            assert bool(result.routing[:, [2 + e for e in idle]].eq(0).all())
            for e in idle:
                for kind in ("gate_up", "down"):
                    assert not assembly.flat.grad(f"layers.0.moe.experts.{e}.{kind}.weight").view(torch.int32).any()
    return losses


def slept(plan: Any = None, **keys: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    assembly = assemble(config(**settings(**keys)), plan=plan)
    route(assembly, ASLEEP)
    assembly.prepare(two(0))
    return sleepers(assembly, lambda n: assembly.engine.step(n, two(n))), tensors(assembly)


@pytest.fixture(scope="module")
def eager() -> tuple[list[float], dict[str, torch.Tensor]]:
    """S2. Calibration finds no amax of experts that sleep: they keep scale 1 and an empty history, window after window, and
    take current scaling once they work; what they had then stays while they sleep again."""
    assembly = assemble(config(**settings()))
    route(assembly, ASLEEP)
    assembly.prepare(two(0))
    scale, history, _ = scales_of(assembly, ASLEEP)
    assert bool((scale == 1).all()) and not history.any(), "calibration saw nothing of them"
    losses = sleepers(assembly, lambda n: assembly.engine.step(n, two(n)), checked=True)
    scale, history, _ = scales_of(assembly, ASLEEP)
    assert bool((scale != 1).all()) and bool((history[:, 0] > 0).all()) and not history[:, 1:].any(), "one window of work"
    assert len(set(losses)) == len(STEPS)
    return losses, tensors(assembly)


@pytest.mark.parametrize(
    "keys",
    [
        {"graphs__backend": "host_replay"},
        {"graphs": {"backend": "host_replay", "scope": "step"}},
        {"model__recompute": "full", "graphs__backend": "host_replay"},
        {"plan": local_plan(2, 2)},
        pytest.param({"contract__poison": True}, marks=pytest.mark.long),
    ],
    ids=["actions as graphs", "a step as a graph", "recompute", "two chunks", "poison"],
)
def test_idle_experts_captured_and_in_chunks(eager, keys) -> None:
    """A graph is captured while they sleep, and serves every routing; the bits of eager work."""
    losses, state = slept(**keys)
    assert losses == eager[0] and differing(state, eager[1]) == []


@pytest.mark.parametrize(
    "schedule", ["zb-v", *(pytest.param(name, marks=pytest.mark.long) for name in
                           ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "dualpipev"))],
)  # fmt: skip
def test_idle_experts_over_two_stages(eager, schedule, monkeypatch) -> None:
    """Every schedule: the bits of one process, and every rank has the routing of all stages."""
    chunks = 2 if schedule in ("zb-v", "interleaved-1f1b", "dualpipev") else None
    layers = {"pipeline__stage_layers": [1, 0, 1, 0]} if chunks else {}
    keys = {"parallel__pp": 2, "pipeline__schedule": schedule, "pipeline__chunks": chunks, "pipeline__w_delay": 0, **layers}
    ranks = Ranks(config(**settings(**keys, graphs__backend="host_replay")), monkeypatch)
    for part in ranks.parts:
        route(part, ASLEEP)
    ranks.prepare(two(0))
    for number, idle in enumerate(STEPS):
        for part in ranks.parts:
            route(part, idle)
        results = ranks.step(number, two(number))
        assert {float(result.loss) for result in results} == {eager[0][number]}
        assert all(torch.equal(result.routing, results[0].routing) for result in results)
        assert bool((results[0].routing[:, 2:].sum(dim=1) == 2 * 64).all()), "every token of every layer, twice"
    assert differing(merged([tensors(part) for part in ranks.parts]), eager[1]) == []


def save_asleep(one: Assembly, folder: Path) -> None:
    """After two steps in which two experts sleep and have never worked."""
    route(one, ASLEEP)
    one.prepare(two(0))
    for number in range(2):
        route(one, STEPS[number])
        one.engine.step(number, two(number))
    save(one, folder, 2, SingleProcess(), Mesh({}))


def restored(other: Assembly, folder: Path) -> None:
    """To where :func:`save_asleep` saved."""
    mesh = Mesh({})
    restore(open_checkpoint(folder / "step_00000002"), other, Anywhere(), SingleProcess(), mesh.coords, dict(mesh.sizes))


def test_idle_experts_resume(eager, tmp_path: Path) -> None:
    """Saved while they sleep and have never worked; new objects, captured, go on bit for bit."""
    one = assemble(config(**settings(graphs__backend="host_replay")))
    save_asleep(one, tmp_path)
    other = assemble(config(**settings(graphs__backend="host_replay")))
    restored(other, tmp_path)
    assert differing(tensors(other), tensors(one)) == []
    losses = []
    for number in range(2, len(STEPS)):
        route(other, STEPS[number])
        losses.append(float(other.engine.step(number, two(number)).loss))
    assert losses == eager[0][2:] and differing(tensors(other), eager[1]) == []


def test_a_first_amax_is_current() -> None:
    """Of two experts one has a history: its scale; the other's rows are scaled by themselves until theirs is rolled in, in both
    windows, and in evaluation, which reports nothing. An expert without rows has scale 1 and an EMPTY slot."""
    x = torch.tensor([[1.0, -3.0], [2.0, 0.5], [4.0, 7.0]])
    groups = Groups(torch.tensor([0, 1, 3, 3], dtype=torch.int32), torch.tensor([0, 1, 1]))
    names = ["a", "b", "c"]
    for window in ("step", "microbatch"):
        recipe = DelayedScaling()
        line = ScaleTimeline([role for name in names for role in recipe.roles(name)], window=window, history=3)
        recipe.bind(line)
        line.history_of("a.input")[1] = 5.0
        line.scale_of("a.input").fill_(20.0)
        got = group_scales(recipe, names, "input", amax_of_groups(x, groups), None)
        assert got.scale.tolist() == [20.0, 448 / 7, 1.0] and bool((line.open_amax == EMPTY).all())
        merge_amax(recipe, names, "input", amax_of_groups(x, groups))
        assert [float(line.slot_of(f"{name}.input")) for name in names] == [3.0, 7.0, EMPTY]
    spoilt = x.clone()
    spoilt[2, 1] = float("nan")
    assert amax_of_groups(spoilt, groups)[1].isnan(), "not lost"


def bound(monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Assembly:
    """Captured, with the tables that kernels read; nothing reads them here."""
    everywhere = lambda chunks, device, native: [bind_experts(chunk) for chunk in chunks]  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("qeffect_lm.app.assemble._bind_libraries", everywhere)
        return assemble(config(**settings(graphs__backend="host_replay", **keys)))


def test_graphs_and_resumed_runs_find_the_rows_of_roles(eager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel finds scales by is constant, and that of the timeline whose tensors the graphs read: a resumed run loads
    those in place, and its own order of roles is its own; a replaced tensor is an error before the next step."""
    one = bound(monkeypatch)
    save_asleep(one, tmp_path)
    other = bound(monkeypatch)
    line = other.timeline
    before = {name: getattr(line, name).data_ptr() for name in ("scale", "history", "open_amax")}
    restored(other, tmp_path)
    assert before == {name: getattr(line, name).data_ptr() for name in before}
    rules = {entry.tensor.data_ptr(): entry.rule for entry in other.register.entries}
    for moe in mixtures(other.engine.stages[0].chunk):
        for layer, kind in itertools.product((moe.gate_up, moe.down), ("input", "grad_output")):
            table = getattr(layer, f"{kind}_roles_table")
            assert [line.roles[row].name for row in table.tolist()] == [f"{name}.{kind}" for name in layer.names]
            assert rules[table.data_ptr()] is Rule.CONSTANT
    route(other, STEPS[2])
    assert float(other.engine.step(2, two(2)).loss) == eager[0][2]
    line.history = line.history.clone()
    with pytest.raises(CaptureError, match="timeline/history"):
        other.engine.step(3, two(3))


def test_a_capture_refuses_rows_that_were_bound_after_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the tables of the register, or there is none."""
    from tests.unit.test_kernels_scales import nothing_runs

    assembly = bound(monkeypatch)
    chunk = assembly.engine.stages[0].chunk
    layer = mixtures(chunk)[0].down

    def captured() -> list[str]:
        recorder = Recording("F", assembly.register, ())
        with nothing_runs(monkeypatch), monkeypatch.context() as patch, recorder:
            patch.setattr("qeffect_lm.kernels.usable", lambda tensor: True)
            rows = RoleRows(layer._role_rows["input"], layer.input_roles_table)
            group_scales(layer.recipe, layer.names, "input", torch.zeros(EXPERTS), None, rows)
        return recorder.lines

    (line,) = [line for line in captured() if line.startswith("group_scales")]
    assert "mlp.down.input_roles_table" in line and all(f"timeline/{name}" in line for name in ("scale", "history"))
    bind_experts(chunk)
    with pytest.raises(CaptureError, match=r"kernel group_scales .* tensor \(6,\) torch.int64 that the hidden-state register"):
        captured()


class Recording(Recorder):
    def keep(self, made: torch.Tensor) -> None:
        self.constants.append(made)


def test_generation_knows_of_experts_without_an_amax() -> None:
    """They are scaled by what lies beside a sequence: then sequences go one by one."""
    assembly = assemble(config(**settings()))
    chunk, recipe = assembly.engine.stages[0].chunk, DelayedScaling()
    recipe.bind(assembly.timeline)
    assert _unseen(chunk, recipe) and not _unseen(chunk, None)
    assembly.timeline.history.fill_(1.0)
    assert not _unseen(chunk, recipe)
    assembly.timeline.history_of("layers.1.moe.experts.3.gate_up.input").zero_()
    assert _unseen(chunk, recipe)


# ---- replicas, and what a step reports --------------------------------------------------------------------------

LOSSES = {"model__moe": {"num_experts": 4, "aux_loss_coef": 0.05, "z_loss_coef": 0.01}}


def padded(step: int, rank: int = 0, ranks: int = 1) -> Batch:
    """Two microbatches of each of two replicas, with padding; of one of them, or of both one after the other."""
    whole = batch(step, microbatches=4)
    for microbatch in range(4):
        whole.loss_mask[microbatch, :, 16 - 4 * microbatch :] = 0
    whole.tokens = int(whole.loss_mask.sum())
    if ranks == 1:
        return whole
    mine = slice(2 * rank, 2 * rank + 2)
    return Batch(whole.inputs[mine], whole.targets[mine], whole.loss_mask[mine], whole.tokens)


def test_stages_know_which_tokens_count() -> None:
    """Losses of routers on a stage without targets leave padding out too, in calibration as well: the bits of one stage."""
    body = {**LOSSES, "pipeline__microbatches": 4}
    one, two_stages, all_count = (
        train(config(**settings(**body)), 2, batches=batches, plan=plan)
        for batches, plan in ((padded, None), (padded, local_plan(2, 4)), (unmasked, None))
    )
    assert two_stages.losses == one.losses and differing(two_stages.tensors, one.tensors) == []
    assert torch.equal(two_stages.assembly.engine.end.routed, one.assembly.engine.end.routed)
    assert not torch.equal(one.assembly.engine.end.routed, all_count.assembly.engine.end.routed)


def unmasked(step: int) -> Batch:
    made = padded(step)
    made.loss_mask.fill_(1)
    return made


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas(zero, monkeypatch) -> None:
    """Two replicas in float64 are one process with all microbatches: loss, gradient norm, both losses of the routers."""
    plain = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
    one = assemble(config(**settings(**LOSSES, **plain, pipeline__microbatches=4)))
    one.prepare(padded(0))
    ranks = Ranks(config(**settings(**LOSSES, **plain), parallel__dp=2, optim__zero=zero), monkeypatch)
    ranks.each(lambda part: part.prepare(padded(0, part.mesh.coord("dp"), 2)))
    for step in range(2):
        want = one.engine.step(step, padded(step))
        got = ranks.each(lambda part, step=step: part.engine.step(step, padded(step, part.mesh.coord("dp"), 2)))
        for result in got:
            assert torch.equal(result.routing, got[0].routing)
            assert torch.allclose(result.routing, want.routing, rtol=1e-13, atol=0)
            for name in ("loss", "grad_norm"):
                assert abs(float(getattr(result, name)) / float(getattr(want, name)) - 1) < 1e-12
        assert bool((want.routing[:, 2:].sum(dim=1) == 2 * padded(step).tokens).all()), "valid tokens only"


def test_what_the_metrics_say() -> None:
    even, odd = torch.tensor([[1.0, 3.0, 5, 5]]), torch.tensor([[2.0, 5.0, 0, 8]])
    told = routing_metrics(torch.cat([even, torch.zeros(1, 4), odd]).double())  # a layer without experts between them
    assert told == {"aux_loss": 1.5, "z_loss": 4.0, "expert_load_max": 2.0, "expert_load_min": 0.0, "experts_idle": 1}
    assert routing_metrics(None) == {} and routing_metrics(torch.zeros(2, 4)) == {}


@pytest.mark.long
def test_the_losses_do_something() -> None:
    """From routers that prefer two of four experts: the load-balancing loss falls to top_k, what even loads give, and without a
    coefficient it does not."""
    ends = []
    for coefficient in (0.0, 0.1):
        moe = {"num_experts": 4, "aux_loss_coef": coefficient}
        keys = {"precision__fp8__recipe": "none", "optim__lr": 3e-3, "train__steps": 30}
        assembly = assemble(config(**settings(model__moe=moe, **keys)))
        for name in assembly.flat.names:
            if name.endswith("router.weight"):
                assembly.flat.master(name)[:2].mul_(20)
        assembly.flat.gather()
        assembly.prepare(two(0))
        ends.append([routing_metrics(assembly.engine.step(n, two(n % 2)).routing)["aux_loss"] for n in range(14)])
    assert ends[0][0] == ends[1][0] and ends[1][-1] < 2.02 and ends[0][-1] > 2.1, ends


RUN = CONFIG.replace("num_layers: 4", "num_layers: 2, family: mixtral, moe: {num_experts: 4, aux_loss_coef: 0.05}").replace(
    "steps: 12", "steps: 4"
)


def test_killed_equals_uninterrupted(tmp_path: Path) -> None:
    """New objects from the checkpoint of step 2: losses, routing and all state as if nothing had happened, and a replay of the
    step after it; the run's line and its metrics tell of experts."""
    write_config(tmp_path, RUN)
    assert run_here(tmp_path, "whole", "checkpoint.every=2")[0] == 0
    source = tmp_path / "whole" / "checkpoints" / "step_00000002"
    code, said = run_here(tmp_path, "rest", f"checkpoint.resume={source}")
    assert code == 0 and "resumed at 2, ran 3…4 of 4" in said
    rows = [metrics_of(tmp_path, name) for name in ("whole", "rest")]
    assert [(row.loss, row.extra["aux_loss"], row.extra["expert_load_max"]) for row in rows[0][2:]] == [
        (row.loss, row.extra["aux_loss"], row.extra["expert_load_max"]) for row in rows[1]
    ]
    (tmp_path / "rest" / "metrics.jsonl").write_text("".join(row.to_json() + "\n" for row in rows[0][:2] + rows[1]))
    assert assert_same_run(tmp_path, "whole", "rest") > 200
    assert any("47,520 parameters (29,088 of them active)" in line for line in said), said


    for control, first in ((None, None), ("scale", "restored state: scale/layers.0.attention.out.input")):
        done = replay(open_checkpoint(source), LaunchEnv(), [], control)
        assert done is not None
        report = verdict(Namespace(control=control), read_record(source), json.loads(json.dumps(told(done))))
        compared = {part["name"]: part["compared"] for part in report["parts"]}
        assert report["first"] == first and compared["gradients"] == 29, "tools.replay runs step 3 again"
    checkpoint = checkpoint_of(tmp_path, "rest")
    settled = Config.from_dict(checkpoint.meta["config"])
    assembly, mesh = assemble(settled), Mesh({})
    restore(checkpoint, assembly, Anywhere(), SingleProcess(), mesh.coords, dict(mesh.sizes), changed=["graphs"])
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    loaded = load_for_inference(tmp_path / "rest", device="cpu").model
    assert same_bits(loaded.logits(tokens), logits_of(assembly, tokens)), "the FP8 weights and scales of training"
    assert not loaded.alone, "every expert has had an amax"


def test_dry_run_counts_what_a_token_uses() -> None:
    page = describe(config(**settings(**LOSSES)))
    assert "parameters: 47,520 in 29 tensors, decoder layers per chunk [2]" in page
    assert "of them 29,088 take part in a token" in page
