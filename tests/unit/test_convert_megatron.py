"""Megatron's checkpoints: what Megatron-core wrote (golden), and what its layout's rules give, is what one process had."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import open_checkpoint
from checkpoint.hf.config import config_json
from checkpoint.megatron import guard, unpickle
from checkpoint.megatron.names import ours, split_axis, theirs
from checkpoint.megatron.read import read_megatron
from checkpoint.megatron.unpickle import METADATA_RECORDS, RECORDS, Refused, Restricted
from checkpoint.megatron.write import Ranks, write_megatron
from checkpoint.publish import publish
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.errors import UsageError
from tests.checkpoint_support import ScriptedOps
from tests.hf_folders import SECTION, contents, make_folder, random_tensors
from tests.megatron_support import SIZES, arguments, extra_state, unpacked, whole, write_ranks
from tests.runs import make_corpus, run_here
from tools.convert import main

LAYOUTS = ("dist", "dist_tp2_pp2", "torch_tp2_pp2", "dist_layers")
KINDS = {"param": "param", "master": "master", "exp_avg": "moment1", "exp_avg_sq": "moment2"}


def run(src: Path, dst: Path, *more: str, target: str = "native") -> int:
    return main(["--from", "megatron", "--to", target, str(src), str(dst), "--quiet", "--allow-pickle", *more])


def in_this_process(kind: str, paths: Sequence[Path]) -> list[str]:
    return [unpickle.answer(kind, str(path)) for path in paths]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module", params=LAYOUTS)
def converted(request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden checkpoint of Megatron-core, converted with all that it has; those of four ranks with the real process."""
    path = tmp_path_factory.mktemp(request.param) / request.param
    with pytest.MonkeyPatch.context() as patched:
        if not request.param.endswith("tp2_pp2"):
            patched.setattr(guard, "ask_child", in_this_process)
        assert run(golden / request.param, path) == 0
    return path


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests have the pickles opened in this process, which saves each a start of torch; those marked ``child`` do not."""
    if "child" not in request.fixturenames:
        monkeypatch.setattr(guard, "ask_child", in_this_process)


@pytest.fixture
def child() -> None:
    """Asks for the process that opens pickles to be one."""


# ---- what Megatron-core wrote --------------------------------------------------------------------------------------


def test_every_tensor_is_what_one_process_had(golden: Path, converted: Path) -> None:
    """Parameters, masters and both moments, whatever layout saved them: equal bits, without the vocabulary's padding."""
    expected = load_file(golden / "expected.safetensors")
    checkpoint = open_checkpoint(converted)
    compared = 0
    for key, tensor in expected.items():
        kind, _, name = key.partition("/")
        if kind not in KINDS or (kind != "param" and converted.name == "dist_layers"):  # that one has no optimizer
            continue
        found = ours(name)
        assert found is not None
        tensor = tensor[:59] if found in ("embedding.weight", "head.weight") else tensor
        assert torch.equal(checkpoint.read(f"{KINDS[kind]}/{found}"), tensor), key
        compared += 1
    assert compared == (27 if converted.name == "dist_layers" else 4 * 27)
    assert checkpoint.step == 2 and checkpoint.meta["samples"] == 16 and checkpoint.meta["tokens"] == 256
    if converted.name != "dist_layers":
        assert int(checkpoint.read("optimizer/step")) == 2
    assert checkpoint.meta["kind"] == ("weights" if converted.name == "dist_layers" else "training")


def test_logits_are_megatrons(golden: Path, converted: Path) -> None:
    """Megatron-core's own model, in float32, on the same tokens: within 1e-5 of logits up to 20."""
    expected = load_file(golden / "expected.safetensors")
    path = converted.parent / "wide"
    assert main(["--from", "native", "--to", "native", str(converted), str(path), "--dtype", "float32", "--quiet"]) == 0
    if converted.name != "dist_layers":  # masters are wider than what Megatron computed with
        path = converted.parent / "wide_params"
        from checkpoint.fileops import FileOps
        from checkpoint.native import read_native, write_native

        model = read_native(converted).cast("float32")
        publish(path, lambda folder: write_native(model, folder, FileOps()), FileOps())
    logits = load_for_inference(path, device="cpu").model.logits(expected["tokens"])
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)
    assert expected["logits"].abs().max() > 1


