"""Tied embeddings over gloo: embedding and head on two ranks have the bits of one process that holds both."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, GroupCommunicator, SingleProcess, open_checkpoint, save_checkpoint
from checkpoint.comm import Communicator
from checkpoint.resume import check_replicas, contract_meta, restore, saved_state
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.parallel.mesh import Mesh
from tests.dist.frame import train_each
from tests.helpers import run_distributed
from tests.tiny import Batch, Trained, assert_moved, batch, config, merged, same_bits, train

# Vocabulary: the embedding has 2.05 blocks, so that shards cut it.
TIED: dict[str, Any] = {
    "model__tie_word_embeddings": True,
    "model__vocab_size": 4201,
    "pipeline__microbatches": 2,
    "pipeline__w_delay": 0,
    "precision__dtype": "bfloat16",
    "parallel__bucket_mib": 0.26,
}
CAPTURED = {"graphs__backend": "host_replay"}
STEP = {**CAPTURED, "graphs__scope": "step"}
COPY = "param/embedding.weight"


def data(step: int, mesh: Mesh) -> Batch:
    mine = batch(10 * step + mesh.coord("dp"), 2)
    mine.tokens *= mesh.size("dp")
    return mine


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh(sizes, rank)

    def told(run: Trained) -> tuple[Any, ...]:
        check_replicas(run.assembly.logical_tensors(), GroupCommunicator(), mesh)
        flat = run.assembly.flat
        held = set(flat.names), {name: grad.numel() for name, grad in flat.tied_grad_buffers.items()}
        whole = {item.name: item.tensor for item in run.assembly.logical_tensors() if not _cut(item)}
        return {n: _bytes(t) for n, t in whole.items()}, held

    return train_each(mesh, TIED, variants, lambda _: lambda step: data(step, mesh), lambda _: data(99, mesh), told)


def _cut(item: Any) -> bool:
    return tuple(item.tensor.shape) != tuple(item.global_shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).clone()


def assert_one_process(results: list[list[Any]], number: int, settings: dict[str, Any]) -> None:
    """All ranks of a variant tell what one process tells, and hold what it holds; the copy too."""
    one = train(config(**TIED | settings), 3, batches=lambda step: data(step, Mesh({})))
    assert_moved(one)
    told = (one.losses, one.norms, one.skipped, one.assembly.evaluator.run(data(99, Mesh({}))))
    assert all(rank[number][0] == told for rank in results), settings
    state = merged([rank[number][1] for rank in results])
    assert [name for name in one.tensors if not same_bits(one.tensors[name], state[name])] == [], settings
    assert state.keys() == one.tensors.keys()


def test_two_stages() -> None:
    """One graph of the whole step on each of two ranks, transfers of gradient and parameter included."""
    small = {"model__vocab_size": 64, "model__num_layers": 2}
    assert_one_process(run_distributed(_runs, 2, {"pp": 2}, [STEP | small], timeout=240), 0, small)


@pytest.mark.long
def test_two_stages_under_all_schedules() -> None:
    """Schedules with embedding and head on two ranks and on one, eager, captured, as one graph; float32 has no copy in another
    type; bfloat16 main gradients. The last rank holds a copy and a gradient, no master and no moments."""
    variants: list[dict[str, Any]] = [
        {},
        {**CAPTURED, "pipeline__schedule": "zb-h1"},
        {"pipeline__schedule": "interleaved-1f1b"},
        {"pipeline__schedule": "zb-v", **STEP},
        {"precision__dtype": "float32", **CAPTURED},
        {"precision__main_grads": "bfloat16"},
    ]
    results = run_distributed(_runs, 2, {"pp": 2}, variants, timeout=240)
    for number, settings in enumerate(variants):
        plain = {key: value for key, value in settings.items() if key.startswith("precision")}
        assert_one_process(results, number, plain)
        together = settings.get("pipeline__schedule") == "zb-v"
        names, copies = results[0 if together else 1][number][2]
        assert copies == {"head.weight": 4201 * 32} and ("embedding.weight" in names) == together
        assert results[1 if together else 0][number][2][1] == {}
        copy = "master/embedding.weight" if settings.get("precision__dtype") == "float32" else COPY
        assert (copy in results[1][number][1]) == (not together)
        if not together:
            assert same_bits(results[0][number][1][copy], results[1][number][1][copy])
            assert not any("moment" in name and "embedding" in name for name in results[1][number][1])


@pytest.mark.long
def test_two_replicas_of_two_stages() -> None:
    """G5: DP 2 x PP 2, zero 0 and 1, eager and captured: the bits of two replicas without stages; PP 3 those of one process.
    A last stage with the final norm alone, which lies on one replica as a whole: the same bits again."""
    variants: list[dict[str, Any]] = [{"optim__zero": 0}, {"optim__zero": 1}, {"optim__zero": 1, **STEP}]
    flat = run_distributed(_runs, 2, {"dp": 2}, variants, timeout=240)
    one_sided = {"optim__zero": 1, "pipeline__stage_layers": [4, 0]}
    deep = run_distributed(_runs, 4, {"pp": 2, "dp": 2}, [*variants, one_sided], timeout=400)
    told = flat[0][0][0][:3]  # each replica evaluates data of its own
    state = flat[0][0][1]
    for results in (flat, deep):
        for rank in results:
            for number in range(len(rank)):
                assert rank[number][0][:3] == told, number
                found = rank[number][1]
                assert [name for name in found if not same_bits(found[name], state[name])] == [], number
    assert sorted("moment1/final_norm.weight" in deep[rank][3][1] for rank in (2, 3)) == [False, True]
    assert [deep[rank][3][2][0] for rank in (2, 3)] == [{"final_norm.weight"}] * 2
    assert COPY in deep[0][1][1] and COPY in deep[3][1][1] and "moment1/embedding.weight" not in deep[0][1][1]
    three = run_distributed(_runs, 3, {"pp": 3}, [CAPTURED], timeout=240)
    assert_one_process(three, 0, {})


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _save(assembly: Assembly, folder: Path, step: int, comm: Communicator, mesh: Mesh) -> None:
    check_replicas(assembly.logical_tensors(), comm, mesh)
    contract = contract_meta(assembly, comm)
    meta = {} if contract is None else {"data": {}, "layout": dict(mesh.sizes), **contract}
    save_checkpoint(folder, step, saved_state(assembly, mesh.coords), meta, comm, mesh.coords)


def _resumed(folder: Path, settings: dict[str, Any], comm: Communicator, mesh: Mesh) -> tuple[Assembly, list[float]]:
    """A new assembly from the only checkpoint in ``folder``, and the losses of one step more."""
    saved = only(folder)
    assembly = assemble(config(**TIED | settings), mesh)
    cursor: Any = SimpleNamespace(load_state=lambda state: None)
    restore(saved, assembly, cursor, comm, mesh.coords, dict(mesh.sizes), [])
    return assembly, [float(assembly.engine.step(saved.step, data(saved.step, mesh)).loss)]


def only(folder: Path) -> Checkpoint:
    (path,) = folder.glob("step_*")
    return open_checkpoint(path)


def _resumes(rank: int, world: int, root: Path) -> Any:
    """From one process's checkpoint to two stages and on; a copy that differs is refused at the save."""
    mesh, comm = Mesh({"pp": 2}, rank), GroupCommunicator()
    mesh.create_groups()
    assembly, losses = _resumed(root / "one", {"parallel__pp": 2, **CAPTURED}, comm, mesh)
    _save(assembly, root / "two", 3, comm, mesh)
    if rank == 1:
        assembly.flat.param("head.weight")[7, 3] += 1
    refused = ""
    try:
        _save(assembly, root / "bad", 3, comm, mesh)
    except ResumeError as error:
        refused = str(error)
    return losses, refused


