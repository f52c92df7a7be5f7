"""Conversions under hostile sources, odd destinations and interruptions: an error by name, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import open_checkpoint
from checkpoint.hf.config import config_json
from checkpoint.hf.read import read_hf
from checkpoint.megatron import guard
from checkpoint.publish import PREFIX
from tests.checkpoint_support import ScriptedOps
from tests.hf_folders import SECTION, contents, make_folder, random_tensors, tensors_of
from tests.megatron_support import in_this_process
from tools import convert as tool
from tools.convert import _parser, convert, main

FORMATS = ("native", "hf", "megatron")
RANKS = {"native": (), "hf": (), "megatron": (), "mp_rank": ("--tp", "2", "--pp", "2")}


def run(source: str, target: str, src: Path, dst: Path, *more: str) -> int:
    return main(["--from", source, "--to", target, str(src), str(dst), "--quiet", *more])


def to(kind: str, src: Path, dst: Path, *more: str) -> int:
    """From a folder of theirs to any format; ``mp_rank`` is Megatron's other one."""
    return run("hf", "megatron" if kind == "mp_rank" else kind, src, dst, *RANKS[kind], *more)


def parsed(kind: str, src: Path, dst: Path) -> Any:
    target = "megatron" if kind == "mp_rank" else kind
    return _parser().parse_args(["--from", "hf", "--to", target, str(src), str(dst), "--quiet", *RANKS[kind]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("hostile") / "hf", shards=2)


# ---- values of config.json ---------------------------------------------------------------------------------------


def family_config(family: str) -> dict[str, Any]:
    section = {**SECTION, "family": family}
    if family in ("mistral", "qwen2"):
        section["sliding_window"] = 8
    if family == "mixtral":
        section["moe"] = {"num_experts": 4, "top_k": 2}
    if family == "gpt2":
        section |= {"num_kv_heads": 4, "activation": "gelu_new"}
    return section


ODD: list[Any] = [True, False, 0, -1, 1.5, 32.0, "32", "x", [], [1], {}, {"a": 1}, 10**9, 10**30, float("inf"), float("nan")]
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES_GPT2 = ("vocab_size", "n_embd", "n_layer", "n_head", "n_inner")


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2"])
def test_sizes_of_any_json_type(tmp_path: Path, family: str, capsys) -> None:
    """Whatever stands for a size: refused by its key, in no time, with no memory for a billion layers."""
    section = family_config(family)
    path = make_folder(tmp_path / "hf", random_tensors(section), config=config_json(section))
    config = json.loads((path / "config.json").read_text())
    experts = ("num_local_experts", "num_experts_per_tok") if family == "mixtral" else ()
    for key in SIZES_GPT2 if family == "gpt2" else (*SIZES, "head_dim", *experts):
        for value in ODD:
            (path / "config.json").write_text(json.dumps({**config, key: value}))
            assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 2, (key, value)
            said = capsys.readouterr().err
            assert said.startswith("error: ") and str(path) in said and len(said) < 700
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                assert f"{key} = {value!r}" in said, said


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        ("max_position_embeddings", [True, "64", 64.0, -1, 0, [64]]),
        ("rms_norm_eps", [True, "x", "1e-5", [], float("nan"), float("inf"), -1e-5]),
        ("initializer_range", [True, "x", [], float("inf")]),
        ("rope_theta", [True, "10000", [1], {}, float("nan"), 0, -1.0]),
        ("rope_scaling", [True, "linear", [1], 2]),
        ("rope_parameters", [True, "linear", [1], 2]),
        ("tie_word_embeddings", [0, 1, "false", "", [], 0.0]),
        ("attention_bias", [1, "true", []]),
        ("mlp_bias", [1, "true", {}]),
        ("hidden_act", [1, [], {}, True]),
        ("architectures", [True, 5, "LlamaForCausalLM", {"LlamaForCausalLM": 1}, [5]]),
        ("model_type", [True, 5, [], {}, "\x1b[2J" * 99]),
    ],
)
def test_other_keys_of_any_json_type(tmp_path: Path, key: str, odd: list[Any], capsys) -> None:
    path = make_folder(tmp_path / "hf")
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    for value in odd:
        (path / "config.json").write_text(json.dumps({**config, key: value}))
        assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 2, value
        said = capsys.readouterr().err
        ours = {"rms_norm_eps": "norm_eps", "hidden_act": "hidden_act"}.get(key, key)
        assert (key in said or ours in said) and "\x1b" not in said and len(said) < 500


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 16.0, "attention_factor": 1.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("outer", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_scalings_of_any_json_type(tmp_path: Path, kind: str, outer: str, capsys) -> None:
    """H5: of each parameter an odd value, refused by the key in the key."""
    path = make_folder(tmp_path / "hf")
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("rope_")}
    for key in (*ROPES[kind], "rope_type", "rope_theta"):
        for value in (True, "2.0", [[1]], {}, float("nan"), -1):
            scaling = {"rope_type": kind, **ROPES[kind], key: value}
            (path / "config.json").write_text(json.dumps({**config, outer: scaling}))
            assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 2, (key, value)
            assert key in capsys.readouterr().err
    (path / "config.json").write_text(json.dumps({**config, outer: {"rope_type": kind, **ROPES[kind]}}))
    assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 0
    if kind in ("yarn", "longrope", "llama3"):  # what it grew from, where that is not said: the model's own context
        rest = {key: value for key, value in ROPES[kind].items() if key != "original_max_position_embeddings"}
        (path / "config.json").write_text(json.dumps({**config, outer: {"rope_type": kind, **rest}}))
        scaling = read_hf(path).section["rope_scaling"]
        assert scaling["original_max_position_embeddings"] == SECTION["max_position_embeddings"]