def test_training_goes_on_where_megatron_was(golden: Path, converted: Path, tmp_path: Path, capsys) -> None:
    """Moments, step count and position in the data: with gradients clipped to nothing a step decays the moments and no more."""
    make_corpus(tmp_path / "corpus", vocab=59)
    (tmp_path / "tiny.yaml").write_text(
        f"base: {converted / 'model.yaml'}\nrun: {{device: cpu}}\ndata: {{seq_len: 16, microbatch_size: 2}}\n"
        "pipeline: {microbatches: 2}\noptim: {lr: 1.0e-38, weight_decay: 0.0, warmup_steps: 0, clip_norm: 1.0e-35}\n"
        f"train: {{steps: 3}}\ncheckpoint: {{init_from: {converted}, init_state: training}}\nlogging: {{progress: 'off'}}\n"
    )
    if converted.name == "dist_layers":
        with pytest.raises(UsageError, match="holds no optimizer state: set checkpoint.init_state=weights"):
            run_here(tmp_path, "run", "data.valid=null")
        return
    code, said = run_here(tmp_path, "run", "data.valid=null")
    assert code == 0 and any("training goes on after step 2" in line for line in said)
    before, after = open_checkpoint(converted), open_checkpoint(tmp_path / "run/checkpoints/step_00000003")
    assert int(after.read("optimizer/step")) == 3
    assert after.meta["data"]["next_sample"] == 16 + 4 and after.meta["tokens"] == 256 + 4 * 16
    for name in before.names():
        kind, _, _ = name.partition("/")
        if kind in ("master", "param"):
            assert torch.equal(after.read(name), before.read(name)), name
        if kind in ("moment1", "moment2"):
            decayed = before.read(name) * (0.9 if kind == "moment1" else 0.95)
            assert torch.equal(after.read(name), decayed), name


def test_weights_only_and_what_is_left_behind(golden: Path, tmp_path: Path, capsys) -> None:
    assert run(golden / "torch_tp2_pp2", tmp_path / "a", "--weights-only") == 0
    said = capsys.readouterr().out
    for what in ("27 tensors exp_avg of", "27 tensors fp32_param of", "5 rows of padding of head.weight", "rng_state", "args"):
        assert f"left behind: {what}" in said
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.step == 0 and all(name.startswith("param/") for name in checkpoint.names())
    assert run(golden / "dist", tmp_path / "hf", target="hf") == 0  # straight on: parameters alone
    assert run(golden / "torch_tp2_pp2", tmp_path / "hf2", target="hf") == 0
    assert contents(tmp_path / "hf") == contents(tmp_path / "hf2")


# ---- from the rules of the layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "padded"), [(2, 260), (3, 261), (4, 260)])
def test_vocabulary_of_259(tmp_path: Path, tp: int, padded: int) -> None:
    """C4: padded for 2, 3 and 4 ranks, and without its padding here."""
    tensors = whole(padded)
    write_ranks(tmp_path, tensors, arguments(259, padded), tp)
    model = read_megatron(tmp_path, allow_pickle=True)
    read = {item.name: item.read() for item in model.items}
    assert read["embedding.weight"].shape == (259, 24)
    for name, tensor in tensors.items():
        wanted = tensor[:259] if name.startswith(("embedding", "output_layer")) else tensor
        assert torch.equal(read[str(ours(name))], wanted), name


@pytest.mark.parametrize(("pp", "vp"), [(2, 1), (4, 1), (2, 2)])
def test_pipeline_and_virtual_stages(tmp_path: Path, pp: int, vp: int) -> None:
    tensors = whole(60)
    write_ranks(tmp_path, tensors, arguments(), 2, pp, vp)
    model = read_megatron(tmp_path, allow_pickle=True)
    for item in model.items:
        assert torch.equal(item.read(), tensors[theirs(item.name)][: item.shape[0]]), item.name


