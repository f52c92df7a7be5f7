"""Tokenizers: exact round trips of any text (D4), reproducible training, and the ways a model can be
wrong."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data import tokenizer as module
from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from qeffect_lm.errors import UsageError

CODE = inspect.getsource(argparse) + "copyright = 2024\n" * 100


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    prefix = tmp_path_factory.mktemp("model") / "code.v1"
    return Tokenizer(train_sentencepiece([CODE], prefix, vocab_size=600, model_type=request.param))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(train_sentencepiece([CODE], tmp_path_factory.mktemp("model") / "a", vocab_size=600))


# ---- round trips
# -----------------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "    def f(x):\n\treturn  x \n\n\n",
    "\n",
    "\n\n  a",
    "a\r\nb\r",
    "\t\t\tx",
    "▁",
    "▁▁ a▁ ▁b▁",
    " ▁",
    "<s></s><unk><pad><0x41><0xE2><0x96><0x81>",
    "naïve café e\u0301 日本語 🙂👩‍👩‍👧",
    "\0a\0\0",
    "\ufeffBOM",
    "\ufffd\ufffe\uffff\U0010ffff",
    "\u2047 \u2585",
    "\u2028\u2029\x85\x0b\x0c\x1c",
    "x" * 5000 + "\n" + " " * 5000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(model: Tokenizer, text: str) -> None:
    """D4: leading spaces, U+2581, unknown characters, control characters and special names come back."""
    ids = model.encode(text)
    assert model.decode(ids) == text
    assert all(0 <= i < model.vocab_size for i in ids)
    assert not {model.bos_id, model.eos_id, 0} & set(ids)  # neither control ids nor "unknown"


@given(
    text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("▁ \n\t\r\0<>0xs/")), max_size=40)
)
@settings(max_examples=200)
def test_round_trip_of_any_text(model: Tokenizer, text: str) -> None:
    """D4."""
    assert model.decode(model.encode(text)) == text


def test_round_trip_of_every_character(model: Tokenizer) -> None:
    """D4: each of the 1,112,064 characters of Unicode, in texts of 1024."""
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = ["".join(characters[i : i + 1024]) for i in range(0, len(characters), 1024)]
    wrong = [i for i, ids in enumerate(model.encode_batch(texts)) if model.decode(ids) != texts[i]]
    assert wrong == []


def test_space_and_its_symbol_differ(model: Tokenizer) -> None:
    """D4: a space and U+2581 have different ids; the symbol is its three UTF-8 byte pieces."""
    assert model.encode("▁") != model.encode(" ")
    assert len(model.encode("▁")) == 3
    assert model.encode("a▁b") == model.encode("a") + model.encode("▁") + model.encode("b")


def test_whitespace_is_compact(model: Tokenizer) -> None:
    """Indentation of code is a piece, and digits are single pieces."""
    assert len(model.encode(" " * 8)) == 1
    assert len(model.encode("2024")) == 4
    assert len(model.encode(CODE)) < len(CODE) / 2


def test_arrays(model: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as the lists', with the package's arrays and without them."""
    texts = ["a b", "", "\u2581 x\u2581", "né"]
    wanted = [model.encode(text) for text in texts]
    assert [ids.tolist() for ids in model.encode_arrays(texts)] == wanted
    assert all(ids.dtype == np.int32 for ids in model.encode_arrays(texts))
    real = model._processor.encode

    class Older:
        def encode(self, texts: object, num_threads: int = 1) -> object:
            return real(texts, num_threads=num_threads)

    monkeypatch.setattr(model, "_processor", Older())
    assert [ids.tolist() for ids in model.encode_arrays(texts[:2])] == wanted[:2]


def test_batches(model: Tokenizer) -> None:
    """A batch equals its texts one by one, on any number of threads."""
    expected = [model.encode(t) for t in TEXTS]
    assert model.encode_batch(TEXTS) == expected
    assert model.encode_batch(TEXTS, threads=3) == expected
    assert model.encode_batch([]) == []


def test_model_facts(model: Tokenizer) -> None:
    assert (model.vocab_size, model.bos_id, model.eos_id) == (600, 1, 2)
    assert model.sha256 == hashlib.sha256(model.path.read_bytes()).hexdigest()
    assert model.decode([model.bos_id, *model.encode("a"), model.eos_id]) == "a"
    assert model.decode([model.encode("▁")[0]]) == "\ufffd"  # half a character


# ---- training
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_same_text_same_bytes(tmp_path: Path, model_type: Literal["bpe", "unigram"]) -> None:
    """Neither the folder, the prefix, the process nor an earlier model matter; the text does."""
    text = CODE[:30000]
    (tmp_path / "text").write_text(text)
    paths = [
        train_sentencepiece([text], tmp_path / "a", vocab_size=400, model_type=model_type),
        train_sentencepiece(iter([text]), tmp_path / "deep" / "b", vocab_size=400, model_type=model_type),
        tmp_path / "c.model",
    ]
    script = (
        "import sys; from pathlib import Path; "
        "from qeffect_lm.data.tokenizer import train_sentencepiece as t; "
        "t([Path(sys.argv[1]).read_text()], sys.argv[2], vocab_size=400, model_type=sys.argv[3])"
    )
    arguments = [str(tmp_path / "text"), str(tmp_path / "c"), model_type]
    subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, cwd=Path(module.__file__).parents[2]
    )
    assert len({p.read_bytes() for p in paths}) == 1
    assert len({p.with_suffix(".json").read_bytes() for p in paths}) == 1
    other = train_sentencepiece([text[:20000]], tmp_path / "d", vocab_size=400, model_type=model_type)
    assert other.read_bytes() != paths[0].read_bytes()


