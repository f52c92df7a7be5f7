"""Replicas that share the optimizer's state over gloo: bits of replicas that share nothing, and checkpoints between layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, GroupCommunicator, SingleProcess, compare, open_checkpoint, save_checkpoint
from checkpoint.comm import Communicator
from checkpoint.resume import check_replicas, contract_meta, restore, saved_state
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.parallel.mesh import Mesh
from tests.dist.frame import items_of, train_each, whole
from tests.helpers import run_distributed
from tests.tiny import Batch, Trained, batch, config, same_bits, train

# Vocabulary: the embedding has 2.05 blocks, so that shards cut a parameter, and inside of a row.
SHARED: dict[str, Any] = {
    "model__num_layers": 2,
    "model__vocab_size": 4201,
    "pipeline__microbatches": 2,
    "parallel__bucket_mib": 0.26,
    "precision__dtype": "bfloat16",
}
FLOAT64: dict[str, Any] = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}


def data(step: int, rank: int, ranks: int) -> Batch:
    """A replica's two microbatches, all but the first with padding; the divisor is the valid tokens of all."""
    mine = batch(10 * step + rank, 2)
    for microbatch in range(2):
        mine.loss_mask[microbatch, :, 16 - 3 * (2 * rank + microbatch) :] = 0
    mine.tokens = sum(2 * (16 - 3 * number) for number in range(2 * ranks))
    return mine


def together(step: int, ranks: int) -> Batch:
    """All replicas' microbatches, one after the other, for one process."""
    parts = [data(step, rank, ranks) for rank in range(ranks)]
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "loss_mask"))
    return Batch(*joined, parts[0].tokens)


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh(sizes, rank)
    replica = mesh.coord("dp"), mesh.size("dp")
    return train_each(
        mesh, SHARED, variants, lambda _: lambda step: data(step, *replica), lambda _: batch(99, 2), _state_and_share
    )


def _state_and_share(run: Trained) -> tuple[Any, ...]:
    """With the part of the moments that is here."""
    flat = run.assembly.flat
    return items_of(run.assembly), flat.moment1_buffer.numel() / max(1, flat.grad_buffer.numel())


def assert_equal_runs(results: list[list[Any]], count: int) -> list[dict[str, torch.Tensor]]:
    """All ranks tell the same numbers in the first ``count`` variants, which all have the same bits; returns their states."""
    for number in range(count):
        assert all(rank[number][0] == results[0][0][0] for rank in results), number
    states = [whole([rank[number][1] for rank in results]) for number in range(len(results[0]))]
    for number in range(1, count):
        assert states[number].keys() == states[0].keys()
        assert [n for n in states[0] if not same_bits(states[0][n], states[number][n])] == [], number
    assert not any(results[0][0][0][2]) and all(norm > 0 for norm in results[0][0][0][1])
    return states


def test_two_replicas() -> None:
    """G2, G4; zero 0 and 1, run to run, any bucket size: the same bits. Two replicas equal one process with all their
    microbatches, up to the order of the sums, whatever each has of valid tokens: in float64 over three steps losses and norms
    to 1e-12, masters (about 1) to 1e-9.
    """
    variants = [
        {"optim__zero": 0},
        {"optim__zero": 1},
        {"optim__zero": 1},
        {"optim__zero": 1, "parallel__bucket_mib": 64.0},
        {"optim__zero": 1, **FLOAT64},
        *({"optim__zero": zero, "precision__main_grads": "bfloat16"} for zero in (0, 1)),
    ]
    results = run_distributed(_runs, 2, {"dp": 2}, variants, timeout=240)
    states = assert_equal_runs(results, 4)
    narrow = [results[rank][number] for rank in range(2) for number in (5, 6)]
    assert all(one[0] == narrow[0][0] for one in narrow) and narrow[0][0][1] != results[0][0][0][1]
    assert [n for n in states[5] if not same_bits(states[5][n], states[6][n])] == []
    shares = [rank[1][2] for rank in results]
    assert sum(shares) == pytest.approx(1) and max(shares) < 0.75 and results[0][0][2] == 1
    settings = {**SHARED, **FLOAT64, "pipeline__microbatches": 4}
    one = train(config(**settings), 3, batches=lambda step: together(step, 2))
    (losses, norms, _, _), _, _ = results[0][4]
    assert losses == pytest.approx(one.losses, rel=1e-12) and norms == pytest.approx(one.norms, rel=1e-12)
    masters = {name: tensor for name, tensor in one.tensors.items() if name.startswith("master/")}
    worst = max(float((tensor - states[4][name]).abs().max()) for name, tensor in masters.items())
    assert 0 < worst < 1e-9


