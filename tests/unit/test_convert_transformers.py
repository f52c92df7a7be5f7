"""Conversion against ``transformers``: what it saves comes back byte for byte, what we trained it loads and agrees with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers

from checkpoint import open_checkpoint, resolve
from checkpoint.hf.config import KEYS, model_section
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.app.text import tokenizer_of
from qeffect_lm.errors import UsageError
from tests.hf_folders import contents
from tests.hf_models import CONTEXT, MODELS, RUN, VOCAB, make
from tests.runs import make_corpus, metrics_of, run_here
from tools.convert import main


def run(source: str, target: str, src: Path, dst: Path, *more: str) -> None:
    assert main(["--from", source, "--to", target, str(src), str(dst), "--quiet", *more]) == 0


@pytest.mark.parametrize("family", KEYS)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    """Each key that may be absent, by itself, against the defaults of the family's configuration class."""
    sizes = {"vocab_size": 64, "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 32, "max_position_embeddings": 256}
    if family == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 3, "n_head": 2}
    more = {"use_sliding_window": True} if family.startswith("qwen") else {}
    section = model_section({"model_type": family, **sizes, **more}).section
    theirs = transformers.AutoConfig.for_model(family, **sizes, **more)
    for ours, (key, absent) in KEYS[family].items():
        if ours == "max_position_embeddings" and absent is None:
            continue
        due = getattr(theirs, key, None)
        if ours in section and due is not None:
            assert section[ours] == due, key
    rope = theirs.rope_parameters["rope_theta"] if family != "gpt2" else 10000.0
    assert section["rope_theta"] == rope and section["rope_scaling"] == {"type": "none"}
    if family == "mixtral":
        assert section["moe"] == {"num_experts": 8, "top_k": 2, "aux_loss_coef": 0.001} and theirs.sliding_window is None
        assert (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.router_aux_loss_coef) == (8, 2, 0.001)
        assert section["sliding_window"] is None
    elif family != "llama" and family != "gpt2":
        assert section["sliding_window"] == theirs.sliding_window == 4096
        assert section["max_window_layers"] == getattr(theirs, "max_window_layers", 0)
    if family.startswith("qwen") or family in ("mistral", "mixtral"):
        assert section["num_kv_heads"] == theirs.num_key_value_heads == (32 if family.startswith("qwen") else 8)
        few = {**sizes, "num_attention_heads": 16}
        assert model_section({"model_type": family, **few, "num_key_value_heads": None}).section["num_kv_heads"] == 16
        absent_kv = transformers.AutoConfig.for_model(family, **few).num_key_value_heads
        assert model_section({"model_type": family, **few}).section["num_kv_heads"] == absent_kv
    if family == "llama":
        del sizes["max_position_embeddings"]
        assert model_section({"model_type": family, **sizes}).section["max_position_embeddings"] == 2048
        assert transformers.AutoConfig.for_model(family, **sizes).max_position_embeddings == 2048


