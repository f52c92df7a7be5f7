"""What the TorchTitan adapter knows without torchtitan: schedules, configurations, and how it says what is missing."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from qeffect_lm.errors import UsageError
from qeffect_lm.integrations import pipelining
from qeffect_lm.integrations.torchtitan import config_registry
from qeffect_lm.integrations.torchtitan.pipeline import OWN, pipeline_llm, required, schedule_class
from qeffect_lm.integrations.torchtitan.train import launch

CONFIGS = {
    name: make for name, make in vars(config_registry).items() if inspect.isfunction(make) and name.startswith("llama3_")
}
DOCS = Path(__file__).parents[2] / "docs" / "torchtitan.md"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)


@pytest.mark.parametrize("name", list(pipelining.BY_TORCH_NAME))
def test_names_of_schedules_are_torchs(name):
    kind = schedule_class(name.upper())
    assert schedule_class(name.lower()) is kind is pipelining.BY_TORCH_NAME[name]
    if name.lower() in OWN:  # TorchTitan is told of one of torch's, which has as many stages on a rank
        with pytest.raises(ValueError, match="Unknown schedule"):
            torchs.get_schedule_class(name)
        theirs = torchs.get_schedule_class(OWN[name.lower()])
    else:
        theirs = torchs.get_schedule_class(name)
        assert kind.__name__ == theirs.__name__
    assert issubclass(kind, pipelining.PipelineScheduleSingle) == issubclass(theirs, torchs.PipelineScheduleSingle)


def test_a_schedule_that_is_not_ours():
    with pytest.raises(UsageError, match="pipeline_parallel_schedule is LoopedBFS; ours are 1F1B, GPipe, .*ZBH2"):
        schedule_class("LoopedBFS")


def test_every_configuration_says_that_torchtitan_is_missing(without):
    assert set(re.findall(r"^\| `(llama3_\w+)`", DOCS.read_text(), re.M)) == CONFIGS.keys() and len(CONFIGS) == 4
    more = (lambda: required("torchtitan.trainer"), launch, lambda: pipeline_llm(nn.Identity(), parallelism=None))
    for make in (*CONFIGS.values(), *more):
        with pytest.raises(UsageError, match=r"torchtitan is not installed: pip install 'qeffect-lm\[titan\]'"):
            make()


def test_a_release_without_a_module_and_one_that_lacks_a_package(tmp_path, monkeypatch, request):
    """A torchtitan is there: what is missing is named, and not torchtitan."""
    request.getfixturevalue("without")
    monkeypatch.delitem(sys.modules, "torchtitan")
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan" / "__init__.py").touch()
    (tmp_path / "torchtitan" / "trainer.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, name in (("trainer", "a_package_that_nobody_has"), ("distributed", "torchtitan.distributed")):
        with pytest.raises(UsageError, match=f"this torchtitan does not fit: torchtitan.{module} needs {name}, which is not"):
            required(f"torchtitan.{module}")


def test_the_module_of_its_launcher_is_read_without_it():
    """``--module`` is imported first, before the configuration is asked for."""
    code = "import sys; sys.modules['torchtitan'] = None; import qeffect_lm.integrations.torchtitan.config_registry"
    subprocess.run([sys.executable, "-c", code], check=True)


def fake(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = tmp_path / "torchtitan" / name
        for folder in [path.parent, *path.parent.parents]:
            if folder == tmp_path:
                break
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").touch()
        path.write_text(text)


PARALLELISM = """
from dataclasses import dataclass

@dataclass
class Parallelism:
    pipeline_parallel_schedule: str
    pipeline_parallel_schedule_csv: str = ""

@dataclass
class JobConfig:
    parallelism: Parallelism
"""
OLD = """
def pipeline_llm(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn):
    raise SystemExit(job_config)
"""
NEW = """
def pipeline_llm(model, *, parallel_dims, parallelism, loss_fn):
    raise SystemExit(parallelism)
"""


@pytest.mark.parametrize("form", ["0.2", "0.3"])
def test_both_forms_of_what_the_trainer_hands_over(form, tmp_path, monkeypatch, request):
    """By position with a ``job_config``, and by name: theirs is told a schedule that it knows, and keeps the output whole."""
    request.getfixturevalue("without")
    monkeypatch.delitem(sys.modules, "torchtitan")
    fake(tmp_path, {"distributed/pipeline_parallel.py": OLD if form == "0.2" else NEW, "config.py": PARALLELISM})
    monkeypatch.syspath_prepend(tmp_path)
    config = required("torchtitan.config")
    parallelism = config.Parallelism("ZBH1")
    head = "output" if form == "0.2" else "lm_head"
    model = nn.ModuleDict({"layer": nn.Linear(2, 2), head: nn.Linear(2, 2)})
    with pytest.raises(SystemExit) as told:
        if form == "0.2":
            pipeline_llm(model, None, config.JobConfig(parallelism), None, None, None, None)
        else:
            pipeline_llm(model, parallel_dims=None, parallelism=parallelism, loss_fn=None)
    given = told.value.code.parallelism if form == "0.2" else told.value.code
    assert given.pipeline_parallel_schedule == "1F1B" and parallelism.pipeline_parallel_schedule == "ZBH1"
    assert isinstance(model["layer"], pipelining.SplitLinear) and type(model[head]) is nn.Linear
