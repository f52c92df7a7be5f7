"""Conversions of Mixtral: folders that are odd or hostile, both directions, interruptions, FP8 experts, training and back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint import open_checkpoint, resolve
from checkpoint.hf.config import config_json
from checkpoint.hf.write import plan_hf
from checkpoint.native import read_native
from checkpoint.publish import PREFIX
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.sampling import Sampling
from tests.checkpoint_support import Killed, ScriptedOps
from tests.crashing import dying
from tests.hf_folders import SECTION, contents, make_folder, random_tensors
from tests.hf_models import CONTEXT, RUN, VOCAB, make
from tests.runs import make_corpus, run_here
from tools.convert import _parser, convert, main

MIXTRAL = {**SECTION, "family": "mixtral", "moe": {"num_experts": 4, "top_k": 2}}
EXPERT = "model.layers.1.block_sparse_moe.experts"
GATE = "model.layers.0.block_sparse_moe.gate.weight"
Tensors = dict[str, torch.Tensor]


def run(source: str, target: str, src: Path, dst: Path, *more: str) -> int:
    return main(["--from", source, "--to", target, str(src), str(dst), "--quiet", *more])


def mixtral(path: Path, change: Callable[[Tensors], Any] = lambda t: None, *, shards: int = 1, **keys: Any) -> Path:
    tensors = random_tensors(MIXTRAL)
    change(tensors)
    return make_folder(path, tensors, shards=shards, config=config_json(MIXTRAL), **keys)


def without(*parts: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if any(part in name for part in parts)]


def with_more(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


def swapped(a: str, b: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({a: tensors[b], b: tensors[a]})


def cast(dtype: torch.dtype, *names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in names})


ODD: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "expert": (without(f"{EXPERT}.3."), {}, f"{EXPERT}.3.w1.weight is missing (3 of "),
    "w2": (without(f"{EXPERT}.2.w2"), {}, f"{EXPERT}.2.w2.weight is missing (1 of "),
    "router": (without(GATE), {}, f"{GATE} is missing"),
    "more told": (lambda t: None, {"num_local_experts": 5}, "experts.4.w1.weight is missing (6 of "),
    "fewer told": (lambda t: None, {"num_local_experts": 3}, "experts.3.w1.weight is not known for family mixtral (6 such"),
    "one told": (lambda t: None, {"num_local_experts": 1}, "num_experts_per_tok = 2 and num_local_experts = 1"),
    "w1 for w2": (swapped(f"{EXPERT}.0.w1.weight", f"{EXPERT}.0.w2.weight"), {}, "0.w1.weight has the shape [32, 48]"),
    "router's rows": (with_more(GATE, 3, 32), {}, f"{GATE} has the shape [3, 32], config.json makes it [4, 32]"),
    "router turned": (with_more(GATE, 32, 4), {}, f"{GATE} has the shape [32, 4]"),
    "w3 of another width": (with_more(f"{EXPERT}.1.w3.weight", 40, 32), {}, f"{EXPERT}.1.w3.weight has the shape [40, 32]"),
    "bias": (with_more("model.layers.0.block_sparse_moe.gate.bias", 4), {}, "block_sparse_moe.gate.bias is not known"),
    "dense too": (with_more("model.layers.0.mlp.up_proj.weight", 48, 32), {}, "mlp.up_proj.weight is not known"),
    "stacked": (with_more("model.layers.0.mlp.experts.gate_up_proj", 4, 96, 32), {}, "experts.gate_up_proj is not known"),
    "padded name": (with_more(f"{EXPERT}.04.w1.weight", 48, 32), {}, "experts.04.w1.weight is not known"),
    "halves differ": (cast(torch.float16, f"{EXPERT}.0.w3.weight"), {}, "0.w3.weight float16: they are one tensor here"),
    "fp8": (cast(torch.float8_e4m3fn, f"{EXPERT}.0.w2.weight"), {}, f"{EXPERT}.0.w2.weight is float8_e4m3fn"),
    "jitter": (lambda t: None, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: only 0.0 is supported"),
    "shared expert": (lambda t: None, {"num_shared_experts": 1}, "num_shared_experts = 1 is not known"),
    "window": (lambda t: None, {"sliding_window": 0}, "sliding_window = 0: a whole number from 1 on"),
    "tied": (lambda t: None, {"tie_word_embeddings": True}, "tie_word_embeddings is true, and lm_head.weight differs"),
    "untied": (without("lm_head"), {}, "lm_head.weight is missing"),
    "activation": (lambda t: None, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_refused(tmp_path: Path, name: str, capsys) -> None:
    """Of a missing expert as of one that is too many, before a byte is written, with the tensor's or the key's name."""
    change, keys, said = ODD[name]
    folder = mixtral(tmp_path / "hf", change, **keys)
    for target in ("native", "hf"):
        assert run("hf", target, folder, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert said in error and error.startswith(f"error: {folder}") and len(error) < 400, error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_taken(tmp_path: Path) -> None:
    """Odd and right: the router or single experts in another dtype, a window, a tied head with or without a copy, every expert
    for every token; w1 and w3 are of one shape, and which is which goes by the name alone. All come back byte for byte."""
    tied = {"tie_word_embeddings": True}
    swap = swapped(f"{EXPERT}.0.w1.weight", f"{EXPERT}.0.w3.weight")
    good: list[tuple[Callable[[Tensors], Any], dict[str, Any]]] = [
        (cast(torch.float32, GATE), {}),
        (cast(torch.float32, *(f"{EXPERT}.2.{part}.weight" for part in ("w1", "w2", "w3"))), {}),
        (lambda t: None, {"sliding_window": 7}),
        (lambda t: None, {"num_experts_per_tok": 4}),
        (lambda t: None, {"output_router_logits": True, "router_jitter_noise": 0.0}),
        (without("lm_head"), tied),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), tied),
        (swap, {}),
    ]
    for number, (change, keys) in enumerate(good):
        folder = mixtral(tmp_path / f"{number}", change, shards=1 + number % 3, **keys)
        native = tmp_path / f"{number}.native"
        assert run("hf", "native", folder, native) == run("native", "hf", native, tmp_path / f"{number}.back") == 0
        assert contents(tmp_path / f"{number}.back") == contents(folder)
    gate_up = open_checkpoint(tmp_path / "7.native").read("param/layers.1.moe.experts.0.gate_up.weight")
    plain = random_tensors(MIXTRAL)
    assert torch.equal(gate_up, torch.cat([plain[f"{EXPERT}.0.w3.weight"], plain[f"{EXPERT}.0.w1.weight"]]))
    assert read_native(tmp_path / "2.native").section["sliding_window"] == 7


def test_shards_that_lie(tmp_path: Path, capsys) -> None:
    """H7, over three shards: one is missing, the index names one that never was, a key is in two."""
    def refused(folder: Path, said: str) -> None:
        assert run("hf", "native", folder, tmp_path / "out") == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()

    second = "model-00002-of-00003.safetensors"
    folder = mixtral(tmp_path / "a", shards=3)
    (folder / second).unlink()
    refused(folder, f"names {second}, which is not there: copy the missing file too")
    folder = mixtral(tmp_path / "b", shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][GATE] = "model-00004-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "names model-00004-of-00003.safetensors, which is not there")
    folder = mixtral(tmp_path / "c", shards=3)
    first = load_file(folder / "model-00001-of-00003.safetensors")
    twice = next(name for name in first if ".experts." in name)
    save_file(load_file(folder / second) | {twice: first[twice]}, folder / second)
    refused(folder, f"the tensor {twice} is in model-00001-of-00003.safetensors and in {second}")


def test_a_checkpoint_that_disagrees_with_its_configuration(tmp_path: Path) -> None:
    """The way back: an expert too few, one too many, a router of another size."""
    assert run("hf", "native", mixtral(tmp_path / "hf"), tmp_path / "native") == 0
    model = read_native(tmp_path / "native")
    item = next(item for item in model.items if item.name == "layers.1.moe.experts.3.down.weight")
    rest = [each for each in model.items if each is not item]
    moe = {**model.section["moe"], "num_experts": 5}
    for changed, said in (
        (replace(model, items=rest), "no tensor layers.1.moe.experts.3.down.weight"),
        (replace(model, items=[*model.items, replace(item, name=item.name.replace(".3.", ".4."))]), "experts.4.down.weight"),
        (replace(model, items=[*rest, replace(item, shape=(32, 40))]), r"experts.3.down.weight has the shape \[32, 40\]"),
        (replace(model, section={**model.section, "moe": moe}), "no tensor layers.0.moe.experts.4.down.weight"),
        (replace(model, section={**model.section, "moe": {**moe, "norm_top_k": False}}), "model.moe.norm_top_k false"),
    ):
        with pytest.raises(UsageError, match=said):
            plan_hf(changed)


@pytest.mark.parametrize(("source", "target"), [("hf", "native"), ("native", "hf")])
def test_interrupted(tmp_path: Path, source: str, target: str) -> None:
    """A full disk, Ctrl-C, SIGTERM's exception and a death without handlers, from the first operation to the rename, and one
    real SIGKILL."""
    src = mixtral(tmp_path / "hf", shards=2)
    if source == "native":
        assert run("hf", "native", src, tmp_path / "native") == 0
        src = tmp_path / "native"
    there = {path.name for path in tmp_path.iterdir()}
    dst = tmp_path / "out"
    arguments = _parser().parse_args(["--from", source, "--to", target, str(src), str(dst), "--quiet"])
    count = ScriptedOps()
    assert convert(arguments, count) == 0
    good = contents(dst)
    renamed = [number for number, (name, _) in enumerate(count.log) if name == "rename"][-1]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number in (0, 1, renamed // 2, renamed - 1, renamed):
        for error in (full, KeyboardInterrupt(), SystemExit(143), Killed()):
            shutil.rmtree(dst, ignore_errors=True)
            with pytest.raises((QEffectError, KeyboardInterrupt, SystemExit, Killed)):
                convert(arguments, ScriptedOps(number, error))
            assert not dst.exists()
            assert isinstance(error, Killed) or {path.name for path in tmp_path.iterdir()} == there
    for left in tmp_path.glob(f"{PREFIX}*"):
        shutil.rmtree(left)
    pid = os.fork()
    if pid == 0:
        try:
            convert(arguments, dying(6))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not dst.exists() and list(tmp_path.glob(f"{PREFIX}*"))
    assert convert(arguments) == 0 and contents(dst) == good
    assert {path.name for path in tmp_path.iterdir()} == there | {"out"}


TOKENS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))


def trained(tmp_path: Path, name: str, dtype: torch.dtype, *more: str) -> None:
    """``hf``, ``native`` and ``run``: a model that ``transformers`` made, and three steps from it."""
    make(name).to(dtype).save_pretrained(tmp_path / "hf")
    assert run("hf", "native", tmp_path / "hf", tmp_path / "native") == 0
    make_corpus(tmp_path / "corpus", vocab=VOCAB)
    (tmp_path / "tiny.yaml").write_text(RUN.format(base=tmp_path / "native" / "model.yaml"))
    start = [f"data.train={tmp_path / 'corpus'}", f"checkpoint.init_from={tmp_path / 'native'}", "data.valid=null"]
    assert run_here(tmp_path, "run", *start, *more)[0] == 0


def test_trained_here_and_loaded_there(tmp_path: Path) -> None:
    """Three steps with a window, eleven experts and the balance loss; transformers loads the export: equal logits, which moved,
    and the same greedy tokens."""
    trained(tmp_path, "mixtral-window", torch.float32)
    assert run("native", "hf", tmp_path / "run", tmp_path / "out") == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    start = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    with torch.no_grad():
        before, after = start(TOKENS).logits, theirs(TOKENS).logits
    mine = load_for_inference(tmp_path / "run", device="cpu", fp8=False, context=CONTEXT).model
    torch.testing.assert_close(mine.logits(TOKENS), after, rtol=0, atol=1e-4)  # logits reach 100: 1e-6 of them
    assert (after - before).abs().max() > 1e-2
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    made = [new.token for new in Generator(mine, Sampling(temperature=0, repetition_penalty=1.7), 1).run([[3, 50, 7]], 12)]
    due = theirs.generate(
        torch.tensor([[3, 50, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.int64), do_sample=False, max_new_tokens=12,
        repetition_penalty=1.7, pad_token_id=0,
    )  # fmt: skip
    assert made == due[0, 3:].tolist() and len(set(made)) > 5


def test_fp8_experts_and_their_scales(tmp_path: Path, monkeypatch) -> None:
    """Each expert's cached bytes with its own scale; a layer outside FP8 stays; inputs have no scale there. transformers loads
    it, as FP8 modules and as dequantised weights (its own check for a GPU and for the package accelerate set aside)."""
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    trained(tmp_path, "mixtral", torch.bfloat16, "precision.fp8.recipe=delayed", "precision.fp8.high_precision_last=1")
    arguments = ["--from", "native", "--to", "hf", str(tmp_path / "run"), str(tmp_path / "out"), "--fp8", "--json"]
    assert main(arguments) == 0
    checkpoint, tensors = open_checkpoint(resolve(tmp_path / "run")), load_file(tmp_path / "out" / "model.safetensors")
    wide = {}
    for layer, part, e in ((layer, part, e) for layer in (0, 1) for part in ("gate_up", "down") for e in range(4)):
        ours, theirs = f"layers.{layer}.moe.experts.{e}.{part}.weight", f"model.layers.{layer}.block_sparse_moe.experts.{e}"
        names = [f"{theirs}.{w}.weight" for w in (("w1", "w3") if part == "gate_up" else ("w2",))]
        cached = checkpoint.read(f"cached_weight/{ours}")
        assert torch.equal(torch.cat([tensors[n].view(torch.uint8) for n in names]), cached.view(torch.uint8))
        scale = checkpoint.read(f"cached_weight_scale_inv/{ours}").reshape(1, 1)
        assert all(torch.equal(tensors[f"{n}_scale_inv"], scale) for n in names)
        wide[layer, part, e] = (cached.float() * scale).bfloat16()
    assert len({float(tensors[name]) for name in tensors if name.endswith("w2.weight_scale_inv")}) > 5, "each its own"
    assert not any("activation_scale" in name for name in tensors)
    assert tensors["model.layers.2.block_sparse_moe.experts.0.w1.weight"].dtype is torch.bfloat16  # high_precision_last
    told = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    outside = told["modules_to_not_convert"]
    assert told["activation_scheme"] == "dynamic" and len(outside) == len(set(outside))
    assert {"lm_head", "model.layers.2.block_sparse_moe.experts", "model.layers.0.block_sparse_moe.gate"} <= set(outside)

    model = read_native(tmp_path / "run", fp8=True)
    fewer = {name: scales for name, scales in model.fp8.items() if name != "layers.0.moe.experts.1.down.weight"}
    with pytest.raises(UsageError, match="--fp8: layers.0.moe.experts.1.down.weight is not in FP8, unlike others"):
        plan_hf(replace(model, fp8=fewer))

    def loaded(**patched: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(quantizer, "is_accelerate_available", lambda: True)
            if patched:
                patch.setattr(quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
            return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    plain = loaded().model.layers
    stacked = loaded(fp8=True).model.layers
    for layer in (0, 1):
        due = torch.stack([wide[layer, "gate_up", e] for e in range(4)])
        assert torch.equal(plain[layer].mlp.experts.gate_up_proj.bfloat16(), due)
        experts = stacked[layer].mlp.experts
        assert type(experts).__name__ == "FP8Experts" and experts.gate_up_proj_scale_inv.shape == (4, 2, 1)
        for kind in ("gate_up", "down"):
            weight, scale = getattr(experts, f"{kind}_proj"), getattr(experts, f"{kind}_proj_scale_inv")
            due = torch.stack([wide[layer, kind, e] for e in range(4)])
            assert torch.equal((weight.float() * scale[:, :1]).bfloat16(), due)
    assert type(stacked[2].mlp.experts).__name__ == "MixtralExperts"
