"""Pairs that do not belong together: tokenizers, masks, corpora and cursors, told apart before they are used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qeffect_lm.app.sources import check_tokenizer
from qeffect_lm.config import load_config
from qeffect_lm.data.blend import whole_weights
from qeffect_lm.data.encoding import Settings
from qeffect_lm.data.files import sha256_of_files
from qeffect_lm.data.index import IndexCache
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from qeffect_lm.data.loader import StepLoader, StepShape
from qeffect_lm.data.manifest import open_mask, read_manifest, write_manifest
from qeffect_lm.data.packing import Samples
from qeffect_lm.data.pairs import merge, split
from qeffect_lm.data.tokenizer import train_sentencepiece
from qeffect_lm.errors import UsageError
from tests.runs import CONFIG
from tools.preprocess import main

DOCUMENTS = [[i % 90, i % 7, 5, i % 11] for i in range(60)]


def pair(prefix: Path, documents: list[list[int]] = DOCUMENTS, sha: str | None = "a" * 64, masked: bool = False) -> Path:
    with IndexedWriter(prefix, vocab_size=100) as writer:
        writer.add_documents([np.array(one, dtype=np.int64) for one in documents])
    if masked:
        with IndexedWriter(f"{prefix}.mask", vocab_size=2) as writer:
            writer.add_documents([np.array([0, 0, 1, 1][: len(one)], dtype=np.int64) for one in documents])
    write_manifest(IndexedDataset(prefix), None if sha is None else {"sha256": sha, "vocab_size": 100}, {})
    return prefix


def test_the_tokenizer_is_handed_on(tmp_path: Path) -> None:
    """Merged and divided pairs are of the tokenizer that theirs are of; where one does not say, nothing is claimed; two are
    not mixed, and no source, tokenizer's settings or stranger's file is replaced."""
    a, b, c = pair(tmp_path / "a"), pair(tmp_path / "b"), pair(tmp_path / "c", sha="b" * 64)
    unknown = pair(tmp_path / "u", sha=None)
    merge([a, b], tmp_path / "m")
    split(tmp_path / "m", tmp_path / "s", Settings(valid_fraction=0.3))
    assert {read_manifest(tmp_path / name)["tokenizer"]["sha256"] for name in ("m", "s.train", "s.valid")} == {"a" * 64}
    merge([a, unknown], tmp_path / "n")
    assert "tokenizer" not in read_manifest(tmp_path / "n") and IndexedDataset(tmp_path / "n").num_documents == 120
    (tmp_path / "mine.json").write_text('{"text": "mine"}')
    (tmp_path / "sp.model").write_bytes(b"model")
    pair(tmp_path / "x.valid")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for prefixes, target, message in [
        ([a, c], "o", r"a and .*c are of different tokenizers \(SHA-256 aaaaaaaaaaaa and bbbbbbbbbbbb\)"),
        ([a, b], "b", "b would be read and replaced"),
        ([a, b], "mine", r"mine\.json is there and is no manifest"),
        ([a, b], "sp", r"sp\.json is of the tokenizer .*sp\.model"),
    ]:
        with pytest.raises(UsageError, match=message):
            merge(prefixes, tmp_path / target)
    with pytest.raises(UsageError, match=r"x\.valid would be read and replaced"):
        split(tmp_path / "x.valid", tmp_path / "x", Settings(valid_fraction=0.3))
    with pytest.raises(UsageError, match="the test part has no tokens: 0 of 60 documents"):
        split(a, tmp_path / "t", Settings(valid_fraction=0.3, test_fraction=1e-9))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_mask_goes_with_its_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Merged, divided, digested, shown and verified with it; half of it, none of it, or that of other documents is refused."""
    a, b = pair(tmp_path / "a", masked=True), pair(tmp_path / "b", DOCUMENTS[:9], masked=True)
    merge([a, b], tmp_path / "m")
    split(tmp_path / "m", tmp_path / "s", Settings(valid_fraction=0.3))
    for name in ("m", "s.train", "s.valid"):
        mask = open_mask(IndexedDataset(tmp_path / name))
        assert mask is not None and mask.tokens.reshape(-1, 4).tolist() == [[0, 0, 1, 1]] * mask.num_documents
        assert read_manifest(tmp_path / name)["mask"]["sha256"]["bin"] == sha256_of_files([bin_path(f"{tmp_path / name}.mask")])
    assert main(["inspect", str(tmp_path / "m"), "--verify", "--document", "13"]) == 0
    out = capsys.readouterr().out
    assert "138 tokens count as targets" in out and "13 6⟦5 2⟧" in out and "the pair and its mask are those" in out
    merge([pair(tmp_path / "p"), pair(tmp_path / "q")], tmp_path / "m")  # the old mask goes
    assert open_mask(IndexedDataset(tmp_path / "m")) is None
    moved = bin_path(f"{a}.mask").read_bytes()
    bin_path(f"{a}.mask").write_bytes(moved[:-2] + b"\0\0")
    assert main(["inspect", str(a), "--verify"]) == 1 and "a.mask.bin is not what" in capsys.readouterr().err
    idx_path(f"{a}.mask").unlink()
    with pytest.raises(UsageError, match=r"a\.mask\.idx not found"):
        Samples(IndexedDataset(a), 8)
    bin_path(f"{a}.mask").unlink()
    with pytest.raises(UsageError, match=r"a was made with a mask .* a\.mask\.idx and \.bin are not there|copy them too"):
        Samples(IndexedDataset(a), 8)
    other = pair(tmp_path / "z", [[1, 1, 1, 1]] * 8 + [[1, 1], [1, 1]])  # as many tokens in other documents
    for end in ("idx", "bin"):
        Path(f"{b}.mask.{end}").write_bytes(Path(f"{other}.{end}").read_bytes())
    with pytest.raises(UsageError, match="they hold other documents"):
        Samples(IndexedDataset(b), 8)


