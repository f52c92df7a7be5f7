"""Megatron checkpoints that are refused, hostile or damaged: by name, and nothing of them runs."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import open_checkpoint
from checkpoint.megatron import guard, unpickle
from checkpoint.megatron.read import read_megatron
from checkpoint.megatron.unpickle import METADATA_RECORDS, RECORDS, Refused, Restricted
from qeffect_lm.errors import UsageError
from tests.megatron_support import (
    LAYOUTS,
    arguments,
    in_this_process,
    optimizer_state,
    run,
    unpacked,
    whole,
    write_ranks,
)
from tools.convert import main


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests have the pickles opened in this process, which saves each a start of torch; those marked ``child`` do not."""
    if "child" not in request.fixturenames:
        monkeypatch.setattr(guard, "ask_child", in_this_process)


@pytest.fixture
def child() -> None:
    """Asks for the process that opens pickles to be one."""


# ---- pickles -------------------------------------------------------------------------------------------------------


class Evil:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class EvilMkdir(Evil):
    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.path),)


def test_a_hostile_checkpoint_runs_nothing(child: None, golden: Path, tmp_path: Path, capsys) -> None:
    """In each place where a pickle is read: the file is refused by name, and what it wanted has not happened."""
    touched = tmp_path / "touched"
    write_ranks(tmp_path / "legacy", whole(60), arguments(), rng_state=Evil(touched))
    raw = torch.frombuffer(bytearray(pickle.dumps({"amax_history_fwd": Evil(touched)})), dtype=torch.uint8)
    write_ranks(tmp_path / "extra", whole(60), arguments(), extra={"decoder.layers.0.mlp.linear_fc2": raw})
    torch.save({"args": EvilMkdir(touched)}, tmp_path / "common.pt")
    files = [tmp_path / name / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt" for name in ("legacy", "extra")]
    for line in guard.ask_child("torch", [*files, tmp_path / "common.pt"]):
        said = json.loads(line)["refused"]
        assert "asks for" in said or "blocked" in said, said
    dist = Path(shutil.copytree(golden / "dist", tmp_path / "dist"))
    (dist / "iter_0000002" / ".metadata").write_bytes(pickle.dumps(EvilMkdir(touched)))
    assert run(dist, tmp_path / "out") == 2
    assert "iter_0000002 is refused: it asks for os.makedirs" in capsys.readouterr().err
    assert not touched.exists() and not (tmp_path / "out").exists()


def test_no_pickle_is_opened_without_consent(child: None, golden: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(guard.subprocess, "run", never)
    for layout in LAYOUTS:
        assert main(["--from", "megatron", "--to", "native", str(golden / layout), str(tmp_path / "x")]) == 2
        assert "add --allow-pickle" in capsys.readouterr().err


def test_the_names_that_pass_are_records_and_nothing_else() -> None:
    """Whatever passes the list becomes a record; nothing that could do something is on it."""
    for name in ("os.system", "builtins.eval", "builtins.getattr", "subprocess.Popen", "torch.load", "io.open", "torch.hub"):
        assert not RECORDS.fullmatch(name) and not METADATA_RECORDS.fullmatch(name)
    made = Restricted(pickle.dumps(Path("/x")), RECORDS).load()
    assert type(made).__mro__[1].__name__ == "Record" and made.args == ("/", "x")
    with pytest.raises(Refused, match="builtins.eval"):
        Restricted(b"cbuiltins\neval\n(S'1'\ntR.", RECORDS).load()


def test_torchs_own_guard_stands_behind_the_list(tmp_path: Path, monkeypatch) -> None:
    """Were every name on the list, ``weights_only`` still calls nothing."""
    monkeypatch.setattr(unpickle, "RECORDS", re.compile(".*"))
    for number, evil in enumerate((Evil, EvilMkdir)):
        torch.save({"model": evil(tmp_path / "touched")}, tmp_path / f"{number}.pt")
        assert "refused" in json.loads(unpickle.answer("torch", str(tmp_path / f"{number}.pt")))
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "../../etc/passwd"}, "not the name of a file"),
        ({"file": "__9_0.distcp"}, "ends before byte"),
        ({"offset": -1}, "-1 is no size"),
        ({"offset": 10**9}, "ends before byte"),
        ({"shape": [1 << 40, 16]}, "ends before byte"),
        ({"dtype": "object"}, "dtype object"),
        ({"stride": [1]}, "strides"),
    ],
)
def test_answers_of_the_child_are_checked(golden: Path, monkeypatch, change: dict, said: str) -> None:
    """The process that opens pickles may be what its pickles made of it: nothing outside the folder is read on its word."""
    folder = golden / "dist" / "iter_0000002"
    honest = guard._ask("torch_dist", [folder])

    def lying(kind: str, paths: list[Path]) -> list[Any]:
        answer = copy.deepcopy(honest)
        answer[0]["tensors"]["output_layer.weight"]["chunks"][0].update(change)
        return answer

    monkeypatch.setattr(guard, "_ask", lying)
    with pytest.raises(UsageError, match=said):
        read_megatron(folder, allow_pickle=True)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_experts", "8"),
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("add_bias_linear", True),
        ("apply_layernorm_1p", True),
        ("position_embedding_type", "learned_absolute"),
        ("rotary_interleaved", True),
        ("rotary_percent", 0.5),
        ("window_size", [4096, 0]),
        ("mtp_num_layers", 1),
        ("hidden_size", None),
    ],
)
def test_arguments_that_ours_cannot_be(tmp_path: Path, argument: str, value: Any) -> None:
    write_ranks(tmp_path, whole(60), arguments(**{argument: value}))
    with pytest.raises(UsageError, match=f"argument {argument} is"):
        read_megatron(tmp_path, allow_pickle=True)