def test_tensors_that_lay_on_gpus(tmp_path: Path, monkeypatch) -> None:
    """Files say where each tensor was; it is read without that device."""
    tensors = whole(60)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
    write_ranks(tmp_path, tensors, arguments(), 2)
    monkeypatch.undo()
    monkeypatch.setattr(guard, "ask_child", in_this_process)
    items = read_megatron(tmp_path, allow_pickle=True).items
    assert all(torch.equal(item.read(), tensors[theirs(item.name)][: item.shape[0]]) for item in items)


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_on_the_last_stage(tmp_path: Path, differs: bool) -> None:
    """Megatron keeps a copy there; it has to be the embedding."""
    tensors = whole(60)
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"] + differs
    write_ranks(tmp_path, tensors, arguments(untie_embeddings_and_output_weights=False), 2, 2)
    if differs:
        with pytest.raises(UsageError, match=r"output_layer.weight is tied to embedding.word_embeddings.weight, and differs"):
            read_megatron(tmp_path, allow_pickle=True)
    else:
        model = read_megatron(tmp_path, allow_pickle=True)
        assert "head.weight" not in {item.name for item in model.items} and model.section["tie_word_embeddings"]


def test_fp8_scales_and_histories_come_along(tmp_path: Path) -> None:
    """Transformer Engine's extra states (here from the rules of its format) become scales and histories of our roles, with
    which a run under delayed scaling starts; ranks that did not reduce are taken together."""
    tensors = whole(64)
    modules = [name.removesuffix(".weight") for name in tensors if ".linear_" in name and name.endswith(".weight")]
    states = {module: extra_state(5, seed) for seed, module in enumerate(modules)}
    optimizer = optimizer_state(tensors)
    sizes = {"hidden_size": 24}
    write_ranks(tmp_path / "m", tensors, arguments(64, 64, **sizes), extra=states, optimizer=optimizer)
    assert run(tmp_path / "m", tmp_path / "native") == 0
    checkpoint = open_checkpoint(tmp_path / "native")
    for module, raw in states.items():
        state = pickle.loads(raw.numpy().tobytes())
        layer = str(ours(f"{module}.weight")).removesuffix(".weight")
        for kind, side, column in (("input", "fwd", 0), ("weight", "fwd", 1), ("grad_output", "bwd", 0)):
            history = state[f"amax_history_{side}"][:, column]
            newest_first = torch.cat([history[1:].flip(0), torch.zeros(1)])
            assert torch.equal(checkpoint.read(f"amax_history/{layer}.{kind}"), newest_first)
            assert torch.equal(checkpoint.read(f"scale/{layer}.{kind}"), state[f"scale_{side}"][column])
            assert float(checkpoint.read(f"amax_open/{layer}.{kind}")) == -1
    assert len([name for name in checkpoint.names() if name.startswith("scale/")]) == 3 * len(modules)


def test_fp8_training_goes_on_with_them(tmp_path: Path, monkeypatch) -> None:
    """The first step quantises with Megatron's scales, without calibration, and rolls its histories on."""
    for size, value in {"hidden": 32, "heads": 4, "groups": 4, "head_dim": 16, "ffn": 48}.items():
        monkeypatch.setitem(SIZES, size, value)
    tensors = {name: tensor * 0.1 if tensor.dim() > 1 else tensor for name, tensor in whole(64).items()}
    modules = [name.removesuffix(".weight") for name in tensors if ".linear_" in name and name.endswith(".weight")]
    states = {module: extra_state(5, seed) for seed, module in enumerate(modules)}
    args = arguments(64, 64)
    write_ranks(tmp_path / "m", tensors, args, extra=states, optimizer=optimizer_state(tensors))
    assert run(tmp_path / "m", tmp_path / "native") == 0
    make_corpus(tmp_path / "corpus")
    (tmp_path / "tiny.yaml").write_text(
        f"base: {tmp_path / 'native' / 'model.yaml'}\nrun: {{device: cpu}}\ndata: {{seq_len: 16, microbatch_size: 2}}\n"
        "pipeline: {microbatches: 2}\noptim: {lr: 1.0e-5, warmup_steps: 0}\ntrain: {steps: 8}\n"
        "precision: {fp8: {recipe: delayed, history: 5}}\n"
        f"checkpoint: {{init_from: {tmp_path / 'native'}, init_state: training}}\nlogging: {{progress: 'off'}}\n"
    )
    with pytest.raises(UsageError, match="amax histories of 5 windows: set precision.fp8.history=5"):
        run_here(tmp_path, "other", "data.valid=null", "precision.fp8.history=4")
    assert run_here(tmp_path, "run", "data.valid=null")[0] == 0
    before, after = open_checkpoint(tmp_path / "native"), open_checkpoint(tmp_path / "run/checkpoints/step_00000008")
    compared = 0
    for name in before.names():
        if name.startswith("amax_history/"):
            rolled = after.read(name)
            assert torch.equal(rolled[1:], before.read(name)[:-1]) and rolled[0] > 0, name
            compared += 1
    assert compared == 3 * len(modules)