def test_windows_of_qwen_that_make_no_sense(tmp_path: Path, capsys) -> None:
    section = family_config("qwen2")
    path = make_folder(tmp_path / "hf", random_tensors(section), config=config_json(section))
    config = json.loads((path / "config.json").read_text())
    cases: list[tuple[str, Any]] = [("max_window_layers", "1"), ("max_window_layers", -1), ("layer_types", True)]
    cases += [("layer_types", [1, 2]), ("layer_types", []), ("use_sliding_window", 1), ("sliding_window", 0)]
    cases += [("layer_types", ["full_attention"] * 2), ("layer_types", ["sliding_attention"] * 3)]
    for key, value in cases:
        (path / "config.json").write_text(json.dumps({**config, key: value}))
        assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 2, (key, value)
        assert key in capsys.readouterr().err
    (path / "config.json").write_text(json.dumps({**config, "max_window_layers": None, "layer_types": None}))
    assert run("hf", "hf", path, tmp_path / "out", "--dry-run") == 0  # as if it were absent: 28


# ---- files -------------------------------------------------------------------------------------------------------


def test_folders_that_are_hostile(tmp_path: Path, capsys) -> None:
    def refused(number: int, change: Any, said: str, shards: int = 2) -> None:
        path = make_folder(tmp_path / str(number), shards=shards)
        change(path)
        assert run("hf", "native", path, tmp_path / "out") == 2
        assert said in capsys.readouterr().err and not (tmp_path / "out").exists()

    def replaced(name: str, make: Any) -> Any:
        def change(path: Path) -> None:
            (path / name).unlink(missing_ok=True)
            make(path / name)

        return change

    def twice(path: Path) -> None:
        tensors = tensors_of(path)
        names = sorted(tensors)
        save_file({name: tensors[name] for name in names}, path / "model-00001-of-00002.safetensors")

    def edit(path: Path, **keys: Any) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    index, first = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    refused(0, replaced("config.json", os.mkfifo), "is no regular file")
    refused(1, replaced("config.json", Path.mkdir), "is no regular file")
    refused(2, replaced("config.json", lambda path: path.symlink_to(path)), "config.json")
    refused(3, replaced(index, Path.mkdir), "is no regular file")
    refused(4, replaced(first, os.mkfifo), "is not there")
    refused(5, replaced(first, lambda path: path.symlink_to("nowhere")), "is not there")
    refused(6, replaced("model.safetensors", os.mkfifo), "has neither", shards=1)
    refused(7, twice, "is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors")
    refused(8, lambda path: (path / "config.json").write_text("[" * 100_000), "is not sound JSON")
    refused(9, lambda path: (path / "config.json").write_text('{"vocab_size": ' + "1" * 5000 + "}"), "is not sound JSON")
    refused(10, lambda path: (path / "config.json").write_bytes(b"\xff\xfe\xff"), "is not sound JSON")
    refused(12, lambda path: (path / "model.safetensors").write_bytes(b""), "which one is the model? Remove the other")
    refused(13, lambda path: edit(path / index, more=1), "unknown key more")
    refused(14, lambda path: edit(path / index, weight_map={}), "has no weight_map")
    refused(11, lambda path: os.truncate(path / "config.json", 300 << 20), "more than the")