def test_settings_are_stored(model: Tokenizer) -> None:
    """D4: the settings that fix the ids lie beside the model, with its digest and the library's version."""
    record = json.loads(model.path.with_suffix(".json").read_text())
    assert model.path.name == "code.v1.model" and record == model.settings
    assert (record["sha256"], record["sentencepiece"]) == (model.sha256, sentencepiece.__version__)
    assert record["settings"]["normalization_rule_name"] == "identity"
    assert record["settings"]["add_dummy_prefix"] is False
    assert record["settings"]["remove_extra_whitespaces"] is False
    # Trained again from exactly what is stored: the same model.
    again = io.BytesIO()
    sample, stride = module._sample([CODE], 6_000_000)
    assert record["sample"] == {"bytes": len(CODE.encode()), "chunks": len(sample), "every": stride}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample), model_writer=again, minloglevel=2, **record["settings"]
    )
    assert hashlib.sha256(again.getvalue()).hexdigest() == model.sha256


@given(st.text(st.sampled_from("a\né\U0001f642"), max_size=30), st.integers(1, 5))
def test_chunks_lose_nothing(text: str, repeat: int) -> None:
    text = text * repeat * 60
    chunks = list(module._chunks(text))
    assert "".join(chunks) == text
    assert all(0 < len(c.encode()) <= module._MAX_SENTENCE_BYTES for c in chunks)
    assert not any(c.endswith("\n") and c.strip("\n") for c in chunks[:-1])


def test_long_lines_are_learned(tmp_path: Path) -> None:
    """A word that occurs only inside one line of 200 kB becomes a piece: the line was not skipped."""
    line = "x = [" + "quixotry, " * 20000 + "]"
    path = train_sentencepiece([CODE, line], tmp_path / "a", vocab_size=600)
    assert len(Tokenizer(path).encode(" quixotry")) == 1


def test_samples_are_bounded() -> None:
    texts = [f"{i:04d}" + "x" * 96 for i in range(1000)]
    sample, stride = module._sample(texts, 10_000)
    assert 5_000 <= sum(map(len, sample)) <= 10_000
    assert [int(c[:4]) for c in sample] == list(range(0, 1000, stride))
    assert module._sample(texts, 100_000) == ([t.encode() for t in texts], 1)


# ---- errors
# ----------------------------------------------------------------------------------------------------


def test_training_errors(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"of 4096 on this corpus: Vocabulary size too high.*value <= \d+; use"
    ):
        train_sentencepiece(["abc"], tmp_path / "a")
    with pytest.raises(UsageError, match="of 10 on this corpus: Vocabulary size is smaller than required"):
        train_sentencepiece([CODE], tmp_path / "a", vocab_size=10)
    for texts in ([], ["", ""]):
        with pytest.raises(UsageError, match="no text"):
            train_sentencepiece(texts, tmp_path / "a")
    with pytest.raises(UsageError, match="'word'.*'bpe' or 'unigram'"):
        train_sentencepiece([CODE], tmp_path / "a", model_type="word")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="U[+]D800.*character 1"):
        train_sentencepiece(["a\ud800"], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_missing_and_corrupt_models(tmp_path: Path, bpe: Tokenizer) -> None:
    path = tmp_path / "a.model"
    with pytest.raises(UsageError, match=r"a\.model does not exist.*tools\.preprocess"):
        Tokenizer(path)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        Tokenizer(tmp_path)
    whole = bpe.path.read_bytes()
    for content in (b"", b"no model at all\n" * 20, whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"a\.model is not a sentencepiece model"):
            Tokenizer(path)


def test_settings_that_disagree_are_refused(tmp_path: Path, bpe: Tokenizer) -> None:
    """D4: a model that is not the one its stored settings describe is refused; without settings it is
    taken."""
    path, record = tmp_path / "a.model", tmp_path / "a.json"
    path.write_bytes(bpe.path.read_bytes())
    assert Tokenizer(path).settings is None
    record.write_text(json.dumps({"sha256": "0" * 64}))
    with pytest.raises(UsageError, match=rf"a\.model has SHA-256 {bpe.sha256}.*a\.json describes 0000"):
        Tokenizer(path)
    for text in ("", "[]", "{}", '"x"', "{"):
        record.write_text(text)
        with pytest.raises(UsageError, match=r"a\.json, the settings of tokenizer .* cannot be read"):
            Tokenizer(path)


def test_a_failed_training_keeps_no_false_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between model and settings: the old settings are not left to describe the new model."""
    path = train_sentencepiece([CODE], tmp_path / "a", vocab_size=400)

    def stop_at_settings(target: Path, data: bytes) -> None:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        target.write_bytes(data)

    monkeypatch.setattr(module, "write_atomic", stop_at_settings)
    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece([CODE], tmp_path / "a", vocab_size=500)
    assert Tokenizer(path).vocab_size == 500 and Tokenizer(path).settings is None


def test_bad_ids_and_texts(bpe: Tokenizer) -> None:
    for bad in (-1, 600):
        with pytest.raises(UsageError, match=f"token id {bad} is outside the vocabulary.*0 to 599"):
            bpe.decode([5, bad])
    with pytest.raises(UsageError, match="U[+]DFFF.*character 2"):
        bpe.encode("ab\udfff")


def test_a_model_without_byte_fallback(tmp_path: Path) -> None:
    """A model from elsewhere without byte pieces works as sentencepiece does: its limits are its own."""
    path = train_sentencepiece([CODE], tmp_path / "a", vocab_size=400, byte_fallback=False)
    model = Tokenizer(path)
    assert model.decode(model.encode("def f(x):\n    pass")) == "def f(x):\n    pass"
    assert model.encode("▁") == model.encode(" ")