WHOLE = "a whole number from 1 on"
KINDS: dict[str, tuple[list[Any], str]] = {
    **dict.fromkeys(("hidden_size", "num_layers", "ffn_hidden_size", "kv_channels"), ([True, -1, 1.5, "3", 10**10], WHOLE)),
    **dict.fromkeys(("max_position_embeddings", "seq_length", "padded_vocab_size"), ([True, 0, "64", [], 10**30], WHOLE)),
    **dict.fromkeys(("norm_epsilon", "rotary_base"), ([True, "x", [], float("nan"), float("inf")], "a finite number")),
    **dict.fromkeys(("group_query_attention", "qk_layernorm"), ([1, "x", []], "True or False")),
    **dict.fromkeys(("add_qkv_bias", "use_rope_scaling"), ([1, "x", []], "True or False")),
    "untie_embeddings_and_output_weights": (["False", torch.ones(2)], "True or False"),
    "consumed_train_samples": ([True, -1, 1.5, "40", [], 10**30], "no number of samples"),
    "vocab_size": ([True, 0, -1, "59", [], 59.0], "number of tokens"),
    "num_attention_heads": ([None, True, 0, "12", torch.ones(())], "num_attention_heads"),
}


@pytest.mark.parametrize("argument", KINDS)
def test_arguments_of_any_type(tmp_path: Path, argument: str) -> None:
    """What a pickle gives for a number or a flag may be anything."""
    values, said = KINDS[argument]
    for number, value in enumerate(values):
        write_ranks(tmp_path / str(number), whole(60), arguments(**{argument: value}))
        with pytest.raises(UsageError, match=said) as error:
            read_megatron(tmp_path / str(number), allow_pickle=True)
        assert argument in str(error.value) or argument == "vocab_size"


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    """Asked first: a list of a billion layers would take all memory."""
    write_ranks(tmp_path, whole(60), arguments(num_layers=10**9))
    with pytest.raises(UsageError, match="said to have 1000000000 layers, and has 27 tensors"):
        read_megatron(tmp_path, allow_pickle=True)


def test_contents_of_any_type(tmp_path: Path) -> None:
    """In the place of models, optimizers and their parts: a number, a string, a list."""
    good = optimizer_state(whole(60))["optimizer"]
    groups = good["param_groups"]
    cases: list[tuple[str, Any, str]] = [("model", value, "holds no model") for value in (True, "x", [1], None)]
    for optimizer in (
        {"optimizer": 5},
        {"optimizer": {"state": 5, "param_groups": groups}},
        {"optimizer": {"state": good["state"], "param_groups": [5]}},
    ):
        cases.append(("optimizer", optimizer, "convert with --weights-only"))
    for optimizer in (
        {"optimizer": {"state": dict.fromkeys(range(27), 3), "param_groups": groups}},
        {"optimizer": {"state": good["state"], "param_groups": [{"params": ["x"] * 18}]}},
        {"optimizer": good, "fp32_from_fp16_params": 3},
        {"optimizer": good, "fp32_from_fp16_params": [[]]},
    ):
        cases.append(("optimizer", optimizer, "of decoder.layers.0|of embedding.word_embeddings.weight has the shape None"))
    for number, (key, value, said) in enumerate(cases):
        root = write_ranks(tmp_path / str(number), whole(60), arguments(), **({key: value} if key == "optimizer" else {}))
        if key == "model":
            file = root / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
            torch.save({**torch.load(file, weights_only=False), "model": value}, file)
        with pytest.raises(UsageError, match=said):
            read_megatron(root, allow_pickle=True)