@pytest.mark.long
def test_two_replicas_of_two_stages() -> None:
    """DP 2 × PP 2, eager and captured: zero 1 has the bits of zero 0; the last stage's parameters may lie on one replica."""
    variants = [
        {"optim__zero": 0},
        {"optim__zero": 1},
        {"optim__zero": 1, "graphs__backend": "host_replay"},
        {"optim__zero": 1, "graphs__backend": "host_replay", "graphs__scope": "step"},
    ]
    results = run_distributed(_runs, 4, {"pp": 2, "dp": 2}, variants, timeout=400)
    assert_equal_runs(results, len(variants))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def _save(assembly: Assembly, folder: Path, step: int, comm: Communicator, mesh: Mesh) -> None:
    check_replicas(assembly.logical_tensors(), comm, mesh)
    contract = contract_meta(assembly, comm)
    meta = {} if contract is None else {"data": {}, "layout": dict(mesh.sizes), **contract}
    save_checkpoint(folder, step, saved_state(assembly, mesh.coords), meta, comm, mesh.coords)


def _resumed(
    folder: Path, settings: dict[str, Any], comm: Communicator, mesh: Mesh, steps: int = 0, into: Path | None = None
) -> None:
    """A new assembly from the only checkpoint in ``folder``; ``steps`` more; saved to ``into``."""
    saved = only(folder)
    assembly = assemble(config(**SHARED | settings), mesh)
    cursor: Any = SimpleNamespace(load_state=lambda state: None)
    restore(saved, assembly, cursor, comm, mesh.coords, dict(mesh.sizes), ["optim.zero"])
    for step in range(saved.step, saved.step + steps):
        assembly.engine.step(step, data(step, mesh.coord("dp"), mesh.size("dp")))
    if into is not None:
        _save(assembly, into, saved.step + steps, comm, mesh)


def only(folder: Path) -> Checkpoint:
    (path,) = folder.glob("step_*")
    return open_checkpoint(path)


def _resumes(rank: int, world: int, root: Path) -> None:
    """From one process's checkpoint: zero 1, then zero 0, then zero 1 again; and three steps in which it does not matter."""
    mesh, comm = Mesh({"dp": 2}, rank), GroupCommunicator()
    mesh.create_groups()
    two = {"parallel__dp": 2}
    _resumed(root / "one", {**two, "optim__zero": 1}, comm, mesh, into=root / "shared")
    _resumed(root / "shared", {**two, "optim__zero": 0}, comm, mesh, into=root / "alone")
    _resumed(root / "alone", {**two, "optim__zero": 1}, comm, mesh, 2, into=root / "shared-went-on")
    _resumed(root / "shared", {**two, "optim__zero": 0}, comm, mesh, 2, into=root / "alone-went-on")


@pytest.mark.long
def test_checkpoints_between_layouts(tmp_path: Path) -> None:
    """DP 1 → DP 2 with zero 1 → zero 0 → zero 1 → DP 1: each restores byte-equal logical state, and training goes on alike."""
    run = train(config(**SHARED | {"pipeline__microbatches": 4}), 2, batches=lambda step: together(step, 2))
    _save(run.assembly, tmp_path / "one", 2, SingleProcess(), Mesh({}))
    run_distributed(_resumes, 2, tmp_path, timeout=240)
    _resumed(tmp_path / "shared-went-on", {}, SingleProcess(), Mesh({}), into=tmp_path / "one-again")
    for a, b in (("one", "shared"), ("one", "alone"), ("shared-went-on", "alone-went-on"), ("shared-went-on", "one-again")):
        result = compare(only(tmp_path / a), only(tmp_path / b))
        different = (*result.only_in_a, *result.only_in_b, *(difference.name for difference in result.different))
        assert [name for name in different if not name.startswith("rng/")] == [], (a, b)
        assert len(result.equal) > 30
    moved = compare(only(tmp_path / "one"), only(tmp_path / "shared-went-on")).different
    assert {"master/embedding.weight", "moment2/final_norm.weight"} <= {difference.name for difference in moved}
    entry = only(tmp_path / "shared").manifest.tensors["master/embedding.weight"]
    assert len({part.file for part in entry.slices}) == 2 and len(entry.slices) > 2, "cut inside of a row"
    assert entry.shape == (4201, 32) and entry.dtype == "float32"
