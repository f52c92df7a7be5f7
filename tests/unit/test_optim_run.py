"""Optimizers and guards in training: placements, replicas, the two graph backends, skipped spikes, resumes, configuration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from models import build_model
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.app.optimizer import decays
from qeffect_lm.errors import UsageError
from qeffect_lm.optim.spikes import LOSS, NORM
from qeffect_lm.runtime.loop import NonFiniteError, Parts
from qeffect_lm.runtime.loop import train as loop
from tests.runs import CONFIG, assert_same_run, checkpoint_of, metrics_of, run_here, write_config
from tests.tiny import assert_moved, batch, config, differing, local_plan, merged, train
from tests.unit.engine_support import make, part, step, tensors
from tests.unit.in_process import Ranks

MUON = {"optim__name": "muon", "optim__moments": "bfloat16"}
GATE = {"optim__skip_sigma": 4.0, "optim__skip_warmup": 2}
STATE = ("master/", "param/", "moment", "scale/", "history/", "optimizer/", "cache/")


# ---- parity ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_muon_does_not_depend_on_placement_or_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk; two chunks on a rank; two ranks; the whole step as one graph: the same bytes, and not AdamW's."""
    one = train(config(**MUON), 4)
    assert_moved(one)
    two = train(config(**MUON), 4, plan=local_plan(2, 4))
    whole = train(config(**MUON, graphs__backend="host_replay", graphs__scope="step"), 4)
    for other in (two, whole):
        assert other.losses == one.losses and other.norms == one.norms
        assert differing(one.tensors, other.tensors) == []
    ranks = Ranks(config(**MUON, parallel__pp=2), monkeypatch)
    ranks.prepare(batch(0))
    losses = [float(ranks.step(number, batch(number))[0].loss) for number in range(4)]
    assert losses == one.losses and differing(merged([tensors(p) for p in ranks.parts]), one.tensors) == []
    plain = train(config(optim__moments="bfloat16"), 4)
    assert plain.losses[0] == one.losses[0] and plain.losses[1:] != one.losses[1:]
    matrices = {name for name, spec in spec_of(one.assembly).items() if spec.matrices}
    assert len(matrices) == 16 and matrices == one.assembly.optimizer.muon.names  # type: ignore[union-attr]


def spec_of(assembly: Assembly) -> dict[str, Any]:
    return {spec.name: spec for spec in assembly.model.parameters()}


@pytest.mark.parametrize("change", [{"optim__moments": "bfloat16"}, {"optim__backend": "torch"}, MUON])
def test_the_whole_step_as_one_graph_equals_eager(change: dict[str, Any]) -> None:
    eager = train(config(**change, **GATE, model__num_layers=2), 5)
    taped = train(config(**change, **GATE, model__num_layers=2, graphs__backend="host_replay", graphs__scope="step"), 5)
    assert eager.losses == taped.losses and eager.skipped == taped.skipped and len(set(eager.losses)) == 5
    assert differing(eager.tensors, taped.tensors) == []


# ---- spikes ------------------------------------------------------------------------------------------------


