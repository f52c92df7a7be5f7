"""tools.convert between Hugging Face folders and checkpoints: exact both ways, or refused by name with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from checkpoint import open_checkpoint
from checkpoint.hf.folder import parse_header, read_header
from checkpoint.hf.read import read_hf
from checkpoint.hf.write import plan_hf
from checkpoint.publish import PREFIX
from qeffect_lm.errors import UsageError
from tests.checkpoint_support import Killed, ScriptedOps
from tests.crashing import dying
from tests.hf_folders import SECTION, contents, make_folder, random_tensors, tensors_of
from tools.convert import _parser, convert, main

ROOT = Path(__file__).resolve().parents[2]


def run(source: str, target: str, src: Path, dst: Path, *more: str) -> int:
    return main(["--from", source, "--to", target, str(src), str(dst), "--quiet", *more])


def there_and_back(tmp_path: Path, folder: Path) -> None:
    assert run("hf", "native", folder, tmp_path / "native") == 0
    assert run("native", "hf", tmp_path / "native", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(folder)


@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip_is_byte_for_byte(tmp_path: Path, shards: int) -> None:
    """Weights, shards, index, configuration, tokenizers, whoever wrote them and in whatever layout."""
    folder = make_folder(tmp_path / "hf", shards=shards, bos_token_id=1)
    for name, raw in {
        "tokenizer.json": b'{"model": {}, "added_tokens": []}',
        "tokenizer.model": bytes(range(256)),
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b"{ }",
        "generation_config.json": b'{"eos_token_id":2}',
        "chat_template.jinja": b"{{ x }}",
        "merges.txt": b"a b\n",
        "LICENSE": b"free",
    }.items():
        (folder / name).write_bytes(raw)
    there_and_back(tmp_path, folder)


def test_round_trip_of_a_header_of_another_writer(tmp_path: Path) -> None:
    """Another order of tensors, other metadata, no padding: the header comes back as it was."""
    folder = make_folder(tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    entries, at, body = {"__metadata__": {"by": "somebody"}}, 0, b""
    for name in sorted(tensors, reverse=True):
        raw = tensors[name].view(torch.uint8).numpy().tobytes()
        entries[name] = {"shape": list(tensors[name].shape), "dtype": "BF16", "data_offsets": [at, at + len(raw)]}
        at, body = at + len(raw), body + raw
    head = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
    there_and_back(tmp_path, folder)


def test_dtypes_are_kept_per_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """H6: norms in float32 beside bfloat16; cast only when asked; parts of one of our tensors in two dtypes are refused."""
    tensors = random_tensors(SECTION)
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    folder = make_folder(tmp_path / "hf", tensors)
    there_and_back(tmp_path, folder)
    assert run("hf", "hf", folder, tmp_path / "wide", "--dtype", "float32") == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["torch_dtype"] == "float32"
    assert run("native", "hf", tmp_path / "native", tmp_path / "half", "--dtype", "float16") == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], tensor.half()) for name, tensor in tensors.items())
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].half()
    mixed = make_folder(tmp_path / "mixed", tensors)
    assert run("hf", "native", mixed, tmp_path / "no") == 2
    said = capsys.readouterr().err
    assert "model.layers.1.self_attn.k_proj.weight float16" in said and "--dtype" in said
    assert run("hf", "native", mixed, tmp_path / "cast", "--dtype", "bfloat16") == 0


def test_casts_round_to_nearest_even(tmp_path: Path) -> None:
    tensors = random_tensors(SECTION, torch.float32)
    tensors["model.norm.weight"][:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1 + 2**-8 + 2**-20])
    folder = make_folder(tmp_path / "hf", tensors, torch_dtype="float32")
    assert run("hf", "native", folder, tmp_path / "native", "--dtype", "bfloat16") == 0
    read = open_checkpoint(tmp_path / "native").read("param/final_norm.weight")[:4]
    assert torch.equal(read.view(torch.int16), torch.tensor([1.0, 1 + 2**-6, -0.0, 1 + 2**-7]).bfloat16().view(torch.int16))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_heads(tmp_path: Path, tied: bool, head: str, capsys: pytest.CaptureFixture[str]) -> None:
    """H1: only what is consistent loads, and a head that was written out is written out again."""
    tensors = random_tensors(SECTION)
    embedding = tensors["model.embed_tokens.weight"]
    del tensors["lm_head.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embedding.clone()
    if head == "different":
        tensors["lm_head.weight"][-1, -1] += 1
    folder = make_folder(tmp_path / "hf", tensors, tie_word_embeddings=tied)
    fits = head != "different" if tied else head != "absent"
    if fits:
        there_and_back(tmp_path, folder)
    else:
        assert run("hf", "native", folder, tmp_path / "native") == 2
        said = capsys.readouterr().err
        assert ("lm_head.weight differs from model.embed_tokens.weight" if tied else "lm_head.weight is missing") in said
        assert not (tmp_path / "native").exists()


def edit_index(folder: Path, change: dict) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, file in change.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({NORM: "../model-00001-of-00002.safetensors"}, "not the name of a safetensors file here"),
        ({NORM: "/etc/passwd"}, "not the name of a safetensors file here"),
        ({NORM: "sub/model.safetensors"}, "not the name of a safetensors file here"),
        ({NORM: 7}, "not the name of a safetensors file here"),
        ({NORM: "model-00009-of-00009.safetensors"}, "names model-00009-of-00009.safetensors, which is not there"),
        ({NORM: None}, "does not name the tensor model.norm.weight"),
        ({"extra.weight": "model-00001-of-00002.safetensors"}, "says that extra.weight is in"),
        ({"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}, "but it is in model-00001-of-00002"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change: dict, said: str) -> None:
    """H7."""
    folder = make_folder(tmp_path / "hf", shards=2)
    edit_index(folder, change)
    with pytest.raises(UsageError, match=said):
        read_hf(folder)


def test_tensors_against_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown, missing, misshapen: each is named, and nothing is left behind."""
    cases = {
        "model.layers.7.input_layernorm.weight": ("add", "model.layers.7.input_layernorm.weight"),
        "model.layers.1.mlp.up_proj.weight": ("remove", "model.layers.1.mlp.up_proj.weight is missing"),
        "model.layers.0.self_attn.o_proj.weight": ("cut", r"o_proj.weight has the shape [31, 32]"),
    }
    for number, (name, (how, said)) in enumerate(cases.items()):
        tensors = random_tensors(SECTION)
        if how == "add":
            tensors[name] = torch.zeros(32, dtype=torch.bfloat16)
        elif how == "remove":
            del tensors[name]
        else:
            tensors[name] = tensors[name][1:].clone()
        folder = make_folder(tmp_path / str(number), tensors)
        assert run("hf", "native", folder, tmp_path / "out") == 2
        assert said in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == [str(n) for n in range(number + 1)]


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"quantization_config": {"bits": 4}}, "quantization_config"), ({"num_local_experts": 8}, "num_local_experts")],
)
def test_configuration_keys_are_named(tmp_path: Path, keys: dict, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "hf", **keys)
    assert run("hf", "native", folder, tmp_path / "out", "--dry-run") == 2
    message = capsys.readouterr().err
    assert said in message and "config.json" in message


