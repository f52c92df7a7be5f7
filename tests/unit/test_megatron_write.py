"""What ``--to megatron`` writes: both layouts, any ranks; read back by our own reader and by torch."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import open_checkpoint
from checkpoint.hf.config import config_json
from checkpoint.megatron import guard
from checkpoint.megatron.names import split_axis, theirs
from checkpoint.megatron.read import read_megatron
from checkpoint.megatron.write import Ranks, write_megatron
from checkpoint.publish import publish
from tests.checkpoint_support import ScriptedOps
from tests.hf_folders import SECTION, contents, make_folder, random_tensors, tensors_of
from tests.megatron_support import (
    in_this_process,
    run,
    unpacked,
)
from tools.convert import main


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pickles are opened in this process, which saves each test a start of torch."""
    monkeypatch.setattr(guard, "ask_child", in_this_process)


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


def test_empty_extra_states_of_every_linear(golden: Path, tmp_path: Path) -> None:
    """Megatron's layers of Transformer Engine ask for a state of each linear and of the attention, by layer; in mp_rank files
    under the layer's own name."""
    assert run(golden / "dist", tmp_path / "m", target="megatron") == 0
    metadata = pickle.loads((tmp_path / "m" / "release" / ".metadata").read_bytes())  # our own
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention")
    modules += ("mlp.linear_fc1", "mlp.linear_fc2")
    wanted = {f"decoder.layers.{module}._extra_state/shard_{layer}_4" for module in modules for layer in range(4)}
    assert {key for key in metadata.state_dict_metadata if "_extra_state" in key} == wanted
    assert run(golden / "dist", tmp_path / "ranks", "--pp", "2", target="megatron") == 0
    file = tmp_path / "ranks" / "release" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)["model"]
    wanted = {f"decoder.layers.{layer}.{module}._extra_state" for module in modules for layer in range(2)}
    assert {key for key in state if "_extra_state" in key} == wanted and not any(state[key] for key in wanted)


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
        ({}, ("--tp", "4"), "--tp 4 does not divide model.num_kv_heads 2"),
        ({"num_kv_heads": 4, "ffn_size": 42}, ("--tp", "4"), "--tp 4 does not divide model.ffn_size 42"),
        ({}, ("--tp", "0"), "--tp 0 does not divide"),
        ({}, ("--tp", "-1"), "--tp -1 does not divide"),
        ({}, ("--pp", "0"), "--pp 0 does not divide"),
        ({}, ("--pp", "3"), "--pp 3 does not divide model.num_layers 2"),
        ({}, ("--tp", "2", "--max-shard-size", "1GB"), "--max-shard-size has no meaning with --tp and --pp"),
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


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_a_tied_head_is_a_copy_on_the_last_stage(tmp_path: Path, tp: int, pp: int) -> None:
    """Megatron's last stage has a weight of its own for it, unless it is the first one too (GPTModel, output_layer)."""
    section = {**SECTION, "tie_word_embeddings": True, "vocab_size": 61}
    tensors = random_tensors(section)
    folder = make_folder(tmp_path / "hf", tensors, config=config_json(section))
    ranks = ["--tp", str(tp), "--pp", str(pp)]
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "m"), "--quiet", *ranks]) == 0
    padded = torch.zeros(128 * tp, 32, dtype=torch.bfloat16)
    padded[:61] = tensors["model.embed_tokens.weight"]
    for t in range(tp):
        models = []
        for p in range(pp):
            name = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            file = tmp_path / "m" / "release" / name / "model_optim_rng.pt"
            models.append(torch.load(file, weights_only=False)["model"])
        assert torch.equal(models[0]["embedding.word_embeddings.weight"], padded.chunk(tp)[t])
        assert ("output_layer.weight" in models[-1]) == (pp > 1)
        if pp > 1:
            assert torch.equal(models[-1]["output_layer.weight"], padded.chunk(tp)[t])
    assert run(tmp_path / "m", tmp_path / "back", target="hf") == 0
    assert {n: t.tolist() for n, t in tensors_of(tmp_path / "back").items()} == {n: t.tolist() for n, t in tensors.items()}