def test_splits_that_are_uneven(tmp_path: Path) -> None:
    """Tensor-parallel parts of different sizes, an odd number of gate's and up's rows, two folders of one rank."""
    for number, (name, rows) in enumerate({"output_layer.weight": 29, "decoder.layers.1.mlp.linear_fc1.weight": 35}.items()):
        root = write_ranks(tmp_path / str(number), whole(60), arguments(), 2)
        file = root / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
        content = torch.load(file, weights_only=False)
        content["model"][name] = content["model"][name][:rows].clone()
        torch.save(content, file)
        with pytest.raises(UsageError, match=f"{name} is not there exactly once"):
            read_megatron(root, allow_pickle=True)
    root = write_ranks(tmp_path / "double", whole(60), arguments())
    shutil.copytree(root / "iter_0000007" / "mp_rank_00", root / "iter_0000007" / "mp_rank_00_000")
    with pytest.raises(UsageError, match="mp_rank_00_000 and mp_rank_00 are of one rank"):
        read_megatron(root, allow_pickle=True)


def test_tensors_and_ranks_that_do_not_fit(tmp_path: Path) -> None:
    def fails(number: int, said: str, tensors: dict[str, torch.Tensor], *, tp: int = 1, remove: str = "", **more: Any) -> None:
        root = write_ranks(tmp_path / str(number), tensors, arguments(), tp, **more)
        if remove:
            shutil.rmtree(root / "iter_0000007" / remove)
        with pytest.raises(UsageError, match=said):
            read_megatron(root, allow_pickle=True)

    good = whole(60)
    without = {name: tensor for name, tensor in good.items() if name != "decoder.layers.2.mlp.linear_fc2.weight"}
    fails(0, "has no tensor layers.2.mlp.down.weight", without)
    router, other = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.gate.weight"
    fails(1, "has a tensor layers.0.moe.router.weight that its configuration", {**good, router: torch.ones(2)})
    fails(10, f"tensor {other} belongs to no", {**good, other: torch.ones(2)})
    fails(2, "final_norm.weight has the shape", {**good, "decoder.final_layernorm.weight": torch.ones(25).bfloat16()})
    fails(3, r"mp_rank_01/model_optim_rng.pt is missing", good, tp=3, remove="mp_rank_01")
    fails(9, "folders of 2 tensor-parallel ranks, and 3 saved", good, tp=3, remove="mp_rank_02")
    norm = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    fails(4, "same parameter", {**good, "decoder.layers.0.pre_mlp_layernorm.weight": good[norm]})
    old = {f"language_model.encoder.{name}": tensor for name, tensor in good.items()}
    fails(5, "before Megatron-core", old)
    wrong = optimizer_state(good)
    wrong["optimizer"]["state"][3]["exp_avg"] = torch.ones(3)
    fails(6, "exp_avg of decoder.layers.0.mlp.linear_fc1.weight has the shape", good, optimizer=wrong)
    few = optimizer_state(good)
    few["optimizer"]["param_groups"][1]["params"].pop()
    fails(7, "parameter group 1 of the optimizer has 8 parameters, the model 9 that do not decay", good, optimizer=few)
    uneven = optimizer_state(good)
    uneven["optimizer"]["param_groups"][1]["step"] = 8
    fails(8, "step counts from 7 to 8", good, optimizer=uneven)


def test_norms_that_differ_between_ranks(tmp_path: Path) -> None:
    write_ranks(tmp_path, whole(60), arguments(), 2)
    path = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(content, path)
    with pytest.raises(UsageError, match="decoder.final_layernorm.weight is the same on all tensor-parallel ranks"):
        read_megatron(tmp_path, allow_pickle=True)


def test_vocabulary_that_is_not_told(tmp_path: Path, capsys) -> None:
    write_ranks(tmp_path / "m", whole(60), arguments(None, 60))
    assert run(tmp_path / "m", tmp_path / "x") == 2
    assert "add --vocab-size" in capsys.readouterr().err
    for number in ("0", "-5"):
        assert run(tmp_path / "m", tmp_path / "x", "--vocab-size", number) == 2
        assert f"the number of tokens is {number}" in capsys.readouterr().err
    assert run(tmp_path / "m", tmp_path / "x", "--vocab-size", "57") == 0
    assert open_checkpoint(tmp_path / "x").entry("param/head.weight").shape == (57, 24)