def test_pickles_are_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C11: weights that come as a pickle only are refused; one that lies beside safetensors is left alone and told."""
    folder = make_folder(tmp_path / "hf")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/opened'\ntR.")
    (folder / "original").mkdir()
    assert run("hf", "native", folder, tmp_path / "native") == 0
    said = capsys.readouterr().out
    assert "left behind: the file pytorch_model.bin" in said and "left behind: the file original" in said
    (folder / "model.safetensors").unlink()
    assert run("hf", "native", folder, tmp_path / "out") == 2
    assert "pickles only (pytorch_model.bin)" in capsys.readouterr().err


# ---- files that are not what they claim to be --------------------------------------------------------------------


def sound_file(path: Path) -> bytes:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int16)}, path)
    return path.read_bytes()


def with_header(change) -> bytes:
    entries = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "I16", "shape": [4], "data_offsets": [24, 32]},
    }
    change(entries)
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head + bytes(32)


HEADERS = {
    "begins at byte": lambda e: e["b"].update(data_offsets=[20, 28]),
    "needs 24 bytes and is given": lambda e: e["a"].update(data_offsets=[0, 20]),
    "dtype F13": lambda e: e["a"].update(dtype="F13"),
    "entry of a is not sound": lambda e: e["a"].update(shape=[-2, 3]),
    "entry of b is not sound": lambda e: e["b"].update(shape=[2.0]),
    "entry of a is not sound: ": lambda e: e["a"].update(more=1),
    "bytes that belong to no tensor": lambda e: e.pop("b"),
    "is cut off": lambda e: e.update(c={"dtype": "U8", "shape": [9], "data_offsets": [32, 41]}),
    "its __metadata__": lambda e: e.update(__metadata__=[1]),
    "is not sound: 7": lambda e: e.update(a=7),
}


@pytest.mark.parametrize("said", HEADERS)
def test_hostile_headers(tmp_path: Path, said: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header(HEADERS[said]))
    with pytest.raises(UsageError, match=said):
        read_header(path)


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, *(struct.pack("<Q", length) + b"{}" for length in (2**63, 10**7, 0))])
def test_files_that_are_cut_off(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(UsageError, match="no safetensors file, or is cut off"):
        read_header(tmp_path / "x.safetensors")


def test_a_key_twice_and_deep_json() -> None:
    cases = ((b'{"a": 1, "a": 2}', "the key 'a' is there twice"), (b"[" * 100_000, "not sound JSON"), (b"[1]", "no JSON"))
    for raw, said in cases:
        with pytest.raises(UsageError, match=said):
            parse_header(Path("x"), raw)


@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 60))
def test_any_damage_to_a_header_is_an_error_or_harmless(tmp_path_factory, at: int, byte: int, cut: int) -> None:
    """Whatever one byte or the end is: an error with the file's name, or tensors that lie side by side inside the file."""
    folder = tmp_path_factory.mktemp("fuzz")
    raw = bytearray(sound_file(folder / "x.safetensors"))
    raw[at % len(raw)] = byte
    raw = raw[: len(raw) - cut]
    (folder / "x.safetensors").write_bytes(raw)
    try:
        _, places = read_header(folder / "x.safetensors")
    except UsageError as error:
        assert "x.safetensors" in str(error)
        return
    spans = sorted((place.offset, place.offset + place.nbytes) for place in places.values())
    assert all(end == begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)) and spans[-1][1] == len(raw)