def saved(name: str, path: Path, dtype: torch.dtype = torch.bfloat16, size: str = "50GB") -> Path:
    make(name).to(dtype).save_pretrained(path, max_shard_size=size)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saved_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """In its own layout, and sharded anew as transformers itself would have done."""
    one, many = saved(name, tmp_path / "one"), saved(name, tmp_path / "many", size="6KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    for folder in (one, many):
        run("hf", "native", folder, tmp_path / f"{folder.name}.native")
        run("native", "hf", tmp_path / f"{folder.name}.native", tmp_path / f"{folder.name}.back")
        assert contents(tmp_path / f"{folder.name}.back") == contents(folder)
    run("native", "hf", tmp_path / "one.native", tmp_path / "sharded", "--max-shard-size", "6KB")
    assert contents(tmp_path / "sharded") == contents(many)


def test_several_dtypes_lie_in_the_librarys_order(tmp_path: Path) -> None:
    """float32, bfloat16 and float16 in one file."""
    model = make("llama").to(torch.bfloat16)
    for module_name, parameter in model.named_parameters():
        if "norm" in module_name:
            parameter.data = parameter.data.float()
        if "o_proj" in module_name:
            parameter.data = parameter.data.half()
    model.save_pretrained(tmp_path / "hf")
    run("hf", "native", tmp_path / "hf", tmp_path / "native")
    run("native", "hf", tmp_path / "native", tmp_path / "back", "--max-shard-size", "1GB")
    assert contents(tmp_path / "back") == contents(tmp_path / "hf")


def ours(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """In high precision, which is what an export holds."""
    return load_for_inference(path, device="cpu", fp8=False).model.logits(tokens)


@torch.no_grad()
def theirs(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return model(tokens).logits


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2-window-tied", "qwen3", "mistral-window", "gpt2"])
def test_trained_here_and_loaded_there(name: str, tmp_path: Path) -> None:
    """Import, three steps, a resume between them, export, reload in transformers: equal logits, which moved."""
    saved(name, tmp_path / "hf", torch.float32)
    run("hf", "native", tmp_path / "hf", tmp_path / "native")
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(3))
    before = ours(tmp_path / "native", tokens)
    torch.testing.assert_close(before, theirs(tmp_path / "hf", tokens), rtol=0, atol=1e-4)  # logits reach 100: 1e-6 of them
    make_corpus(tmp_path / "corpus", vocab=VOCAB)
    (tmp_path / "tiny.yaml").write_text(RUN.format(base=tmp_path / "native" / "model.yaml"))
    start = [f"data.train={tmp_path / 'corpus'}", f"checkpoint.init_from={tmp_path / 'native'}", f"run.dir={tmp_path / 'run'}"]
    for steps in (2, 3):
        code, said = run_here(tmp_path, "run", *start, f"train.steps={steps}", "data.valid=null")
        assert code == 0
        assert any(("started from" if steps == 2 else "resumed at 2") in line for line in said)
    run("native", "hf", tmp_path / "run", tmp_path / "out")
    after = ours(tmp_path / "run", tokens)
    torch.testing.assert_close(after, theirs(tmp_path / "out", tokens), rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-2
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()
    assert len({row.loss for row in metrics_of(tmp_path, "run")}) == 3


def test_a_model_that_began_here(tmp_path: Path) -> None:
    """No config.json to go by: one is made, and transformers reads it as the same model. The tokenizer goes along."""
    from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
    from tests.runs import CONFIG, write_config

    write_config(tmp_path, CONFIG)
    text = ["".join(chr(97 + (i * j) % 26) + " " * (j % 3) for j in range(300)) for i in range(20)]
    tokenizer = train_sentencepiece(text, tmp_path / "mine", vocab_size=64, byte_fallback=False)
    assert run_here(tmp_path, "run", "train.steps=1", f"data.tokenizer={tokenizer}")[0] == 0
    run("native", "hf", tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "tokenizer.model"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"], config["max_position_embeddings"]) == ("llama", "float32", 16)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
    checkpoint = open_checkpoint(resolve(tmp_path / "run"))
    assert checkpoint.companions()["tokenizer.model"] == tokenizer.read_bytes()
    run("native", "native", tmp_path / "run", tmp_path / "plain")
    assert tokenizer_of(load_for_inference(tmp_path / "plain", device="cpu")).sha256 == Tokenizer(tokenizer).sha256
    for path in (tmp_path / "run", tmp_path / "plain"):
        torch.testing.assert_close(ours(path, tokens), theirs(tmp_path / "out", tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_weights_and_their_scales(recipe: str, tmp_path: Path) -> None:
    """What training computed with: the cached weights' bytes, one scale for each, inputs' scales under delayed scaling; a layer
    outside FP8 stays as it is. transformers reads it (with the package accelerate; on a CPU as dequantised weights)."""
    from safetensors.torch import load_file

    saved("llama", tmp_path / "hf")
    run("hf", "native", tmp_path / "hf", tmp_path / "native")
    make_corpus(tmp_path / "corpus", vocab=VOCAB)
    (tmp_path / "tiny.yaml").write_text(RUN.format(base=tmp_path / "native" / "model.yaml"))
    start = [f"data.train={tmp_path / 'corpus'}", f"checkpoint.init_from={tmp_path / 'native'}", "data.valid=null"]
    fp8 = [f"precision.fp8.recipe={recipe}", "precision.fp8.high_precision_last=1"]
    assert run_here(tmp_path, "run", *start, *fp8)[0] == 0
    run("native", "hf", tmp_path / "run", tmp_path / "out", "--fp8")
    checkpoint = open_checkpoint(resolve(tmp_path / "run"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    group = checkpoint.read("cached_weight/layers.1.attention.qkv.weight").view(torch.uint8)
    at = "model.layers.1.self_attn"
    rows = [tensors[f"{at}.{p}_proj.weight"].view(torch.uint8) for p in "qkv"]
    heads = [rows[0][:16], rows[1][:8], rows[2][:8], rows[0][16:], rows[1][8:], rows[2][8:]]
    assert torch.equal(torch.cat(heads), group)
    inverse = checkpoint.read("cached_weight_scale_inv/layers.1.attention.qkv.weight")
    assert all(torch.equal(tensors[f"{at}.{p}_proj.weight_scale_inv"], inverse.reshape(())) for p in "qkv")
    static = recipe == "delayed"
    assert (f"{at}.q_proj.activation_scale" in tensors) is static
    if static:
        scale = checkpoint.read("scale/layers.1.attention.qkv.input")
        assert torch.equal(tensors[f"{at}.q_proj.activation_scale"], scale.reciprocal())
    assert tensors["model.layers.2.mlp.down_proj.weight"].dtype is torch.bfloat16  # high_precision_last
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    told = config["quantization_config"]
    assert (told["quant_method"], told["activation_scheme"]) == ("fp8", "static" if static else "dynamic")
    assert "lm_head" in told["modules_to_not_convert"] and "model.layers.2.mlp.up_proj" in told["modules_to_not_convert"]
    assert config["dtype"] == "bfloat16" and config["hidden_size"] == 32
    if importlib.util.find_spec("accelerate") is not None:
        reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        wide = tensors[f"{at}.q_proj.weight"].float() * inverse
        assert torch.equal(reread[f"{at}.q_proj.weight"].float(), wide.bfloat16().float())


def test_fp8_is_for_checkpoints_that_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", tmp_path / "hf")
    run("hf", "native", tmp_path / "hf", tmp_path / "native")
    command = ["--to", "hf", "--fp8"]
    assert main(["--from", "native", *command, str(tmp_path / "native"), str(tmp_path / "x")]) == 2
    assert "holds no FP8 weights" in capsys.readouterr().err
    assert main(["--from", "hf", *command, str(tmp_path / "hf"), str(tmp_path / "x")]) == 2
    assert "--fp8 is for --from native --to hf" in capsys.readouterr().err


def test_another_model_than_the_configurations_is_refused(tmp_path: Path) -> None:
    """Keys that no shape shows are compared too."""
    saved("llama", tmp_path / "hf")
    run("hf", "native", tmp_path / "hf", tmp_path / "native")
    make_corpus(tmp_path / "corpus")
    (tmp_path / "tiny.yaml").write_text(RUN.format(base=tmp_path / "native" / "model.yaml"))
    start = [f"data.train={tmp_path / 'corpus'}", f"checkpoint.init_from={tmp_path / 'native'}", "data.valid=null"]
    for key, old, new in (("rope_theta", "10000.0", "777.0"), ("num_layers", "3", "4")):
        change, said = f"model.{key}={new}", f"model.{key}: {old} -> {new}"
        with pytest.raises(UsageError, match=said):
            run_here(tmp_path, "run", *start, change)
    with pytest.raises(UsageError, match="holds no optimizer state"):
        run_here(tmp_path, "run", *start, "checkpoint.init_state=training")
    with pytest.raises(UsageError, match="does not exist"):
        run_here(tmp_path, "run", *start, f"checkpoint.init_from={tmp_path / 'nowhere'}")
    with pytest.raises(UsageError, match="both say where the run begins"):
        run_here(tmp_path, "run", *start, f"checkpoint.resume={tmp_path / 'native'}")
    assert CONTEXT == 16  # what the sizes of these models are made for