def test_a_checkpoint_without_arguments(golden: Path, tmp_path: Path, capsys) -> None:
    """Of a program of one's own on Megatron-core: the model is told, as a configuration or as a config.json."""
    layers = Path(shutil.copytree(golden / "dist_layers", tmp_path / "layers"))
    torch.save({"iteration": 5}, layers / "iter_0000002" / "common.pt")
    assert run(layers, tmp_path / "x") == 2
    assert "--model FILE" in capsys.readouterr().err
    assert run(golden / "dist", tmp_path / "first") == 0
    (tmp_path / "odd.yaml").write_text("model: {family: llama, num_layers: '4', hidden_size: 16}\n")
    assert run(layers, tmp_path / "x", "--model", str(tmp_path / "odd.yaml"), "--vocab-size", "59") == 2
    assert "model.num_layers: '4' (text) given" in capsys.readouterr().err
    assert run(layers, tmp_path / "second", "--model", str(tmp_path / "first" / "model.yaml")) == 0
    assert run(golden / "dist", tmp_path / "hf", target="hf") == 0
    assert run(layers, tmp_path / "third", "--model", str(tmp_path / "hf" / "config.json")) == 0
    first = open_checkpoint(tmp_path / "first")
    for other in ("second", "third"):
        checkpoint = open_checkpoint(tmp_path / other)
        assert all(torch.equal(checkpoint.read(name), first.read(name)) for name in checkpoint.names())
        assert len(checkpoint.names()) == 27 and checkpoint.step == 5


def test_folders_that_are_no_checkpoint(golden: Path, tmp_path: Path) -> None:
    def fails(path: Path, said: str) -> None:
        with pytest.raises(UsageError, match=said):
            read_megatron(path, allow_pickle=True)

    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "is no Megatron checkpoint")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("12")
    fails(tmp_path / "empty", "names iter_0000012, which is not there")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("../x")
    fails(tmp_path / "empty", "neither a number nor 'release'")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").write_text("1" * 5000)
    fails(tmp_path / "empty", "neither a number nor 'release'")
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "empty" / "latest_checkpointed_iteration.txt").mkdir()
    fails(tmp_path / "empty", "is no regular file")
    dist = Path(shutil.copytree(golden / "dist" / "iter_0000002", tmp_path / "dist"))
    (dist / "metadata.json").rename(dist / "m.json")
    fails(dist, "the save was interrupted")
    (dist / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    fails(dist, "torch_dist is the backend that is read")
    (dist / "metadata.json").write_text("[" * 100_000)
    fails(dist, "is not sound JSON")
    (dist / "m.json").rename(dist / "metadata.json")
    (dist / "__0_0.distcp").write_bytes((dist / "__0_0.distcp").read_bytes()[:-100])
    fails(dist, "__0_0.distcp ends before byte|refused")


@pytest.mark.parametrize("damage", range(0, 4000, 400))
def test_damaged_pickles_give_an_error(golden: Path, tmp_path: Path, damage: int) -> None:
    dist = Path(shutil.copytree(golden / "dist" / "iter_0000002", tmp_path / "dist"))
    raw = bytearray((dist / ".metadata").read_bytes())
    raw[damage : damage + 3] = b"\xff\x00."
    (dist / ".metadata").write_bytes(raw)
    try:
        read_megatron(dist, allow_pickle=True)
    except UsageError as error:
        assert "dist" in str(error)


def test_distributed_optimizer_buffers_are_named(golden: Path, tmp_path: Path, capsys) -> None:
    legacy = Path(shutil.copytree(golden / "torch_tp2_pp2", tmp_path / "legacy"))
    (legacy / "iter_0000002" / "mp_rank_00_000" / "distrib_optim.pt").write_bytes(b"")
    assert run(legacy, tmp_path / "x") == 2
    assert "--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().err
    assert run(legacy, tmp_path / "x", "--weights-only") == 0
    assert "in Megatron's buffers" in capsys.readouterr().out


def test_options_for_megatron_alone(golden: Path, tmp_path: Path, capsys) -> None:
    command = ["--from", "native", "--to", "hf", str(golden), str(tmp_path / "x"), "--allow-pickle"]
    assert main(command) == 2
    assert "--allow-pickle is for --from megatron" in capsys.readouterr().err
    for option in ("--tp", "--pp"):
        assert run(golden / "dist", tmp_path / "x", option, "2") == 2
        assert "--tp and --pp are for --to megatron: leave them out" in capsys.readouterr().err
    for option in (["--weights-only"], ["--vocab-size", "5"], ["--model", "x.yaml"]):
        assert main([*command[:-1], *option]) == 2
        assert f"{option[0]} is for --from megatron: leave it out" in capsys.readouterr().err
