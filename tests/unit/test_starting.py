"""What a fresh run takes from a checkpoint: parameters that fit, the files that travel, the place in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, SingleProcess, open_checkpoint, resolve, save_checkpoint
from qeffect_lm.app import recording
from qeffect_lm.app.recording import data_of, keep
from qeffect_lm.app.starting import check_parameters, companions_of, fill_parameters
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.parallel.mesh import Mesh
from tests.checkpoint_support import whole
from tests.runs import CONFIG, checkpoint_of, run_here, write_config
from tests.tiny import batch, config
from tests.unit.engine_support import make


def test_parameters_of_another_shape_are_named(tmp_path: Path) -> None:
    """Of as many dimensions and elements, even; and one that is missing, and one too many."""
    model = make().model
    fits = {spec.name: torch.zeros(spec.shape) for spec in model.parameters()}
    name = next(name for name, value in fits.items() if value.dim() == 2 and value.shape[0] != value.shape[1])

    def of(number: int, tensors: dict[str, torch.Tensor]) -> Checkpoint:
        items = [whole(f"master/{name}", value) for name, value in tensors.items()]
        return open_checkpoint(save_checkpoint(tmp_path, number, items, {}, SingleProcess(), {}))

    check_parameters(of(1, fits), model)
    with pytest.raises(UsageError, match=f"{name} has the shape .*, the model's is"):
        check_parameters(of(2, fits | {name: fits[name].t().contiguous()}), model)
    with pytest.raises(UsageError, match=f"lacks the parameter {name}"):
        check_parameters(of(3, {other: value for other, value in fits.items() if other != name}), model)
    with pytest.raises(UsageError, match="has a parameter that the model lacks, more"):
        check_parameters(of(4, fits | {"more": torch.zeros(1)}), model)


def test_a_rank_takes_its_piece_of_a_tied_weight(tmp_path: Path) -> None:
    """With stages the head's rank has a copy of the embedding, and with tensor-parallel peers of some of its rows."""
    table = torch.arange(67 * 4).view(67, 4).float()
    shape, cut = (33, 4), {"axes": ("tp", None), "global_shape": (67, 4), "start": (34, 0)}
    head = ParamSpec("head.weight", shape, True, tied_to="embedding.weight", **cut)  # type: ignore[arg-type]
    flat = FlatBuffers([head], param_dtype=torch.bfloat16)
    saved = save_checkpoint(tmp_path, 1, [whole("master/embedding.weight", table)], {}, SingleProcess(), {})
    fill_parameters(open_checkpoint(saved), flat)
    assert torch.equal(flat.param("head.weight"), table[34:].bfloat16())


def test_files_travel_with_the_tokenizer_that_they_belong_to(tmp_path: Path) -> None:
    """The same tokenizer: all of them; another one: those that have nothing to do with it."""
    came = {"tokenizer.model": b"one", "tokenizer_config.json": b"{}", "config.json": b"{}", "LICENSE": b"free"}
    path = save_checkpoint(tmp_path, 1, [], {}, SingleProcess(), {}, companions={**came, "model.yaml": b"a: 1"})
    said: list[str] = []

    def travel(content: bytes | None) -> dict[str, bytes]:
        (tmp_path / "mine.model").write_bytes(content or b"")
        given = config()
        data = given.data.model_copy(update={"tokenizer": None if content is None else str(tmp_path / "mine.model")})
        return companions_of(Config.model_copy(given, update={"data": data}), open_checkpoint(path), said.append)

    assert travel(b"one") == travel(None) == came and said == []
    assert travel(b"two") == {"tokenizer.model": b"two", "config.json": b"{}", "LICENSE": b"free"}
    assert len(said) == 1 and "tokenizer_config.json" in said[0] and "no longer travel" in said[0]


def test_a_training_goes_on_in_a_run_of_its_own(tmp_path: Path) -> None:
    """``init_state=training`` from a run's checkpoint: steps, tokens and place in the data go on; weights alone begin anew."""
    write_config(tmp_path, CONFIG.replace("num_layers: 4", "num_layers: 2").replace("{steps: 12}", "{steps: 3}"))
    assert run_here(tmp_path, "first")[0] == 0
    start = f"checkpoint.init_from={resolve(tmp_path / 'first')}"
    for name, more, steps, samples in (("on", ["checkpoint.init_state=training"], 5, 40), ("anew", [], 2, 16)):
        assert run_here(tmp_path, name, start, f"train.steps={steps}", *more)[0] == 0
        made = checkpoint_of(tmp_path, name)
        assert (made.step, made.meta["data"]["next_sample"], made.meta["tokens"]) == (steps, samples, samples * 16)


# ---- records ---------------------------------------------------------------------------------------------------------


def test_batches_are_told_by_their_place_over_all_replicas() -> None:
    told = data_of(make(), Mesh({"dp": 2}, 1), batch(0))
    assert {name.split()[1] for name in told} == {"1", "3", "5", "7"} and len(told) == 16


def test_the_record_of_another_save_is_replaced_and_not_compared(tmp_path: Path, monkeypatch: Any) -> None:
    """A save that never became durable had the same number: what followed it says nothing of this one."""

    class Record:
        def __init__(self, save_id: str) -> None:
            self.step, self.save_id = 3, save_id

    written: list[Any] = []
    monkeypatch.setattr(recording, "read_record", lambda path: Record("old"))
    monkeypatch.setattr(recording, "write_record", lambda root, record: written.append(record.save_id))
    monkeypatch.setattr(recording, "compare_records", lambda before, now: [])
    said: list[str] = []
    keep(Record("new"), tmp_path, said.append)  # type: ignore[arg-type]
    assert written == ["new"] and said == []
    keep(Record("old"), tmp_path, said.append)  # type: ignore[arg-type]
    assert written == ["new"] and said == ["step 3 repeated the one that ran before the restart, bit for bit"]