def expect_less(assembly: Assembly) -> None:
    """Make the next step a spike in both series."""
    gate = assembly.gate
    assert gate is not None
    gate.count.fill_(50)
    gate.mean.sub_(1.0)
    gate.variance.fill_(0.0)


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_a_spike_is_skipped_as_what_is_not_finite(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes in all state, scales, histories and counters; then both go on alike, the rate not advanced."""
    spiked, infinite = (make(backend, **GATE) for _ in range(2))
    for number in range(2):
        assert step(spiked, number) == step(infinite, number)
    before = part(tensors(spiked), *STATE)
    expect_less(spiked)
    reduce = infinite.engine.end.reduce_

    def poisoned() -> None:
        infinite.flat.grad("head.weight")[0, 0] = float("inf")
        reduce()

    monkeypatch.setattr(infinite.engine.end, "reduce_", poisoned)
    results = []
    for assembly in (spiked, infinite):
        result = assembly.engine.step(2, batch(2))
        results.append((bool(result.skipped), int(result.reason), float(result.lr)))
    monkeypatch.undo()
    assert results[0][:2] == (True, LOSS | NORM) and results[1][:2] == (True, 1) and results[0][2] == results[1][2]
    states = [{n: t for n, t in tensors(a).items() if not n.startswith("spikes/")} for a in (spiked, infinite)]
    assert differing(*states) == [] and differing(part(states[0], *STATE), before) == []
    assert spiked.ledger.state() == infinite.ledger.state()
    assert int(spiked.gate.count) == 51 and int(infinite.gate.count) == 2  # type: ignore[union-attr]
    for assembly in (spiked, infinite):
        assembly.gate.count.zero_()  # type: ignore[union-attr]
    assert step(spiked, 3) == step(infinite, 3) and not step(spiked, 4)[2]


@pytest.mark.long
@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_all_ranks_decide_alike(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, two replicas: one verdict, one reason, the same statistics, over steps of which some are spikes."""
    ranks = Ranks(config(**{f"parallel__{axis}": 2}, optim__skip_sigma=0.5, optim__skip_warmup=2), monkeypatch)
    ranks.prepare(batch(0))
    reasons = []
    for number in range(6):
        results = ranks.step(number, batch(number))
        assert len({int(result.reason) for result in results}) == len({bool(r.skipped) for r in results}) == 1
        reasons.append(int(results[0].reason))
        one, other = (part(tensors(p), "spikes/", "optimizer/") for p in ranks.parts)
        assert len(one) == 4 and differing(one, other) == []
    assert 0 < sum(map(bool, reasons)) < 6


def reports(assembly: Assembly, settings: Any) -> list[Any]:
    batches, metrics = iter(range(9)), []
    parts = Parts(
        next_batch=lambda: batch(next(batches)),
        step=assembly.engine.step,
        evaluate=lambda: None,
        save=lambda step, tokens: None,
        epoch=lambda: None,
        stop=lambda: None,
        report=metrics.append,
    )
    loop(settings, parts, 0, 0)
    return metrics


@pytest.mark.long
def test_metrics_say_why_and_a_spike_never_stops_the_run() -> None:
    """``optim.nonfinite=raise`` is about what is not finite only."""
    settings = config(**GATE, model__num_layers=2, optim__nonfinite="raise", train__steps=2)
    assembly = assemble(settings)
    assembly.prepare(batch(0))
    expect_less(assembly)
    assembly.gate.mean.copy_(torch.tensor([0.0, 50.0]))  # type: ignore[union-attr]
    metrics = reports(assembly, settings)
    assert metrics[0].skipped and metrics[0].extra["skip_reason"] == "spike of the loss"
    assert '"skip_reason": "spike of the loss"' in metrics[0].to_json()
    assembly = assemble(settings)
    assembly.prepare(batch(0))
    assert all("skip_reason" not in metrics.extra and not metrics.skipped for metrics in reports(assembly, settings))
    assembly.flat.param("layers.0.mlp_norm.weight")[0] = float("nan")
    with pytest.raises(NonFiniteError, match="not finite"):
        reports(assembly, settings)


# ---- weight decay ------------------------------------------------------------------------------------------


def test_what_decays() -> None:
    """Matrices always, norms never, the embedding as configured; in the flat storage's segments too."""
    for embedding in (True, False):
        settings = config(optim__decay_embedding=embedding)
        assembly = assemble(settings)
        for spec in assembly.model.parameters():
            wanted = len(spec.shape) == 2 and (embedding or spec.name != "embedding.weight")
            assert decays(settings, spec) is wanted, spec.name
            assert assembly.flat.entry(spec.name).segment == ("decay" if wanted else "no_decay")


def test_decay_moves_what_decays_only() -> None:
    """With gradients of zero."""
    assembly = assemble(config(optim__decay_embedding=False, optim__weight_decay=0.5))
    before = {name: assembly.flat.master(name).clone() for name in assembly.flat.names}
    assembly.flat.grad_buffer.zero_()
    assembly.optimizer.step_(torch.zeros((), dtype=torch.float64), torch.tensor(True))
    moved = {name for name, value in before.items() if not torch.equal(value, assembly.flat.master(name))}
    assert moved == {name for name, value in before.items() if value.ndim == 2 and name != "embedding.weight"}


def test_row_blocks_are_the_heads_of_attention() -> None:
    """q, k, v of the fused weight's grouped rows: two KV heads of (2 q, 1 k, 1 v) heads, 8 rows each."""
    settings = config()
    model = build_model(settings, None, torch.float32)
    specs = {spec.name: spec for spec in model.parameters()}
    assert specs["layers.0.attention.qkv.weight"].matrices == ((2, 0, 16), (2, 16, 24), (2, 24, 32))
    assert specs["layers.0.mlp.gate_up.weight"].matrices == ((1, 0, 48), (1, 48, 96))
    assert not any(specs[name].matrices for name in ("embedding.weight", "head.weight", "final_norm.weight"))


# ---- runs --------------------------------------------------------------------------------------------------

OPTIONS = "optim: {lr: 1.0e-2, warmup_steps: 2, name: muon, moments: bfloat16, skip_sigma: 4.0, skip_warmup: 2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``: 6 steps of Muon with narrow moments and a gate, checkpoints at 3 and 6."""
    path = tmp_path_factory.mktemp("runs")
    text = CONFIG.replace("optim: {lr: 1.0e-2, warmup_steps: 2}", OPTIONS).replace("{steps: 12}", "{steps: 6}")
    assert text.count("muon") == 1
    write_config(path, text.replace("num_layers: 4", "num_layers: 2"))
    assert run_here(path, "whole")[0] == 0
    return path


def since_3(folder: Path, name: str) -> None:
    """A copy of ``whole`` that was killed after step 3."""
    shutil.copytree(folder / "whole", folder / name)
    shutil.rmtree(folder / name / "checkpoints/step_00000006")


def test_a_resumed_run_is_the_same_run(folder: Path) -> None:
    since_3(folder, "again")
    code, said = run_here(folder, "again")
    assert code == 0 and "resumed at 3, ran 4…6 of 6" in said
    assert assert_same_run(folder, "whole", "again") > 40
    saved = checkpoint_of(folder, "whole").manifest.tensors
    assert saved["moment1/head.weight"].dtype == "bfloat16" and saved["spikes/variance"].role.value == "statistic"


@pytest.mark.long
@pytest.mark.parametrize("change", ["optim.moments=float32", "optim.name=adamw"])
def test_state_of_another_kind_is_refused(folder: Path, change: str) -> None:
    with pytest.raises(UsageError, match=rf"{change.split('=')[0]}.*(\n.*)*set them back, or start a new run"):
        run_here(folder, "whole", change, "train.steps=7")


@pytest.mark.long
def test_the_gate_may_be_turned_off_and_on(folder: Path) -> None:
    """Off: the statistics are left behind. On again: they begin anew. Each change is printed; the rest goes on."""
    shutil.copytree(folder / "whole", folder / "switch")
    code, said = run_here(folder, "switch", "optim.skip_sigma=null", "train.steps=7")
    assert code == 0 and any("optim.skip_sigma" in line for line in said)
    assert not any(name.startswith("spikes/") for name in checkpoint_of(folder, "switch").manifest.tensors)
    assert run_here(folder, "switch", "train.steps=8")[0] == 0
    checkpoint = checkpoint_of(folder, "switch")
    assert checkpoint.step == 8 and int(checkpoint.read("spikes/count", (), ())) == 1


@pytest.mark.long
def test_a_spike_of_a_run_is_in_its_metrics(folder: Path) -> None:
    """A limit so low that some step exceeds it."""
    assert run_here(folder, "low", "optim.skip_sigma=0.001", "checkpoint.every=0", "train.steps=9")[0] == 0
    rows = metrics_of(folder, "low")
    assert any(row.skipped for row in rows)
    assert all(("spike" in str(row.extra.get("skip_reason"))) is row.skipped for row in rows)


# ---- configuration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim__backend": "te"}, "optim.backend te needs a GPU, run.device is cpu"),
        ({"optim__backend": "apex", "precision__dtype": "float64"}, "takes float32 masters, not float64"),
        ({"optim__moments": "bfloat16", "optim__backend": "torch"}, "keeps float32 moments: set optim.moments=float32"),
        ({"optim__moments": "bfloat16", "optim__beta2": 0.999}, r"optim.beta2 0.999 with optim.moments bfloat16: .*0.99609375"),
        ({"optim__moments": "bfloat16", "optim__beta1": 0.998}, "optim.beta1 0.998"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**change)


def test_a_bfloat16_at_the_bound_decays_and_beyond_it_does_not() -> None:
    """The bound of the check: every bfloat16 of a binade times 1 - 2^-8 rounds to a smaller one; times 0.999 most do not."""
    values = torch.arange(128, 256, dtype=torch.float32).div(128).bfloat16()
    assert ((values.float() * (1 - 2**-8)).bfloat16() < values).all()
    assert ((values.float() * 0.999).bfloat16() == values).float().mean() > 0.9