def test_layers_of_two_dtypes(tmp_path: Path, capsys) -> None:
    """One tensor holds all layers in torch_dist: refused before anything is written; mp_rank folders can have it."""
    tensors = random_tensors(SECTION)
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].float()
    folder = make_folder(tmp_path / "hf", tensors)
    command = ["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "m"), "--quiet"]
    assert main([*command, "--dry-run"]) == 2
    said = "decoder.layers.mlp.linear_fc2.weight is bfloat16 in one layer and float32 in another"
    assert said in capsys.readouterr().err
    assert main([*command, "--pp", "2"]) == 0
    assert run(tmp_path / "m", tmp_path / "back") == 0
    read = open_checkpoint(tmp_path / "back").read("param/layers.1.mlp.down.weight")
    assert torch.equal(read, tensors["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("ranks", [(), ("--tp", "2")])
def test_the_tokenizer_goes_there_and_back(tmp_path: Path, capsys, ranks: tuple[str, ...]) -> None:
    """Its files lie beside the checkpoint, for Megatron's --tokenizer-model; what describes theirs of the model does not."""
    files = {"tokenizer.json": b'{"model": {}, "added_tokens": []}', "tokenizer.model": bytes(range(256))}
    files |= {"generation_config.json": b"{}", "chat_template.jinja": b"{{ x }}"}
    folder = make_folder(tmp_path / "hf", shards=2)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    assert main(["--from", "hf", "--to", "megatron", str(folder), str(tmp_path / "m"), "--quiet", *ranks]) == 0
    assert "left behind: the file config.json, for which Megatron's arguments stand" in capsys.readouterr().out
    assert contents(tmp_path / "m" / "tokenizer") == files
    assert run(tmp_path / "m", tmp_path / "native") == 0
    assert files.items() <= open_checkpoint(tmp_path / "native").companions().items()
    assert run(tmp_path / "m" / "release", tmp_path / "back", target="hf") == 0
    back = contents(tmp_path / "back")
    assert files.items() <= back.items() and "config.json" in back and "model.safetensors.index.json" not in back
    assert main(["--from", "native", "--to", "megatron", str(tmp_path / "native"), str(tmp_path / "m2"), "--quiet"]) == 0
    assert contents(tmp_path / "m2" / "tokenizer") == files


def test_bytes_and_options_that_are_told(tmp_path: Path, capsys) -> None:
    """What the files need, within the megabyte that all else may have, and what Megatron does not read out of a checkpoint."""
    section = {**SECTION, "family": "qwen3", "norm_eps": 1e-6, "vocab_size": 6401, "hidden_size": 256}
    section |= {"tie_word_embeddings": True}
    section["rope_scaling"] = {"type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    section |= {"max_position_embeddings": 131072}
    section["rope_scaling"]["original_max_position_embeddings"] = 8192
    folder = make_folder(tmp_path / "hf", random_tensors(section), config=config_json(section))
    for number, ranks in enumerate(((), ("--tp", "2", "--pp", "2"))):
        out = tmp_path / str(number)
        assert main(["--from", "hf", "--to", "megatron", str(folder), str(out), "--json", *ranks]) == 0
        report = json.loads(capsys.readouterr().out)
        file = out / "release" / ("mp_rank_00_000/model_optim_rng.pt" if ranks else "common.pt")
        args = torch.load(file, weights_only=False)["args"]  # whoever loads torch_dist pads for ranks of their own
        assert (args.vocab_size, args.padded_vocab_size) == (6401, 6656 if ranks else None)
        written = sum(map(len, contents(out).values()))
        assert report["bytes"] - (1 << 20) <= written <= report["bytes"]
        wanted = "--norm-epsilon 1e-06 --qk-layernorm --use-rope-scaling --rope-scaling-factor 32"
        assert report["load_with"] == f"--load {out} --finetune --use-checkpoint-args {wanted}"
    plain = make_folder(tmp_path / "plain")
    assert main(["--from", "hf", "--to", "megatron", str(plain), str(tmp_path / "p"), "--dry-run"]) == 0
    assert f"to load it in Megatron: --load {tmp_path / 'p'} --finetune" in capsys.readouterr().out