def test_damaged_manifests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tool that verifies says so; training takes no notice of a file that is none."""
    a = pair(tmp_path / "a")
    for text in ("{", "[]", '{"tokens": 1}', "\xff", "[" * 99_999):
        (tmp_path / "a.json").write_text(text)
        assert read_manifest(a) == {}
        assert main(["inspect", str(a), "--verify"]) == 1 and "is no manifest, or is damaged" in capsys.readouterr().err
    Samples(IndexedDataset(a), 8)
    (tmp_path / "a.json").unlink()
    assert main(["inspect", str(a), "--verify"]) == 0
    assert f"SHA-256 of {a}.bin: {sha256_of_files([bin_path(a)])}" in capsys.readouterr().out


def test_a_run_is_of_one_tokenizer(tmp_path: Path) -> None:
    """Corpora of two, or of another one than data.tokenizer, are refused, held-out ones too; one that does not say is taken."""
    model = train_sentencepiece(["hello there, general talk\n"] * 30, tmp_path / "m", vocab_size=280)
    sha = json.loads((tmp_path / "m.json").read_bytes())["sha256"]
    mine, other, unknown = pair(tmp_path / "a", sha=sha), pair(tmp_path / "b"), pair(tmp_path / "u", sha=None)
    (tmp_path / "c.yaml").write_text(CONFIG)

    def check(*more: str) -> None:
        named = [f"data.tokenizer={model}", "model.vocab_size=280"]
        check_tokenizer(load_config(tmp_path / "c.yaml", [f"run.dir={tmp_path / 'r'}", *named, *more]))

    check(f"data.train={mine}", f"data.valid={unknown}")
    check(f"data.blend=['0.5 {mine}', '0.5 {unknown}']")
    for more, message in [
        ([f"data.train={other}"], r"b was made with another tokenizer than .*m\.model"),
        ([f"data.train={mine}", f"data.valid={other}"], "different tokenizers"),
        ([f"data.blend=['1 {other}', '1 {mine}']", "data.tokenizer=null"], "b and .*a were made with different tokenizers"),
    ]:
        with pytest.raises(UsageError, match=message):
            check(*more)


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf", "1e999999999", "1e-999999999", "0", "-1", "x", "", "1e-300"])
def test_weights_that_are_none(weight: str) -> None:
    """At once, whatever the exponent; the text is in the error."""
    with pytest.raises(UsageError, match="weight"):
        whole_weights(["1", weight])


def test_what_a_loader_refuses(tmp_path: Path) -> None:
    """A corpus twice in a blend, ids below 0, cutting that there is not, and a cursor past what 64 bits can compute with."""
    a, b = Samples(IndexedDataset(pair(tmp_path / "a")), 8), Samples(IndexedDataset(pair(tmp_path / "b")), 8)
    with pytest.raises(UsageError, match=r"a and .*b are the same corpus, twice in the blend"):
        StepLoader([a, b], StepShape(1, 1), weights=[1, 2]).next_step()
    signed = tmp_path / "n"
    with IndexedWriter(signed, vocab_size=100_000) as writer:
        writer.add_document([5] * 40)
    data = np.frombuffer(bin_path(signed).read_bytes(), dtype="<i4").copy()
    data[3] = -1
    bin_path(signed).write_bytes(data.tobytes())
    loader = StepLoader(Samples(IndexedDataset(signed), 8), StepShape(4, 1), vocab_size=100_000)
    with pytest.raises(UsageError, match="holds token id -1"):
        loader.next_step()
    for more, message in (((0, "whole"), "seq_len must be at least 1"), ((8, "tiles"), "packing 'tiles'")):
        with pytest.raises(UsageError, match=message):
            Samples(a.dataset, *more)
    state: dict[str, Any] = StepLoader(a, StepShape(1, 1)).state()
    blends = [{**state["blends"][0], "first": 2**70}]
    for wrong in ({"next_sample": 2**70}, {"blends": blends}, {"batches": [[0, 2**70]]}):
        with pytest.raises(UsageError, match="saved data cursor"):
            StepLoader(a, StepShape(1, 1)).load_state({**state, **wrong})


def test_a_cache_of_someone_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file that cannot be opened does not stop a run: the entry is made all the same."""
    real = open

    def denied(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(".lock"):
            raise PermissionError(13, os.strerror(13), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", denied)
    cache = IndexCache(tmp_path / "cache")
    for _ in range(2):
        assert cache.get({"what": "x"}, lambda: {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
