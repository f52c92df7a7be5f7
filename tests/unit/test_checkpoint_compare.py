"""Comparing two checkpoints by bits, and the command line that prints it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import SingleProcess, compare, open_checkpoint, rewrite_checkpoint, save_checkpoint
from checkpoint.compare import MetaDifference
from checkpoint.shards import DTYPE_TAGS, torch_dtype
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import on_ranks, whole
from tools.diff import main

BASE = {
    "param/layers.2.w": torch.arange(6.0).reshape(2, 3),
    "param/layers.10.w": torch.ones(4, dtype=torch.bfloat16),
    "scale/layers.2.w": torch.tensor(448.0),
    "rng/rank0": torch.arange(5, dtype=torch.uint8),
}


def make(root: Path, meta: dict[str, Any] | None = None, step: int = 1, **changes: Any) -> Path:
    """The base state with some tensors changed (``layers_10`` etc. are given by full name in ``changes``)."""
    state = {**BASE, **changes}
    roles = {"param": Role.PARAM, "scale": Role.SCALE, "rng": Role.RNG, "moment": Role.MOMENT}
    tensors = [whole(n, t, roles[n.split("/")[0]]) for n, t in state.items() if t is not None]
    return save_checkpoint(root, step, tensors, meta or {}, SingleProcess(), {})


def test_equal_whatever_the_slices(tmp_path: Path) -> None:
    """The same logical state from one rank and from two."""
    whole_state = make(tmp_path / "a")

    def body(comm: Any) -> Path:
        rows = BASE["param/layers.2.w"][comm.rank : comm.rank + 1]
        cut = LogicalTensor(
            "param/layers.2.w", rows, Role.PARAM, (2, 3), (comm.rank, 0), ("tp", None), ("dp",)
        )
        rest = [
            whole("param/layers.10.w", BASE["param/layers.10.w"]),
            whole("scale/layers.2.w", BASE["scale/layers.2.w"], Role.SCALE),
            whole("rng/rank0", BASE["rng/rank0"], Role.RNG),
        ]
        return save_checkpoint(tmp_path / "b", 1, [cut, *rest], {}, comm, {"tp": comm.rank})

    result = compare(open_checkpoint(whole_state), open_checkpoint(on_ranks(2, body)[1]))
    assert result.same and result.first_name is None and len(result.equal) == 4


@pytest.mark.parametrize(
    ("a", "b", "max_abs"),
    [(0.0, -0.0, 0.0), (1.0, math.nan, math.nan), (1.0, math.inf, math.inf), (math.inf, -math.inf, math.inf)],
)
def test_differences_are_of_bits(tmp_path: Path, a: float, b: float, max_abs: float) -> None:
    left, right = torch.tensor([[1.0, 2.0], [a, 4.0]]), torch.tensor([[1.0, 2.0], [b, 4.0]])
    one = open_checkpoint(make(tmp_path / "a", **{"moment/w": left}))
    two = open_checkpoint(make(tmp_path / "b", **{"moment/w": right}))
    (found,) = compare(one, two).different
    assert (found.name, found.first, found.elements) == ("moment/w", (1, 0), 1)
    assert repr(found.max_abs) == repr(max_abs) and found.values is not None
    assert list(map(repr, found.values)) == [repr(a), repr(b)]
    assert compare(one, one).same


@pytest.mark.parametrize("name", DTYPE_TAGS)
def test_every_dtype_can_be_compared(tmp_path: Path, name: str) -> None:
    """Also those for which torch has no arithmetic of its own."""
    dtype = torch_dtype(name)
    low, high = torch.ones(3, 4).to(dtype), torch.ones(3, 4)
    high[2, 1] = 0 if name == "bool" else 2
    a, b = (
        open_checkpoint(save_checkpoint(tmp_path / n, 1, [whole("w", t)], {}, SingleProcess(), {}))
        for n, t in (("a", low), ("b", high.to(dtype)))
    )
    assert compare(a, a).same
    (found,) = compare(a, b).different
    assert (found.first, found.elements, found.max_abs, found.dtype) == ((2, 1), 1, 1.0, name)


def test_equal_nan_patterns_are_equal_and_payloads_count(tmp_path: Path) -> None:
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00002], dtype=torch.int32).view(torch.float32)
    paths = [
        make(tmp_path / str(i), **{"moment/w": value}) for i, value in enumerate((nan, nan.clone(), other))
    ]
    a, b, c = map(open_checkpoint, paths)
    assert compare(a, b).same
    (found,) = compare(a, c).different
    assert found.nbytes == 1 and math.isnan(found.max_abs or 0.0)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(-3, 3)), max_size=4))
def test_counts_agree_with_a_plain_loop(edits: list[tuple[int, int]]) -> None:
    import tempfile

    before = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    after = before.clone()
    for where, by in edits:
        after.view(-1)[where] += by
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            save_checkpoint(Path(folder) / n, 1, [whole("w", t)], {}, SingleProcess(), {})
            for n, t in (("a", before), ("b", after))
        ]
        result = compare(*map(open_checkpoint, paths))
    pairs = list(zip(before.view(-1).tolist(), after.view(-1).tolist(), strict=True))
    unequal = [i for i, (x, y) in enumerate(pairs) if x != y]
    assert result.same == (not unequal)
    if unequal:
        (found,) = result.different
        assert found.first == divmod(unequal[0], 4) and found.elements == len(unequal)
        assert found.max_abs == max(abs(x - y) for x, y in pairs)
        flat = [
            p
            for x, y in pairs
            for p in zip(
                x.to_bytes(2, "little", signed=True), y.to_bytes(2, "little", signed=True), strict=True
            )
        ]  # noqa: E501
        assert found.nbytes == sum(x != y for x, y in flat)


def test_other_kinds_and_missing_tensors_are_differences(tmp_path: Path) -> None:
    a = open_checkpoint(make(tmp_path / "a"))
    b = open_checkpoint(
        make(
            tmp_path / "b",
            **{
                "param/layers.2.w": torch.zeros(3, 2),
                "param/layers.10.w": torch.ones(4),
                "rng/rank0": None,
                "rng/rank1": BASE["rng/rank0"],
            },
        )
    )
    result = compare(a, b)
    assert [d.name for d in result.different] == ["param/layers.2.w", "param/layers.10.w"]
    assert [d.reason for d in result.different] == ["shape [2, 3] and [3, 2]", "dtype bfloat16 and float32"]
    assert result.only_in_a == ("rng/rank0",) and result.only_in_b == ("rng/rank1",)
    assert result.equal == ("scale/layers.2.w",) and result.first_name == "param/layers.2.w"


def test_meta_is_compared_where_asked(tmp_path: Path) -> None:
    meta = {"data": {"cursor": [1, 2], "hash": "x"}, "tokens": 5, "loss": math.nan}
    other = {"data": {"cursor": [1, 3], "hash": "x"}, "tokens": 5.0, "loss": math.nan, "more": {}}
    a, b = open_checkpoint(make(tmp_path / "a", meta)), open_checkpoint(make(tmp_path / "b", other, step=2))
    assert compare(a, b).same
    assert compare(a, b, ["data"]).meta == (MetaDifference("data.cursor[1]", 2, 3),)
    assert compare(a, b, ["data.hash", "loss", "dat", "ranks"]).same
    found = {item.key: (item.a, item.b) for item in compare(a, b, None).meta}
    assert found == {"data.cursor[1]": (2, 3), "tokens": (5, 5.0), "more": ("<absent>", {}), "step": (1, 2)}


# --- the command line --------------------------------------------------------------------------------------


def test_diff_exit_codes_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 equal, 1 different with the first tensor named, 2 unreadable; a folder stands for its latest."""
    a = make(tmp_path / "a")
    make(tmp_path / "b")
    assert main([str(a), str(tmp_path / "b")]) == 0
    assert "4 tensors bitwise equal" in capsys.readouterr().out

    doubled = rewrite_checkpoint(
        open_checkpoint(a), tmp_path / "c", {"scale/layers.2.w": torch.tensor(896.0)}
    )
    assert main([str(tmp_path / "a"), str(doubled)]) == 1
    out = capsys.readouterr().out
    assert "first differing tensor: scale/layers.2.w" in out and "3 tensors bitwise equal, 1 differ" in out
    assert any(line.split()[-6:] == ["[]", "448", "896", "1", "2", "448"] for line in out.splitlines())

    file = doubled / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert main([str(a), str(doubled)]) == 2
    assert "rank00000.safetensors is damaged" in capsys.readouterr().err
    assert main([str(a), str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
    assert main([str(a), str(tmp_path)]) == 2
    assert "is no checkpoint and holds no complete one" in capsys.readouterr().err


def test_diff_follows_latest_and_not_the_number(tmp_path: Path) -> None:
    make(tmp_path / "a", step=1)
    make(tmp_path / "a", step=2, **{"rng/rank0": torch.zeros(5, dtype=torch.uint8)})
    make(tmp_path / "b", step=1)
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    (tmp_path / "a" / "latest").write_text("step_00000001\n")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (tmp_path / "a" / "latest").write_text("step_00000007\n")  # a stale hint: the newest complete one counts
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def test_diff_as_json_is_proper_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make(tmp_path / "a", {"loss": 1.0})
    b = make(
        tmp_path / "b", {"loss": math.nan}, **{"scale/layers.2.w": torch.tensor(math.nan), "rng/rank0": None}
    )

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    assert main([str(a), str(b), "--json", "--meta"]) == 1
    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (
        document["same"] is False
        and document["first"] == "rng/rank0"
        and document["only_in_a"] == ["rng/rank0"]
    )
    assert document["different"][0]["max_abs"] == "nan" and document["different"][0]["values"] == [
        448.0,
        "nan",
    ]
    assert document["meta"] == [{"key": "loss", "a": 1.0, "b": "nan"}]
    assert main([str(a), str(tmp_path / "x"), "--json"]) == 2
    assert "does not exist" in json.loads(capsys.readouterr().out)["error"]


def test_diff_meta_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        make(tmp_path / "a", {"wandb": "x", "tokens": 1}),
        make(tmp_path / "b", {"wandb": "y", "tokens": 1}),
    )
    assert main([str(a), str(b)]) == 0
    assert main([str(a), str(b), "--key", "tokens"]) == 0
    assert main([str(a), str(b), "--meta"]) == 1
    assert "meta wandb: 'x' and 'y'" in capsys.readouterr().out


def test_diff_runs_as_a_module(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a"), make(tmp_path / "b", **{"rng/rank0": torch.zeros(5, dtype=torch.uint8)})
    done = subprocess.run(
        [sys.executable, "-m", "tools.diff", str(a), str(b)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "") and "first differing tensor: rng/rank0" in done.stdout
