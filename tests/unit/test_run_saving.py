"""What a run looks at before it saves: replicas, caches, addresses, logs. What is not sound is never committed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import SingleProcess, scan
from checkpoint.resume import check_replicas
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.app.saving import Saver
from qeffect_lm.contract.errors import CaptureError, ResumeError, StaleWeightError
from qeffect_lm.errors import QEffectError
from qeffect_lm.parallel.mesh import Mesh
from tests.checkpoint_support import on_ranks, whole
from tests.unit.engine_support import make


def saver_of(assembly: Assembly, folder: Path, background: bool) -> Saver:
    given = assembly.config
    config = given.model_copy(
        update={
            "run": given.run.model_copy(update={"dir": str(folder)}),
            "checkpoint": given.checkpoint.model_copy(update={"async_save": background}),
        }
    )
    folder.mkdir(exist_ok=True)
    return Saver(config, assembly, Mesh({}), SingleProcess(), leads=True)


def stale(assembly: Assembly) -> None:
    assembly.ledger.versions.bump(assembly.cache.names[:1])


def moved(assembly: Assembly) -> None:
    assembly.register._addresses[next(iter(assembly.register._addresses))] += 64


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(("spoil", "error"), [(stale, StaleWeightError), (moved, CaptureError)])
def test_a_state_that_is_not_sound_is_not_saved(
    tmp_path: Path, background: bool, spoil: Callable[[Assembly], None], error: type[Exception]
) -> None:
    """A cached weight of another version, a tensor that graphs read elsewhere."""
    assembly = make()
    saver = saver_of(assembly, tmp_path, background)
    saver.save(1, dict, lambda: None)
    spoil(assembly)
    with pytest.raises(error):
        saver.save(2, dict, lambda: None)
    saver.finish()
    assert [one.step for one in scan(tmp_path / "checkpoints")] == [1]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_logs_are_on_disk_before_the_commit_and_replicas_alike(tmp_path: Path, monkeypatch: Any, background: bool) -> None:
    saver = saver_of(make(), tmp_path, background)
    seen: list[list[int]] = []
    saver.save(1, dict, lambda: seen.append([one.step for one in scan(tmp_path / "checkpoints")]))
    saver.finish()
    assert seen == [[]] and [one.step for one in scan(tmp_path / "checkpoints")] == [1]

    def differ(tensors: Any, comm: Any, mesh: Any) -> None:
        raise ResumeError("replicas hold different bytes")

    monkeypatch.setattr("qeffect_lm.app.saving.check_replicas", differ)
    with pytest.raises(QEffectError, match="hold different bytes"):
        saver.save(2, dict, lambda: None)
        saver.finish()
    assert [one.step for one in scan(tmp_path / "checkpoints")] == [1]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_news_of_a_save_are_told_once(tmp_path: Path, background: bool) -> None:
    saver = saver_of(make(), tmp_path, background)
    saver.save(1, dict, lambda: None)
    saver.finish()
    news = saver.news()
    kinds = {"checkpoint_stall_ms", *(("checkpoint_durable_ms", "checkpoint_bytes") if background else ())}
    assert news.keys() == kinds and all(value > 0 for value in news.values())
    files = (tmp_path / "checkpoints/step_00000001").iterdir()
    assert not background or news["checkpoint_bytes"] == sum(file.stat().st_size for file in files)
    assert saver.news() == {}


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_replicas_that_differ_are_named(axis: str) -> None:
    """In one bit of one of them, a signed zero's: on all ranks, by tensor and ranks."""

    def body(odd: float, comm: Any) -> None:
        both = replace(whole("param/shared", torch.tensor([1.0, 0.0])), replicated=(axis,))
        own = whole(f"param/of-{axis}{comm.rank}", torch.ones(2) * comm.rank)
        if comm.rank == 1:
            both.tensor[1] = odd
        check_replicas([both, own], comm, Mesh({axis: 2}, comm.rank))

    assert on_ranks(2, lambda comm: body(0.0, comm)) == [None, None]
    for error in on_ranks(2, lambda comm: body(-0.0, comm)):
        assert isinstance(error, ResumeError)
        assert "'param/shared' is replicated, but ranks 0 and 1 hold different bytes of it; nothing is saved" in str(error)
