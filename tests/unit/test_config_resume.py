"""Which keys may change when a run resumes, and how a change is reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from qeffect_lm.config import ABSENT, Change, Config, config_diff_on_resume

DATA: dict[str, Any] = {
    "model": {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 128,
    },
    "train": {"steps": 20},
    "parallel": {"pp": 2},
    "pipeline": {"stage_layers": [1, 3]},
}


def changed(section: str, **values: Any) -> Config:
    data = copy.deepcopy(DATA)
    data.setdefault(section, {}).update(values)
    return Config.from_dict(data)


@pytest.fixture
def saved() -> dict[str, Any]:
    return Config.from_dict(DATA).to_dict()


def test_no_change(saved: dict[str, Any]) -> None:
    assert config_diff_on_resume(saved, Config.from_dict(DATA)) == []


@pytest.mark.parametrize(
    ("section", "key", "value", "severity"),
    [
        ("run", "dir", "elsewhere", "free"),
        ("contract", "mode", "off", "free"),
        ("contract", "poison", True, "warn"),  # the graph of a whole step holds it
        ("train", "max_minutes", 5.0, "free"),
        ("optim", "lr", 0.5, "warn"),
        ("train", "steps", 21, "warn"),
        ("model", "ffn_size", 256, "refuse"),
        ("run", "seed", 4, "refuse"),
        ("pipeline", "stage_layers", [2, 2], "warn"),
        ("precision", "dtype", "bfloat16", "refuse"),
    ],
)
def test_each_change_has_its_severity(
    saved: dict[str, Any], section: str, key: str, value: Any, severity: Any
) -> None:
    old = saved[section][key]
    diff = config_diff_on_resume(saved, changed(section, **{key: value}))
    assert diff == [Change(f"{section}.{key}", old, value, severity)]


def test_changing_the_amax_history_length_is_refused(saved: dict[str, Any]) -> None:
    """S4: another history length than the saved one is an error, never frozen or defaulted scales."""
    diff = config_diff_on_resume(saved, changed("precision", fp8={"history": 8}))
    assert diff == [Change("precision.fp8.history", 16, 8, "refuse")]


def test_keys_that_one_side_lacks(saved: dict[str, Any]) -> None:
    del saved["optim"]["lr"], saved["optim"]["eps"], saved["train"]["steps"], saved["model"]["head_dim"]
    saved["optim"]["momentum"] = 0.9
    diff = config_diff_on_resume(saved, changed("optim", lr=0.5))
    assert diff == [
        Change("optim.lr", 1e-3, 0.5, "warn"),
        Change("train.steps", ABSENT, 20, "warn"),
        Change("optim.momentum", 0.9, ABSENT, "warn"),
    ]
    assert str(diff[0]) == "optim.lr: 0.001 -> 0.5"