@pytest.mark.long
def test_checkpoints_between_layouts(tmp_path: Path) -> None:
    """One process → two stages → one process: one logical tensor, the bits of a run that never stopped."""
    whole = train(config(**TIED), 4, batches=lambda step: data(step, Mesh({})))
    run = train(config(**TIED), 2, batches=lambda step: data(step, Mesh({})))
    _save(run.assembly, tmp_path / "one", 2, SingleProcess(), Mesh({}))
    results = run_distributed(_resumes, 2, tmp_path, timeout=240)
    assert [losses for losses, _ in results] == [[whole.losses[2]]] * 2
    for _, refused in results:
        assert COPY in refused and "ranks 0 and 1" in refused
    assert not list((tmp_path / "bad").glob("step_*"))
    tensors = only(tmp_path / "two").manifest.tensors
    before = only(tmp_path / "one").manifest.tensors
    assert [name for name in tensors if name not in before and not name.startswith("rng/")] == []
    assert not any("head" in name for name in tensors) and len(tensors[COPY].slices) == 1
    assembly, losses = _resumed(tmp_path / "two", {}, SingleProcess(), Mesh({}))
    assert losses == [whole.losses[3]]
    for item in assembly.logical_tensors():
        assert same_bits(_bytes(item.tensor), whole.tensors[item.name]), item.name
