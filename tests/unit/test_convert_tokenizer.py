"""Tokenizers that come along with a conversion: loaded then, so that a broken one is told then, and not by the first prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.app.text import check_tokenizer, language_of
from qeffect_lm.data.tokenizer import train_sentencepiece
from qeffect_lm.errors import UsageError
from tests.hf_folders import SECTION, contents, make_folder, random_tensors
from tests.unit.test_hf_tokenizer import byte_level
from tools.convert import main

BYTES = byte_level().to_str().encode()
IDS = byte_level().get_vocab_size()  # 316


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("sp")
    text = ["some text of a few letters " * 9]
    return train_sentencepiece(text, folder / "t", vocab_size=22, byte_fallback=False).read_bytes()


def folder_of(path: Path, files: dict[str, bytes], vocab: int = 320) -> Path:
    section = {**SECTION, "vocab_size": vocab}
    folder = make_folder(path, random_tensors(section), vocab_size=vocab)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    return folder


def converted(src: Path, dst: Path, capsys, source: str = "hf", target: str = "native") -> dict[str, Any]:
    """The report of a conversion that succeeds."""
    capsys.readouterr()
    assert main(["--from", source, "--to", target, str(src), str(dst), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


EOS: Callable[[Any], bytes] = lambda ids: json.dumps({"eos_token_id": ids}).encode()  # noqa: E731
BROKEN: dict[str, tuple[dict[str, bytes], int, str]] = {
    "truncated": ({"tokenizer.json": BYTES[: len(BYTES) // 2]}, 320, "no tokenizer.json of Hugging Face"),
    "empty": ({"tokenizer.json": b""}, 320, "tokenizer.json is no tokenizer.json"),
    "html": ({"tokenizer.json": b"<html>404</html>"}, 320, "tokenizer.json is no tokenizer.json"),
    "pointer": ({"tokenizer.model": b"version: git-lfs/v1\noid 12\n"}, 320, "tokenizer.model is not a sentencepiece model"),
    "empty model": ({"tokenizer.model": b""}, 320, "tokenizer.model is not a sentencepiece model"),
    "larger": ({"tokenizer.json": BYTES}, 300, f"tokenizer.json has {IDS} ids, the model knows 300: it belongs"),
    "end is no id": ({"tokenizer.json": BYTES, "generation_config.json": EOS("x")}, 320, "eos_token_id is 'x', neither an id"),
    "end outside": ({"tokenizer.json": BYTES, "generation_config.json": EOS([1, 4000])}, 320, "eos_token_id 4000 is none of"),
    "settings": ({"tokenizer.json": BYTES, "tokenizer_config.json": b"{"}, 320, "tokenizer_config.json is no JSON"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_is_told_and_comes_along(tmp_path: Path, name: str, capsys) -> None:
    """A warning with the file's name, on the way in and on the way out: the model is there without it, and its bytes too.
    What is told is what generation would say."""
    files, vocab, said = BROKEN[name]
    folder = folder_of(tmp_path / "hf", files, vocab)
    report = converted(folder, tmp_path / "native", capsys)
    assert len(report["warnings"]) == 1 and said in report["warnings"][0] and str(folder) in report["warnings"][0]
    assert (report["tokenizer"] is None) == (name != "end outside")
    back = converted(tmp_path / "native", tmp_path / "back", capsys, "native", "hf")
    assert said in back["warnings"][0] and contents(tmp_path / "back") == contents(folder)
    if name != "end outside":
        with pytest.raises(UsageError) as error:
            language_of(load_for_inference(tmp_path / "native", device="cpu"))
        assert said.partition(":")[0].partition(" it belongs")[0] in str(error.value)
    assert main(["--from", "hf", "--to", "native", str(folder), str(tmp_path / "x"), "--dry-run"]) == 0
    assert f"  warning: {report['warnings'][0]}" in capsys.readouterr().out


def test_a_sound_tokenizer(tmp_path: Path, capsys, sentencepiece: bytes, monkeypatch) -> None:
    """Which file is taken and how many ids it has; rows that no id names are told, and are no warning; of two forms a broken
    one is named although the other is taken."""
    files = {"tokenizer.json": BYTES, "tokenizer.model": sentencepiece}
    folder = folder_of(tmp_path / "hf", files, 400)
    report = converted(folder, tmp_path / "native", capsys)
    told = [report[key] for key in ("tokenizer", "tokenizer_ids", "vocab_size", "warnings")]
    assert told == ["tokenizer.json", IDS, 400, []]
    assert main(["--from", "hf", "--to", "hf", str(folder), str(tmp_path / "x"), "--dry-run"]) == 0
    assert f"  tokenizer: tokenizer.json, {IDS} ids; 84 of the model's 400 are none of its\n" in capsys.readouterr().out
    assert converted(folder_of(tmp_path / "none", {}), tmp_path / "n2", capsys)["tokenizer"] is None
    found = check_tokenizer({**files, "tokenizer.model": sentencepiece[:50]}, 400, Path("m"))
    assert found.file == "tokenizer.json" and "m/tokenizer.model is not" in found.warnings[0] and len(found.warnings) == 1
    found = check_tokenizer({**files, "tokenizer.json": BYTES[:50]}, 400, Path("m"))
    assert found.file is None and "m/tokenizer.json is no" in found.warnings[0]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr("qeffect_lm.app.text.find_spec", lambda name: None)
    found = check_tokenizer(files, 400, Path("m"))
    assert (found.file, found.ids) == ("tokenizer.model", 22) and "needs the package tokenizers" in found.warnings[0]


def test_any_damage_is_a_warning(sentencepiece: bytes) -> None:
    """Bytes changed, cut or doubled anywhere: a result, whatever the libraries make of it."""
    state = json.loads(BYTES)
    odd = [[], {}, 1, "x", None, {"type": "BPE"}, {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}]
    for key in state:
        for value in odd:
            check_tokenizer({"tokenizer.json": json.dumps({**state, key: value}).encode()}, 400, Path("m"))
    for token in ({"id": 10**12}, {"id": -1}, {"content": ""}, {}):
        more = [*state["added_tokens"], {**state["added_tokens"][0], **token}]
        check_tokenizer({"tokenizer.json": json.dumps({**state, "added_tokens": more}).encode()}, 400, Path("m"))
    for at in range(0, len(sentencepiece), 7):
        for raw in (sentencepiece[:at], sentencepiece[:at] + b"\xff" + sentencepiece[at + 1 :], sentencepiece[at:]):
            check_tokenizer({"tokenizer.model": raw}, 400, Path("m"))
