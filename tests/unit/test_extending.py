"""docs/extending.md's example, as it stands there: checked, trained, captured, sized, and refused by te."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from models import build_model
from qeffect_lm.app.dry_run import describe
from qeffect_lm.errors import UsageError
from tests.tiny import assert_moved, batch, config, differing, train

PAGE = (Path(__file__).resolve().parents[2] / "docs/extending.md").read_text(encoding="utf-8")
FAMILY, CHECK = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
PRINTED = re.search(r"```\n\n((?:    .*\n)+)\n`check_layer", PAGE)


@pytest.fixture
def my_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_family.py").write_text(FAMILY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_family:family"
    sys.modules.pop("my_family", None)


def test_the_check_prints_what_the_page_says(my_family, capsys):
    exec(compile(CHECK, "docs/extending.md", "exec"), {})
    assert PRINTED is not None
    assert capsys.readouterr().out == re.sub("(?m)^    ", "", PRINTED[1])


def test_it_trains(my_family):
    """FP8, captured equals eager; the cheap parameter moves too."""
    settings = {"model__family": my_family, "pipeline__microbatches": 2}
    runs = [
        train(config(**settings, graphs__backend=backend), 2, batches=lambda seed: batch(seed, microbatches=2))
        for backend in ("eager", "host_replay")
    ]
    assert_moved(runs[0])
    assert runs[0].losses == runs[1].losses and differing(runs[0].tensors, runs[1].tensors) == []
    scale = runs[0].assembly.flat.master("layers.3.mlp.scale")
    assert scale.shape == (48,) and not bool((scale == 1).all())


def test_its_folder_need_not_be_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``qeffect-train``, started where the file is."""
    (tmp_path / "my_other_family.py").write_text(FAMILY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    page = describe(config(model__family="my_other_family:family"))
    assert "29,152 in 31 tensors" in page and sys.path == before
    sys.modules.pop("my_other_family")


def test_te_refuses_it(my_family):
    te = {"model__backend": "te", "precision__dtype": "bfloat16", "run__device": "cuda"}
    with pytest.raises(UsageError, match="te does not run SquaredReLUPart, a part that it does not know"):
        build_model(config(model__family=my_family, **te), None, torch.bfloat16)
