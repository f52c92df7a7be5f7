"""Megatron's checkpoints: what Megatron-core wrote (golden), and what its layout's rules give, is what one process had."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import open_checkpoint
from checkpoint.megatron import guard
from checkpoint.megatron.names import ours, theirs
from checkpoint.megatron.read import read_megatron
from checkpoint.publish import publish
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.errors import UsageError
from tests.hf_folders import contents, tensors_of
from tests.megatron_support import (
    LAYOUTS,
    SIZES,
    arguments,
    extra_state,
    in_this_process,
    optimizer_state,
    run,
    unpacked,
    whole,
    write_ranks,
)
from tests.runs import make_corpus, run_here
from tools.convert import main

KINDS = {"param": "param", "master": "master", "exp_avg": "moment1", "exp_avg_sq": "moment2"}


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
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles are opened in this process, which saves each test a start of torch."""
    monkeypatch.setattr(guard, "ask_child", in_this_process)


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


def test_float32_takes_the_masters(golden: Path, converted: Path, tmp_path: Path) -> None:
    """Where a checkpoint has them they are wider than what was computed with; without --dtype the latter go out."""
    expected = load_file(golden / "expected.safetensors")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    kind = "param" if converted.name == "dist_layers" else "master"  # that one has no optimizer
    for option, wanted in ((["--dtype", "float32"], expected[f"{kind}/{name}"].float()), ([], expected[f"param/{name}"])):
        out = tmp_path / str(len(option))
        assert main(["--from", "native", "--to", "hf", str(converted), str(out), "--quiet", *option]) == 0
        assert torch.equal(tensors_of(out)["model.layers.1.mlp.down_proj.weight"], wanted)


def test_weights_only_and_what_is_left_behind(golden: Path, tmp_path: Path, capsys) -> None:
    assert run(golden / "torch_tp2_pp2", tmp_path / "a", "--weights-only") == 0
    said = capsys.readouterr().out
    for what in ("27 tensors exp_avg of", "27 tensors fp32_param of", "5 rows of padding of head.weight", "rng_state", "args"):
        assert f"left behind: {what}" in said
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.step == 0 and all(name.startswith("param/") for name in checkpoint.names())
    assert run(golden / "dist", tmp_path / "hf", target="hf") == 0  # straight on: parameters alone
    capsys.readouterr()
    assert run(golden / "torch_tp2_pp2", tmp_path / "hf2", target="hf") == 0
    assert "left behind: 27 tensors exp_avg of" in capsys.readouterr().out
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
