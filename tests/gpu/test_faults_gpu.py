"""Every fault of ``tests/fault_list.py`` on real GPUs and streams: trapped at the first illegal action, by its name.

    python -m pytest -q tests/gpu/test_faults_gpu.py

Those of one rank in this process, eagerly and from graphs; those about messages over NCCL between two GPUs, in processes that
``train.py`` makes.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.dist import test_faults as across
from tests.fault_list import FAULTS, NOTHING
from tests.faults import Injected, Place
from tests.runs import CONFIG, overrides, write_config
from tests.tiny import batch
from tests.unit import test_faults as one_process
from tests.unit.test_faults import repeat, reused
from tools.common import free_port

pytestmark = pytest.mark.gpu
BACKENDS = ("eager", "cuda_graphs")
HERE = [name for name, fault in FAULTS.items() if not fault.transfers]
ACROSS = [name for name, fault in FAULTS.items() if fault.transfers]
SHAPE = MappingProxyType(
    {
        "run__device": "cuda",
        "precision__dtype": "bfloat16",
        "model__num_layers": 1,
        "model__vocab_size": 64,
        "model__hidden_size": 128,
        "model__num_heads": 2,
        "model__num_kv_heads": 1,
        "model__ffn_size": 256,
        "data__seq_len": 32,
        "pipeline__microbatches": 4,
    }
)
SECONDS = 30.0  # after which a rank gives up waiting for its peer


def ids(names: list[str]) -> list[str]:
    return [name.replace("→", ">").replace(" ", "-") for name in names]


@pytest.fixture(autouse=True, scope="module")
def _on_the_gpu():
    """The CPU suite's runs, with shapes that the kernels take."""

    def data(seed: int, microbatches: int) -> Any:
        return batch(seed, microbatches, 2, 32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_process, "SMALL", SHAPE)
        patch.setattr(one_process, "data", data)
        one_process.kept.cache_clear()
        yield
        one_process.kept.cache_clear()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HERE, ids=ids(HERE))
def test_trapped_five_times_of_five(name, backend):
    """Different data, steps and microbatches; the same words."""
    repeat(name, backend, 5, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_trapped_where_nothing_is_wrong(backend):
    """The control: the wrapping alone."""
    for name in HERE:
        fault = FAULTS[name]
        if fault.plan is not None:
            continue
        trained = reused(fault, backend, 0, 0)
        with Injected(trained.parts[0].engine, NOTHING, Place(1), Random(3)):
            for number in range(2):
                trained.step(number, number)


# ---- messages between two GPUs -----------------------------------------------------------------------------


def run_pair(folder: Path, name: str, backend: str) -> str:
    """``train.py`` on two GPUs with the fault in one rank; returns what is wrong with how it ended, or nothing."""
    fault, rng = FAULTS[name], Random(f"{name} {backend}")
    place = Place(rng.randrange(1, 3), fault.microbatches[rng.randrange(len(fault.microbatches))])
    trap = across.expected(name, place)
    run = f"{ids([name])[0]}-{backend}"
    settings = {"parallel__pp": 2, "graphs__backend": backend, **SHAPE, "model__num_layers": 2, **fault.settings}
    more = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    more += ["train.steps=4", "checkpoint.every=1", f"launch.timeout_seconds={SECONDS}"]
    argv, port = [str(folder / "tiny.yaml"), *overrides(folder, run, *more)], free_port()
    outputs = [folder / f"{run}.{rank}.txt" for rank in range(2)]
    processes = [
        across.FORKS.Process(target=across.one_rank, args=(rank, port, str(outputs[rank]), argv, name, place, rank))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    late = [process.is_alive() for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    said = [output.read_text(errors="replace") for output in outputs]
    told = "\n".join(f"--- rank {rank}, exit code {p.exitcode}\n{said[rank][-3000:]}" for rank, p in enumerate(processes))
    wrong = []
    if f"ended: {trap.error.__name__} in {trap.action}, step {trap.step}\n" not in said[fault.rank]:
        wrong.append(f"not trapped as {trap}")
    if not re.search(rf"^error \(rank {fault.rank}\): .*{trap.words}", said[fault.rank], re.MULTILINE):
        wrong.append(f"no message with {trap.words!r}")
    if any(late) or any(process.exitcode == 0 for process in processes):
        wrong.append(f"still running: {late}")
    try:
        across.check_checkpoints(folder / run / "checkpoints", trap.step)
    except AssertionError as error:
        wrong.append(f"checkpoints: {error}")
    return f"{name} {backend}: {'; '.join(wrong)}\n{told}" if wrong else ""


@cache
def all_pairs(folder: Path) -> dict[tuple[str, str], str]:
    """Side by side: most of the time a pair starts up, or a rank waits for its dead peer."""
    wanted = [(name, BACKENDS[(number + turn) % 2]) for turn in range(2) for number, name in enumerate(ACROSS)]
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(wanted, pool.map(lambda pair: run_pair(folder, *pair), wanted), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    write_config(path, CONFIG)
    return path


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ACROSS, ids=ids(ACROSS))
def test_trapped_across_two_gpus(name, backend, folder):
    wrong = all_pairs(folder)[name, backend]
    assert not wrong, wrong