def optimizer_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As torch's Adam numbers it in Megatron's groups: matrices first, then what does not decay."""
    groups = [[n for n, t in tensors.items() if (t.dim() > 1) == decays] for decays in (True, False)]
    order = [name for group in groups for name in group]
    state = {i: {kind: tensors[n].float() + k for k, kind in enumerate(("exp_avg", "exp_avg_sq"))} for i, n in enumerate(order)}
    numbers = iter(range(len(order)))
    made = [{"wd_mult": float(i == 0), "step": 7, "params": [next(numbers) for _ in group]} for i, group in enumerate(groups)]
    masters = [[tensors[name].float() for name in group] for group in groups]
    return {"optimizer": {"state": state, "param_groups": made}, "fp32_from_fp16_params": masters}


# ---- back ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(), ("--tp", "2", "--pp", "2"), ("--tp", "1"), ("--pp", "4")])
def test_what_is_written_reads_as_what_was_there(golden: Path, tmp_path: Path, ranks: tuple[str, ...]) -> None:
    """Both layouts, any ranks: every parameter bit for bit, by our own reader (whose judge is Megatron's golden). That
    Megatron-core itself loads both was tried with tests/golden/make_megatron.py --check."""
    assert run(golden / "dist", tmp_path / "megatron", *ranks, target="megatron") == 0
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert run(tmp_path / "megatron", tmp_path / "back") == 0
    back, expected = open_checkpoint(tmp_path / "back"), load_file(golden / "expected.safetensors")
    for name in back.names():
        wanted = expected[f"param/{_local(theirs(name.removeprefix('param/')))}"]
        assert torch.equal(back.read(name), wanted[: back.entry(name).shape[0]]), name
    assert len(back.names()) == 27


def _local(name: str) -> str:
    """Norms by themselves, as the golden's model has them."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def test_torch_reads_what_is_written(golden: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint itself, in whole tensors, over several files."""
    import torch.distributed.checkpoint as dcp

    assert run(golden / "dist", tmp_path / "megatron", "--max-shard-size", "20KB", target="megatron") == 0
    folder = tmp_path / "megatron" / "release"
    assert len(list(folder.glob("*.distcp"))) > 2
    expected = load_file(golden / "expected.safetensors")
    wanted = {
        "decoder.layers.mlp.linear_fc1.weight": torch.empty(4, 48, 16, dtype=torch.bfloat16),
        "output_layer.weight": torch.empty(59, 16, dtype=torch.bfloat16),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": torch.empty(4, 16, dtype=torch.bfloat16),
    }
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    assert torch.equal(wanted["output_layer.weight"], expected["param/output_layer.weight"][:59])
    for i in range(4):
        fc1 = wanted["decoder.layers.mlp.linear_fc1.weight"][i]
        assert torch.equal(fc1, expected[f"param/decoder.layers.{i}.mlp.linear_fc1.weight"])
        norm = wanted["decoder.layers.self_attention.linear_qkv.layer_norm_weight"][i]
        assert torch.equal(norm, expected[f"param/decoder.layers.{i}.input_layernorm.weight"])


def test_which_dimension_tensor_parallelism_cuts() -> None:
    """As Megatron's column-parallel (rows, biases too), row-parallel (columns) and replicated parameters."""
    at = "decoder.layers.3."
    cut = {
        "embedding.word_embeddings.weight": 0,
        "output_layer.weight": 0,
        f"{at}self_attention.linear_qkv.weight": 0,
        f"{at}self_attention.linear_qkv.bias": 0,
        f"{at}mlp.linear_fc1.weight": 0,
        f"{at}self_attention.linear_proj.weight": 1,
        f"{at}mlp.linear_fc2.weight": 1,
        f"{at}self_attention.linear_qkv.layer_norm_weight": None,
        f"{at}mlp.linear_fc1.layer_norm_weight": None,
        f"{at}self_attention.q_layernorm.weight": None,
        "decoder.final_layernorm.weight": None,
    }
    assert {name: split_axis(name) for name in cut} == cut


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("ranks", [(), ("--tp", "2")])
def test_biases_and_norms_of_other_families(tmp_path: Path, family: str, ranks: tuple[str, ...]) -> None:
    """Biases of q, k and v, norms of q and k: there and back by our own rules."""
    section = {**SECTION, "family": family}
    folder = make_folder(tmp_path / "hf", random_tensors(section), config=config_json(section))
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "m"), "--quiet", *ranks]) == 0
    assert main(["--from", "hf", "--to", "native", str(folder), str(tmp_path / "n"), "--quiet"]) == 0
    assert run(tmp_path / "m", tmp_path / "back") == 0
    back, direct = open_checkpoint(tmp_path / "back"), open_checkpoint(tmp_path / "n")
    assert back.names() == direct.names() and back.meta["config"]["model"]["family"] == family
    assert all(torch.equal(back.read(name), direct.read(name)) for name in back.names())


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ({"family": "mistral", "sliding_window": 8}, (), "model.sliding_window is 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (), "model.rope_scaling is"),
        ({"attention_bias": "all"}, (), "model.attention_bias is 'all'|has no counterpart"),
        ({}, ("--tp", "3"), "3 tensor-parallel ranks do not divide 2"),
        ({}, ("--pp", "0"), "0 pipeline ranks"),
        ({}, ("--pp", "3"), "3 pipeline ranks do not divide 2"),
    ],
)
def test_what_megatron_cannot_be(tmp_path: Path, capsys, change: dict, options: tuple[str, ...], said: str) -> None:
    section = {**SECTION, **change}
    folder = make_folder(tmp_path / "hf", random_tensors(section), config=config_json(section))
    command = ["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "out"), "--quiet", *options]
    assert main(command) == 2
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "out").exists()


