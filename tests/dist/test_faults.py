"""Faults across two ranks, over gloo: trapped on one, the other ends too and names it, checkpoints stay whole."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from pathlib import Path
from random import Random

import pytest

from checkpoint import open_checkpoint, resolve
from tests.fault_list import FAULTS, NOTHING
from tests.faults import REFRESH, Injected, Place, Trap, separate_w
from tests.runs import CONFIG, overrides, write_config
from tools.common import free_port

TIMEOUT = 40.0  # launch.timeout_seconds
NAMES = list(FAULTS)
IDS = [name.replace("→", ">").replace(" ", "-") for name in NAMES]
# Processes of which each is forked from one that has torch imported and nothing else begun.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.dist.test_faults", "qeffect_lm.app.run"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    write_config(path, CONFIG.replace("num_layers: 4", "num_layers: 2").replace("seq_len: 16", "seq_len: 8"))
    return path


def arguments(folder: Path, run: str, name: str, backend: str, seed: int) -> list[str]:
    fault = FAULTS[name]
    settings = {"parallel__pp": 2, "graphs__backend": backend, "run__seed": seed, **fault.settings}
    more = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    more += ["train.steps=4", "checkpoint.every=1", f"launch.timeout_seconds={TIMEOUT}"]
    return [str(folder / "tiny.yaml"), *overrides(folder, run, *more)]


def one_rank(rank: int, port: int, output: str, argv: list[str], name: str, place: Place, seed: int) -> None:
    """``train.py`` as one of two ranks, with the fault in its engine; says where it was when it ended."""
    log = open(output, "w")  # noqa: SIM115 (the process's output until it ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    from qeffect_lm.app import assemble, main, run

    fault = FAULTS[name]
    mine = fault if rank == fault.rank else NOTHING
    watched: list[Injected] = []
    prepare, report = assemble.Assembly.prepare, main._report

    def prepared(self: assemble.Assembly, batch: object) -> None:
        prepare(self, batch)
        if mine.separate:
            separate_w(self.engine)
        watched.append(Injected(self.engine, mine, place, Random(seed + rank)).__enter__())

    def reported(error: BaseException, *rest: object) -> None:
        print(f"ended: {type(error).__name__} in {watched[0].action}, step {watched[0].engine._step}", flush=True)
        report(error, *rest)  # type: ignore[arg-type]

    assemble.Assembly.prepare, main._report = prepared, reported  # type: ignore[method-assign, assignment]
    if fault.plan is not None:
        plan = fault.plan(place.microbatch, 2)
        run.plan_of = lambda *_: plan  # type: ignore[assignment]
        assemble.prove_rank = lambda *_, **__: None  # type: ignore[assignment]  # it would refuse the plan
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main.leave(main.main(argv, os.environ), os.environ)


def expected(name: str, place: Place) -> Trap:
    """As in one process; but a run that saves after each step reads its caches there, before the next step does."""
    from qeffect_lm.app.assemble import assemble
    from qeffect_lm.parallel.mesh import Mesh
    from tests.tiny import config

    fault = FAULTS[name]
    if name == "refresh skipped":
        trap = FAULTS["load without refresh"]
        return Trap(trap.first(None, place).error, REFRESH, "the checkpoint needs .* refresh the cache", place.step)  # type: ignore[arg-type]
    plan = fault.plan(place.microbatch, 2) if fault.plan else None
    settings = config(**{"parallel__pp": 2, "model__num_layers": 2, **fault.settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qeffect_lm.app.assemble.Transport", lambda *_: None)
        patch.setattr("qeffect_lm.app.assemble.prove_rank", lambda *_, **__: None)
        engine = assemble(settings, Mesh({"pp": 2}, fault.rank), plan).engine
    return fault.first(engine, place)


def run_pair(folder: Path, name: str, backend: str, repetition: int) -> None:
    fault, rng = FAULTS[name], Random(f"{name} {backend} {repetition}")
    first = fault.plan is not None  # such a plan fails in its first step
    place = Place(0 if first else rng.randrange(1, 3), fault.microbatches[rng.randrange(len(fault.microbatches))])
    trap = expected(name, place)
    run = f"{IDS[NAMES.index(name)]}-{backend}-{repetition}"
    argv, port = arguments(folder, run, name, backend, rng.randrange(1 << 16)), free_port()
    outputs = [folder / f"{run}.{rank}.txt" for rank in range(2)]
    processes = [
        FORKS.Process(target=one_rank, args=(rank, port, str(outputs[rank]), argv, name, place, rng.randrange(1 << 16)))
        for rank in range(2)
    ]
    began = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT + 60)
    seconds = time.monotonic() - began
    for process in processes:
        if process.is_alive():
            process.kill()
    said = [output.read_text() for output in outputs]
    told = "\n".join(f"--- rank {rank}, exit code {p.exitcode}\n{said[rank]}" for rank, p in enumerate(processes))
    assert [process.exitcode for process in processes] == [1, 1] and seconds < TIMEOUT + 60, told
    victim, peer = said[fault.rank], said[1 - fault.rank]
    assert f"ended: {trap.error.__name__} in {trap.action}, step {trap.step}\n" in victim, (trap, told)
    assert re.search(rf"^error \(rank {fault.rank}\): .*{trap.words}", victim, re.MULTILINE), (trap, told)
    lost = rf"^error \(rank {1 - fault.rank}\): rank {fault.rank} was lost during "
    lost_error = "CheckpointError" if trap.action == REFRESH else "PeerLostError"
    assert f"ended: {lost_error}" in peer and re.search(lost, peer, re.MULTILINE), told
    assert "Traceback" not in victim + peer, told
    check_checkpoints(folder / run / "checkpoints", trap.step)


def check_checkpoints(path: Path, steps: int) -> None:
    """Exactly the steps completed before, each whole; nothing half written is taken for one."""
    found = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step_"))
    assert found == [f"step_{step:08d}" for step in range(1, steps + 1)]
    for name in found:
        assert open_checkpoint(path / name).verify() == []
    if steps:
        assert open_checkpoint(resolve(path)).step == steps


@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_trapped_across_two_ranks(name, folder):
    """Once, eagerly or from graphs in turn."""
    run_pair(folder, name, ("eager", "host_replay")[NAMES.index(name) % 2], 0)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "host_replay"])
@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_trapped_three_times_of_three(name, backend, folder):
    for repetition in range(1, 4):
        run_pair(folder, name, backend, repetition)