def test_a_tied_head_with_the_same_bytes_is_not_the_same(tmp_path: Path, capsys) -> None:
    """H1: the embedding's bytes under another shape or dtype."""
    tensors = random_tensors(SECTION)
    embedding = tensors["model.embed_tokens.weight"]
    for number, head in enumerate((embedding.reshape(32, 64), embedding.view(torch.float16))):
        odd = {**tensors, "lm_head.weight": head.clone()}
        path = make_folder(tmp_path / str(number), odd, tie_word_embeddings=True)
        assert run("hf", "native", path, tmp_path / "out") == 2
        assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err


def test_a_file_with_the_name_of_our_manifest_stays(tmp_path: Path, capsys) -> None:
    path = make_folder(tmp_path / "hf")
    (path / "manifest.json").write_text("{}")
    for target in ("hf", "native"):
        assert run("hf", target, path, tmp_path / "out" / target) == 0
        assert "left behind: the file manifest.json" in capsys.readouterr().out
    assert "manifest.json" not in contents(tmp_path / "out" / "hf")


def test_files_are_closed_and_opened_again(tmp_path: Path, monkeypatch) -> None:
    """More shards than files are held open at a time: what was written to one before stays."""
    path = make_folder(tmp_path / "hf")
    for number, files in enumerate((32, 1)):
        monkeypatch.setattr("checkpoint.hf.write.OPEN_FILES", files)
        assert run("hf", "hf", path, tmp_path / str(number), "--max-shard-size", "9KB") == 0
    assert len(contents(tmp_path / "0")) > 5 and contents(tmp_path / "0") == contents(tmp_path / "1")


def test_empty_tensors_and_other_vocabularies(tmp_path: Path, capsys) -> None:
    """A tensor without elements, and embeddings with more or fewer rows than vocab_size."""
    for number, (name, change) in enumerate(
        {
            "extra.weight": lambda tensors: tensors.update({"extra.weight": torch.empty(0, 7)}),
            "model.norm.weight": lambda tensors: tensors.update({"model.norm.weight": torch.empty(0)}),
            "model.embed_tokens.weight": lambda t: t.update({"model.embed_tokens.weight": torch.ones(63, 32).bfloat16()}),
            "lm_head.weight": lambda tensors: tensors.update({"lm_head.weight": torch.ones(128, 32).bfloat16()}),
        }.items()
    ):
        tensors = random_tensors(SECTION)
        change(tensors)
        path = make_folder(tmp_path / str(number), tensors)
        assert run("hf", "native", path, tmp_path / "out") == 2
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["native", "megatron", "mp_rank"])
def test_any_bits_come_back(tmp_path: Path, kind: str, monkeypatch) -> None:
    """NaNs with their payloads, infinities, subnormals, both zeros: through every format."""
    monkeypatch.setattr(guard, "ask_child", in_this_process)
    tensors = random_tensors(SECTION)
    generator = torch.Generator().manual_seed(3)
    bits = {n: torch.randint(-(2**15), 2**15, t.shape, generator=generator).short() for n, t in tensors.items()}
    path = make_folder(tmp_path / "hf", {name: each.view(torch.bfloat16) for name, each in bits.items()})
    assert to(kind, path, tmp_path / "there") == 0
    more = () if kind == "native" else ("--allow-pickle",)
    assert run("native" if kind == "native" else "megatron", "hf", tmp_path / "there", tmp_path / "back", *more) == 0
    back = tensors_of(tmp_path / "back")
    assert back.keys() == bits.keys() and all(torch.equal(back[name].view(torch.int16), bits[name]) for name in bits)