# ---- nothing half-written ----------------------------------------------------------------------------------------


def arguments(source: str, target: str, src: Path, dst: Path) -> object:
    return _parser().parse_args(["--from", source, "--to", target, str(src), str(dst), "--quiet"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of theirs and the same model as a checkpoint."""
    path = tmp_path_factory.mktemp("both")
    folder = make_folder(path / "hf", shards=2)
    assert run("hf", "native", folder, path / "native") == 0
    return {"hf": folder, "native": path / "native"}


@pytest.mark.parametrize(("source", "target"), [("hf", "native"), ("native", "hf")])
def test_failing_at_any_operation_leaves_nothing(both: dict[str, Path], tmp_path: Path, source: str, target: str) -> None:
    """A disk that fails at any operation: an error, no target and no temporary folder; afterwards it works."""
    count = ScriptedOps()
    assert convert(arguments(source, target, both[source], tmp_path / "good"), count) == 0
    good = contents(tmp_path / "good")
    assert count.count > 10
    for number in range(count.count):
        dst = tmp_path / "x" / f"out{number}"
        try:
            convert(arguments(source, target, both[source], dst), ScriptedOps(number))
        except Exception as error:
            assert "Input/output error" in str(error)
            if number < count.count - 1:  # the last one is the sync of the name, when all is there
                assert not dst.exists() and not list(dst.parent.glob(f"{PREFIX}*"))
        else:
            pytest.fail(f"operation {number} failed unnoticed")
    assert contents(tmp_path / "x" / f"out{count.count - 1}").keys() == good.keys()


@pytest.mark.parametrize(("source", "target"), [("hf", "native"), ("native", "hf")])
def test_killed_at_any_operation_leaves_no_target(both: dict[str, Path], tmp_path: Path, source: str, target: str) -> None:
    """A death that runs no handler: there is a whole target or none, and the next conversion clears what was left."""
    count = ScriptedOps()
    convert(arguments(source, target, both[source], tmp_path / "good"), count)
    good = contents(tmp_path / "good")
    renamed = [number for number, (name, _) in enumerate(count.log) if name == "rename"][-1]
    for number in range(0, count.count, 3):
        dst = tmp_path / f"out{number}"
        with pytest.raises(Killed):
            convert(arguments(source, target, both[source], dst), ScriptedOps(number, Killed()))
        assert dst.exists() == (number > renamed)
        if dst.exists():
            assert contents(dst).keys() == good.keys()
        else:
            convert(arguments(source, target, both[source], dst))
            assert contents(dst).keys() == good.keys() and not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_real_sigkill(both: dict[str, Path], tmp_path: Path) -> None:
    """SIGKILL within a write, in a process of its own."""
    dst = tmp_path / "out"
    pid = os.fork()
    if pid == 0:
        try:
            convert(arguments("hf", "native", both["hf"], dst), dying(6, torn=True))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not dst.exists() and list(tmp_path.glob(f"{PREFIX}*"))
    assert run("hf", "native", both["hf"], dst) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_existing_targets_are_never_touched(both: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name in ("full", "file", "link"):
        assert run("hf", "native", both["hf"], tmp_path / name) == 2
        assert "exists already" in capsys.readouterr().err
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert run("hf", "native", both["hf"], tmp_path / "empty") == 0


def test_too_little_room_is_told_before_writing(both: dict[str, Path], tmp_path: Path, monkeypatch, capsys) -> None:
    from shutil import _ntuple_diskusage

    monkeypatch.setattr("checkpoint.publish.shutil.disk_usage", lambda path: _ntuple_diskusage(10, 9, 1))
    assert run("hf", "native", both["hf"], tmp_path / "out") == 2
    assert "only 1 are free there" in capsys.readouterr().err


def test_dry_run_writes_nothing_and_tells_the_same(both: dict[str, Path], tmp_path: Path, capsys) -> None:
    assert run("native", "hf", both["native"], tmp_path / "out", "--dry-run", "--json") == 0
    dry = json.loads(capsys.readouterr().out)
    assert not list(tmp_path.iterdir())
    assert run("native", "hf", both["native"], tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out) == dry
    assert dry["bytes"] == sum(map(len, contents(tmp_path / "out").values()))


def test_shard_sizes(both: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit makes shards of at most that many bytes of tensors, where a tensor is not larger by itself."""
    assert run("native", "hf", both["native"], tmp_path / "out", "--max-shard-size", "8KB") == 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    sizes = [[t.nbytes for t in load_file(file).values()] for file in files]
    assert all(sum(each) <= 8000 or len(each) == 1 for each in sizes)
    assert run("hf", "hf", tmp_path / "out", tmp_path / "one", "--max-shard-size", "1GB") == 0
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == random_tensors(SECTION).keys()
    assert run("native", "hf", both["native"], tmp_path / "no", "--max-shard-size", "8") == 2
    assert "--max-shard-size '8'" in capsys.readouterr().err


def test_a_checkpoint_that_was_damaged_is_not_exported(both: dict[str, Path], tmp_path: Path, capsys) -> None:
    import shutil

    shutil.copytree(both["native"], tmp_path / "native")
    file = next((tmp_path / "native").glob("weights-*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    assert run("native", "hf", tmp_path / "native", tmp_path / "out") == 1
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(f"{PREFIX}*"))


MEASURE = """
import re, sys
from pathlib import Path
from tools.convert import main
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
if "--tp" in sys.argv:  # what torch loads for its fake mode, once: 95 MB
    with FakeTensorMode():
        torch.empty(1).add(1)
def peak():  # KiB; getrusage would count the process that started this one too
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = peak()
code = main(sys.argv[1:])
print("GREW", peak() - before)
sys.exit(code)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)  # seven processes that load torch, on a machine that may be busy
def test_memory_is_that_of_one_tensor_group(tmp_path: Path) -> None:
    """A model of 450 MB, from each format to each other, in a process whose memory grows by less than 100 MB. Its largest
    tensor has 21 MB."""
    section = {**SECTION, "hidden_size": 1024, "num_heads": 8, "head_dim": 128, "ffn_size": 5120, "num_layers": 10}
    section |= {"vocab_size": 8192}
    tensors = random_tensors(section)
    from checkpoint.hf.config import config_json

    make_folder(tmp_path / "hf", tensors, shards=3, config=config_json(section))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 400e6
    del tensors
    steps = ["hf native", "native hf", "native megatron", "megatron native", "native megatron --tp 2", "megatron hf"]
    for number, step in enumerate(steps):
        source, target, *options = step.split()
        src = {"hf": "hf", "native": "1", "megatron": str(number)}[source]
        command = ["--from", source, "--to", target, str(tmp_path / src), str(tmp_path / str(number + 1)), "--json", *options]
        command += ["--allow-pickle"] if source == "megatron" else []
        done = subprocess.run([sys.executable, "-c", MEASURE, *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        grew = 1024 * int(done.stdout.rsplit("GREW", 1)[1])
        print(f"{step}: {grew / 1e6:.0f} MB more")
        assert grew < 100e6, step
    assert load_file(tmp_path / "2" / "model-00001-of-00003.safetensors").keys() < tensors_of(tmp_path / "6").keys()
    assert (tmp_path / "2" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


def test_plan_is_pure(both: dict[str, Path]) -> None:
    """Planning reads no tensor: a model whose tensors cannot be read is planned."""
    from dataclasses import replace

    model = read_hf(both["hf"])

    def never() -> torch.Tensor:
        raise AssertionError("a tensor was read")

    layout = plan_hf(replace(model, items=[replace(item, read=never) for item in model.items]))
    assert len(layout.heads) == 2 and layout.files["config.json"] == (both["hf"] / "config.json").read_bytes()


def test_a_run_that_learns_nothing_gives_back_the_same_bytes(tmp_path: Path) -> None:
    """Through init_from, steps, a save, a resume, another save and the export, all in bfloat16; config.json states a dtype that
    is not the tensors', which is nobody's to mend."""
    from tests.runs import make_corpus, run_here

    folder = make_folder(tmp_path / "hf", shards=2, torch_dtype="float16")
    (folder / "tokenizer.json").write_bytes(b'{"model": {}, "added_tokens": []}')
    assert run("hf", "native", folder, tmp_path / "native") == 0
    make_corpus(tmp_path / "corpus")
    (tmp_path / "tiny.yaml").write_text(
        f"base: {tmp_path / 'native' / 'model.yaml'}\nrun: {{device: cpu}}\ndata: {{seq_len: 16, microbatch_size: 2}}\n"
        "pipeline: {microbatches: 2}\noptim: {lr: 1.0e-38, weight_decay: 0.0, warmup_steps: 0}\ntrain: {steps: 1}\n"
        f"checkpoint: {{init_from: {tmp_path / 'native'}}}\nlogging: {{progress: 'off'}}\n"
    )
    assert run_here(tmp_path, "run", "data.valid=null")[0] == 0
    assert run_here(tmp_path, "run", "data.valid=null", "train.steps=2")[0] == 0
    assert open_checkpoint(tmp_path / "run/checkpoints/step_00000002").read("moment1/head.weight").abs().max() > 0
    assert run("native", "hf", tmp_path / "run", tmp_path / "back") == 0
    assert contents(tmp_path / "back") == contents(folder)
