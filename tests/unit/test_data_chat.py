"""Conversations: rendered as the families do, the loss on the answers alone, and trained on through the usual path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qeffect_lm.data.chat import END, TEMPLATES, check_template, messages_of, tokens_of
from qeffect_lm.data.corpus import TokenizerTraining, make_corpus
from qeffect_lm.data.encoding import Settings, open_tokenizer
from qeffect_lm.data.index import IndexCache
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.packing import Samples
from qeffect_lm.data.pairs import merge, split
from qeffect_lm.data.tokenizer import train_sentencepiece
from qeffect_lm.errors import UsageError
from tools.preprocess import main

TALK = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "2+2?"), ("assistant", "4")]
# What is counted stands in ⟦ ⟧. The strings are those of the model cards.
RENDERED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "⟦Hello.<|im_end|>⟧\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧<|start_header_id|>user"
    "<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]⟦ Hello. </s>⟧<s>[INST] 2+2? [/INST]⟦ 4 </s>⟧",
    "mistral": "<s>[INST] Hi[/INST]⟦ Hello.</s>⟧[INST] Be brief.\n\n2+2?[/INST]⟦ 4</s>⟧",
    "plain": "Be brief.\n\nHi\n\n⟦Hello.</s>⟧2+2?\n\n⟦4</s>⟧",
}
PIECES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
PIECES += ["<|eot_id|>", "[INST]", "[/INST]"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level pieces with merges over spaces, and every family's own pieces."""
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=330, special_tokens=PIECES, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([" Hello. Be brief. user assistant system 2+2? 4 Hi\n\n"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def shown(tokens: np.ndarray, counted: np.ndarray, model: Any) -> str:
    """The text of tokens, counted runs in brackets; special pieces by name."""
    text, inside = b"", False
    names = {model.token_id(piece): piece.encode() for piece in PIECES}
    for token, counts in zip(tokens.tolist(), counted.tolist(), strict=True):
        if bool(counts) != inside:
            text += "⟦".encode() if counts else "⟧".encode()
            inside = bool(counts)
        text += names.get(token) or model.piece_bytes(token)
    return (text + ("⟧".encode() if inside else b"")).decode()


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(template: str, tokenizer: Path) -> None:
    """The family's string, its pieces as single tokens, and the loss on the answers and their ends."""
    model: Any = open_tokenizer(tokenizer, "</s>")
    check_template(template, model)
    segments = TEMPLATES[template](TALK)
    tokens, counted = tokens_of(segments, model)
    assert shown(tokens, counted, model) == RENDERED[template]
    own = {"[INST]", "[/INST]"} if template == "llama2" else set()  # text there
    names = {piece for piece in PIECES if piece in RENDERED[template]} - own
    assert {model.token_id(name) for name in names} <= set(tokens.tolist())
    if template != "plain":  # what transformers' tokenizer gives for the whole string
        whole = RENDERED[template].replace("⟦", "").replace("⟧", "")
        if template != "llama2":  # whose [INST] are no pieces of its own, but are of this tokenizer
            assert tokens.tolist() == model.encode_batch([whole])[0]


def test_space_around_the_words() -> None:
    """As the families' templates have it: Llama's take it off, ChatML's and Mistral's leave it, and so does the loss."""
    spaced = [("user", " Hi\n"), ("assistant", "\n Hello. ")]
    answers = {name: [one.text for one in make(spaced) if one.counted and not one.piece] for name, make in TEMPLATES.items()}
    kept = "\n Hello. "
    assert answers == {"chatml": [kept], "llama3": ["Hello."], "llama2": [" Hello. "], "mistral": [f" {kept}"], "plain": [kept]}
    asked = {name: "".join(one.text for one in make(spaced) if not one.counted) for name, make in TEMPLATES.items()}
    assert [" Hi\n" in text for text in asked.values()] == [name not in ("llama2", "llama3") for name in asked]


def test_pieces_are_the_tokenizers(tokenizer: Path, tmp_path: Path) -> None:
    """A tokenizer of another family is refused; a sentencepiece model serves the template whose pieces it has."""
    text = "Hello. Be brief. user assistant 2+2? 4 Hi " * 30
    model: Any = open_tokenizer(train_sentencepiece([text], tmp_path / "m", vocab_size=280))
    with pytest.raises(UsageError, match=r"template chatml: tokenizer .*m\.model has no '<\|im_end\|>', '<\|im_start\|>'"):
        check_template("chatml", model)
    with pytest.raises(UsageError, match=r"template plain: .* has no end of text \(--eos\)"):
        check_template("plain", open_tokenizer(tokenizer))
    check_template("llama2", model)
    tokens, counted = tokens_of(TEMPLATES["llama2"](TALK), model)
    answer = [token for token, counts in zip(tokens.tolist(), counted.tolist(), strict=True) if counts]
    assert model.decode(answer) == " Hello.  4 " and answer.count(model.eos_id) == 2
    assert END not in "".join(RENDERED.values())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "no list of messages under the key 'messages'"),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1 has no text"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 has role 'tool'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "nothing to learn"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "message 2 is the system's"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "message 1: text has a lone surrogate"),
    ],
)
def test_what_is_no_conversation(record: dict[str, Any], reason: str) -> None:
    found = messages_of(record, "messages")
    assert isinstance(found, str) and reason in found


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": role, "content": f"{content} {i}"} for role, content in TALK[1:]]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_through_the_usual_path(talks: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Preprocessed by the tool, packed whole and apart: what counts in the samples is what counts in the conversations."""
    options = ["--input", str(talks), "--tokenizer", str(tokenizer), "--chat", "chatml", "--valid-fraction", "0.2"]
    assert main([*options, "--output", str(tmp_path / "c")]) == 0
    model: Any = open_tokenizer(tokenizer)
    dataset = IndexedDataset(tmp_path / "c.train")
    samples = Samples(dataset, 200, "whole", True, IndexCache(tmp_path / "cache"))
    rows = samples.read(np.arange(samples.size))
    answers = rows.mask.sum()
    expected = 0
    for line in talks.read_text().splitlines():
        segments = TEMPLATES["chatml"](messages_of(json.loads(line), "messages"))  # type: ignore[arg-type]
        tokens, counted = tokens_of(segments, model)
        if any(np.array_equal(dataset.document(i), tokens) for i in range(dataset.num_documents)):
            expected += int(counted.sum())
    assert answers == expected == samples.counted(np.arange(samples.size)) > 0
    assert dataset.num_documents + IndexedDataset(tmp_path / "c.valid").num_documents == 40
    assert json.loads((tmp_path / "c.train.json").read_bytes())["settings"]["template"] == "chatml"
    merge([tmp_path / "c.train", tmp_path / "c.valid"], tmp_path / "m")
    assert IndexedDataset(tmp_path / "m.mask").num_documents == 40
    split(tmp_path / "c.train", tmp_path / "s", Settings(valid_fraction=0.3))
    counted = [int((IndexedDataset(tmp_path / f"{name}.mask").tokens != 0).sum()) for name in ("s.train", "s.valid", "c.train")]
    assert min(counted) > 0 and counted[0] + counted[1] == counted[2]
    make_corpus([tokenizer], tmp_path / "c", Settings(format="text", append_eos=False), tokenizer=tokenizer)
    assert not list(tmp_path.glob("c.*mask*"))  # nor the mask of what was there before


def test_lines_that_are_no_conversation(talks: Path, tokenizer: Path, tmp_path: Path) -> None:
    lines = talks.read_text().splitlines(keepends=True)
    lines[6] = json.dumps({"messages": [{"role": "assistant", "content": "a"}]}) + "\n"
    talks.write_text("".join(lines))
    with pytest.raises(UsageError, match=r"chat\.jsonl, line 7: template llama2 wants user and assistant in turns"):
        make_corpus([talks], tmp_path / "c", Settings(key="messages", template="llama2"), tokenizer=tokenizer)
    settings = Settings(key="messages", template="llama2", bad="skip")
    assert make_corpus([talks], tmp_path / "c", settings, tokenizer=tokenizer).bad_count == 1
    with pytest.raises(UsageError, match="no template 'x': there are chatml"):
        make_corpus([talks], tmp_path / "c", Settings(template="x"), tokenizer=tokenizer)
    with pytest.raises(UsageError, match="give one with --tokenizer"):
        make_corpus([talks], tmp_path / "c", Settings(template="plain"), tokenizer=TokenizerTraining())