def test_a_failure_leaves_no_megatron_checkpoint(golden: Path, tmp_path: Path) -> None:
    model = read_megatron(golden / "dist_layers", allow_pickle=True)
    for number, ranks in enumerate((None, Ranks(2, 1))):

        def write(dst: Path, ops: ScriptedOps, ranks: Ranks | None = ranks) -> None:
            publish(dst, lambda folder: write_megatron(model, folder, ops, ranks), ops)

        count = ScriptedOps()
        write(tmp_path / f"good{number}", count)
        for at in range(0, count.count - 1, 5):
            dst = tmp_path / f"{number}.{at}"
            with pytest.raises(Exception, match="Input/output error"):
                write(dst, ScriptedOps(at))
            assert not dst.exists() and not list(tmp_path.glob(".tmp-*"))


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
        ("num_experts", 8),
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
    router = "decoder.layers.0.mlp.router.weight"
    fails(1, f"tensor {router} belongs to no", {**good, router: torch.ones(2)})
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
    assert run(tmp_path / "m", tmp_path / "x", "--vocab-size", "57") == 0
    assert open_checkpoint(tmp_path / "x").entry("param/head.weight").shape == (57, 24)


def test_a_checkpoint_without_arguments(golden: Path, tmp_path: Path, capsys) -> None:
    """Of a program of one's own on Megatron-core: the model is told, as a configuration or as a config.json."""
    layers = Path(shutil.copytree(golden / "dist_layers", tmp_path / "layers"))
    torch.save({"iteration": 5}, layers / "iter_0000002" / "common.pt")
    assert run(layers, tmp_path / "x") == 2
    assert "--model FILE" in capsys.readouterr().err
    assert run(golden / "dist", tmp_path / "first") == 0
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
    dist = Path(shutil.copytree(golden / "dist" / "iter_0000002", tmp_path / "dist"))
    (dist / "metadata.json").rename(dist / "m.json")
    fails(dist, "the save was interrupted")
    (dist / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    fails(dist, "torch_dist is the backend that is read")
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