def test_names_that_no_terminal_should_see(tmp_path: Path, capsys) -> None:
    """A file whose name is no UTF-8, and one with an escape sequence: told escaped, and the checkpoint says so too."""
    path = make_folder(tmp_path / "hf")
    for name in (b"caf\xe9.md", b"\x1b[2J.md"):
        (path / os.fsdecode(name)).write_bytes(b"")
    assert run("hf", "native", path, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "left behind: the file caf\\udce9.md" in said and "the file \\x1b[2J.md" in said
    assert "the file caf\udce9.md" in open_checkpoint(tmp_path / "out").within("origin")["dropped"]
    tensors = random_tensors(SECTION) | {"\x1b[2J": torch.ones(1)}
    assert run("hf", "native", make_folder(tmp_path / "bad", tensors), tmp_path / "no") == 2
    assert "\\x1b[2J is not known" in capsys.readouterr().err


# ---- destinations ------------------------------------------------------------------------------------------------


def test_destinations_that_cannot_be(folder: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    native = tmp_path / "native"
    assert run("hf", "native", folder, native) == 0
    for source, src in (("hf", folder), ("native", native)):
        before = contents(src)
        for inside in (src / "out", src / "a" / "b", src / "x" / ".." / "out"):
            assert run(source, "hf", src, inside) == 2
            assert "lies inside of" in capsys.readouterr().err
        assert contents(src) == before and sorted(p.name for p in src.iterdir()) == sorted(before)
    (tmp_path / "link").symlink_to(folder)
    assert run("hf", "native", folder, tmp_path / "link" / "out") == 2
    assert "lies inside of" in capsys.readouterr().err
    long = "x" * 300
    assert run("hf", "native", folder, tmp_path / long) == 1
    assert "File name too long" in capsys.readouterr().err
    assert run("hf", "native", tmp_path / long, tmp_path / "out") == 1
    assert "File name too long" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run("hf", "native", folder, tmp_path / "file" / "out") == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for name in (".", "sub/.."):
        assert run("hf", "native", folder, Path(name)) == 2
        assert "no name for a new folder" in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("kind", RANKS)
def test_places_that_take_nothing(folder: Path, tmp_path: Path, kind: str, number: int) -> None:
    """No permission, read-only, full, over the quota: at the first folder, and in the middle."""
    for at in (0, 1, 6):
        with pytest.raises(Exception, match=os.strerror(number)):
            convert(parsed(kind, folder, tmp_path / "out"), ScriptedOps(at, OSError(number, os.strerror(number))))
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", RANKS)
def test_a_file_that_may_not_grow(folder: Path, tmp_path: Path, kind: str, capsys) -> None:
    """A real limit on the size of files, which torch's own writer meets too: one line, and nothing left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        code = to(kind, folder, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and capsys.readouterr().err.count("\n") <= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", RANKS)
def test_interrupted_in_the_middle(folder: Path, tmp_path: Path, kind: str) -> None:
    """Ctrl-C and SIGTERM: their own exit codes, nothing left, the old handler back."""

    class Interrupted(ScriptedOps):
        def _step(self, name: str, what: Any) -> None:
            self.count += 1
            if self.count == 6:
                os.kill(os.getpid(), self.number)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    before = signal.getsignal(signal.SIGTERM)
    try:
        for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
            ops = Interrupted()
            ops.number = number
            with pytest.raises(error) as caught:
                convert(parsed(kind, folder, tmp_path / "out"), ops)
            assert number == signal.SIGINT or caught.value.code == 128 + signal.SIGTERM
            assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize("kind", RANKS)
def test_all_is_on_the_disk_before_it_appears(folder: Path, tmp_path: Path, kind: str) -> None:
    """Each file that was written and each folder that was made is synced when the rename comes."""

    class Tracked(ScriptedOps):
        def __init__(self) -> None:
            super().__init__()
            self.dirty: set[Path] = set()
            self.left: set[Path] = set()

        def mkdir(self, path: Path, parents: bool = False) -> None:
            super().mkdir(path, parents)
            self.dirty.add(path)

        def write(self, file: Any, data: memoryview) -> int:
            self.dirty.add(Path(file.name))
            return super().write(file, data)

        def fsync(self, file: Any) -> None:
            super().fsync(file)
            self.dirty.discard(Path(file.name))

        def fsync_dir(self, path: Path) -> None:
            super().fsync_dir(path)
            self.dirty.discard(path)

        def rename(self, source: Path, target: Path) -> None:
            self.dirty -= {target.parent}  # was there before
            self.left = set(self.dirty)
            super().rename(source, target)

    ops = Tracked()
    assert convert(parsed(kind, folder, tmp_path / "out"), ops) == 0
    assert ops.left == set() and ops.log[-1] == ("fsync_dir", tmp_path.name)


def test_two_conversions_to_one_place(folder: Path, tmp_path: Path, capsys) -> None:
    """The second is refused and touches nothing of the first; what a dead one left is cleared; other places are free."""

    class Meanwhile(ScriptedOps):
        def create(self, path: Path) -> Any:
            if self.count == 0:
                self.codes = [run("hf", "native", folder, tmp_path / name) for name in ("out", "other")]
                self.count = 1
            return open(path, "wb", buffering=0)

        def _step(self, name: str, what: Any) -> None:
            pass

    (tmp_path / f"{PREFIX}out").mkdir()
    (tmp_path / f"{PREFIX}out" / "left").write_text("by one that died")
    ops = Meanwhile()
    assert convert(parsed("native", folder, tmp_path / "out"), ops) == 0
    assert ops.codes == [2, 0]
    assert "another conversion is writing" in capsys.readouterr().err
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_file_system_without_locks(folder: Path, tmp_path: Path, monkeypatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("checkpoint.publish.fcntl.flock", none)
    assert run("hf", "native", folder, tmp_path / "out") == 0


# ---- what is told -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RANKS)
def test_progress_reaches_the_end(folder: Path, tmp_path: Path, kind: str, monkeypatch) -> None:
    """The bar moves by each tensor's bytes, to all of them; ``--quiet`` and ``--json`` have none."""
    bars: list[Any] = []

    class Bar:
        def __init__(self, total: int, disable: bool | None, **_: Any) -> None:
            self.total, self.disable, self.n = total, disable, 0
            bars.append(self)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, n: int) -> None:
            self.n += n

    monkeypatch.setattr(tool, "tqdm", Bar)
    target = "megatron" if kind == "mp_rank" else kind
    for number, more in enumerate(([], ["--quiet"], ["--json"])):
        command = ["--from", "hf", "--to", target, str(folder), str(tmp_path / str(number)), *RANKS[kind], *more]
        assert main(command) == 0
    size = sum(tensor.nbytes for tensor in random_tensors(SECTION).values())
    assert [(bar.total, bar.n, bar.disable) for bar in bars] == [(size, size, None), (size, size, True), (size, size, True)]


def test_dtype_and_fp8(tmp_path: Path, capsys) -> None:
    """Weights in FP8 without our scales are refused, with ``--dtype`` and without."""
    tensors = random_tensors(SECTION)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    path = make_folder(tmp_path / "hf", tensors)
    for more in ((), ("--dtype", "bfloat16")):
        assert run("hf", "native", path, tmp_path / "out", *more) == 2
        assert f"{name} is float8_e4m3fn: parameters of 16 bits and more are read" in capsys.readouterr().err
