"""Tokenizers of Hugging Face's ``tokenizer.json``: ids, text piece by piece, what comes before and after; and whole imported
models from folder to text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.app.text import language_of
from qeffect_lm.data.hf_tokenizer import HuggingFaceTokenizer, byte_letters
from qeffect_lm.errors import UsageError
from qeffect_lm.inference.perplexity import score
from qeffect_lm.inference.text import Continuation
from tests.hf_models import MODELS, make
from tools import convert, evaluate, generate

TEXTS = ["def f(x):\n    return x + 1\n", "hello world, über naïve 日本 text\n", "the cat and the hat"] * 20


def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3's: a begin token by template, special tokens of its own, one added token that is none."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|end|>", "<|eot|>"]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special))
    made.add_tokens(["<tool>"])
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", made.token_to_id("<|begin|>"))]
    )
    return made


def sentencepiece_like() -> tokenizers.Tokenizer:
    """As Llama 2's: a prefix of U+2581, bytes for unknown characters."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=360, special_tokens=special))
    state = json.loads(made.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["id"] < 3
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary pieces
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


KINDS = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    KINDS[request.param]().save(str(path))
    return HuggingFaceTokenizer(path)


TEXT = st.text(st.sampled_from("abdeflhrtux \n\t()+1,ü日🎉é\u0301"), max_size=16)


@settings(max_examples=100)
@given(before=TEXT, after=TEXT)
def test_text_piece_by_piece(tokenizer, before, after):
    """Ids are the library's; the pieces of a continuation make what the library decodes behind what came before."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer.path))
    ids = tokenizer.encode(before + after)
    assert ids == library.encode(before + after, add_special_tokens=False).ids
    whole = library.decode(ids)
    for cut in range(1, len(ids)):
        continuation = Continuation(tokenizer.decoder())
        for token in ids[cut:]:
            continuation.push(token)
        continuation.finish()
        begun = library.decode(ids[:cut])
        if "\ufffd" not in begun:
            assert begun + continuation.text == whole
    prefix = " " if ids and not tokenizer.begin_ids else ""  # the sentencepiece-like one's, swallowed at the beginning
    assert b"".join(map(tokenizer.piece_bytes, ids)).decode() == prefix + whole


def test_what_comes_before_and_what_is_no_text(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.begin_ids == (0,) and tokenizer.bos_id == 0 and tokenizer.end_ids == ()
    assert [tokenizer.piece_bytes(token) for token in (0, 1, 2)] == [b"", b"", b""]
    added = tokenizer.vocab_size - 1
    assert tokenizer.encode("a<tool><|eot|>") == [*tokenizer.encode("a"), added, 2]
    assert tokenizer.piece_bytes(added) == b"<tool>" and tokenizer.decode([0, added, 1]) == "<tool>"


def test_bytes_of_letters():
    """Against the library's own alphabet, and by encoding every byte."""
    letters = byte_letters()
    assert sorted(letters) == sorted(pre_tokenizers.ByteLevel.alphabet()) and sorted(letters.values()) == list(range(256))
    for char in map(chr, range(0x250)):
        spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(char)[0][0]
        assert bytes(letters[c] for c in spelt) == char.encode()


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    made = byte_level()
    made.enable_truncation(3)
    made.enable_padding(length=40)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode("hello world, hello")) == "hello world, hello"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "is no tokenizer.json"), ("nonsense", "is no tokenizer.json"), ("wordpiece", "WordPiece: only byte-level")],
)
def test_wrong_files(tmp_path, content, message):
    path = tmp_path / "t.json"
    if content == "wordpiece":
        made = byte_level()
        made.decoder = decoders.WordPiece()
        content = made.to_str()
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        HuggingFaceTokenizer(path)
    with pytest.raises(UsageError, match="cannot be read"):
        HuggingFaceTokenizer(tmp_path / "missing.json")


def test_wrong_ids_and_texts(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.decode([token])
    with pytest.raises(UsageError, match="lone surrogate"):
        tokenizer.encode("\udcff")


def test_without_the_package(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"needs the package tokenizers \(pip install"):
        HuggingFaceTokenizer(tokenizer.path)


# ---- imported models, from their folder to text ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """A folder as ``transformers`` saves it, and what ``tools.convert`` makes of it."""
    import transformers

    folder = tmp_path_factory.mktemp("hf")
    library = byte_level()
    kind, keys = MODELS[request.param]
    MODELS["spoken"] = kind, {**keys, "vocab_size": library.get_vocab_size(), "max_position_embeddings": 64}
    try:
        model = make("spoken")
    finally:
        del MODELS["spoken"]
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(folder / "hf")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|begin|>", eos_token="<|end|>")
    fast.save_pretrained(folder / "hf")
    assert convert.main(["--from", "hf", "--to", "native", str(folder / "hf"), str(folder / "native")]) == 0
    return folder / "hf", folder / "native"


def test_text_of_an_imported_model_is_theirs(folders, capsys):
    """``tools.convert``, then ``tools.generate``: what ``transformers`` makes of the same prompts, its begin token and end
    tokens included."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    fast = transformers.AutoTokenizer.from_pretrained(folders[0])
    prompts = ["def f(", "hello <tool> über", "日"]
    capsys.readouterr()
    asked = [str(folders[1]), "--threads", "1", "--temperature", "0", "--repetition-penalty", "1.5", "--max-new-tokens", "40"]
    assert generate.main([*asked, "--json", *(word for prompt in prompts for word in ("--prompt", prompt))]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for prompt, one in zip(prompts, made, strict=True):
        inputs = fast(prompt, return_tensors="pt")
        assert one["prompt_tokens"] == inputs.input_ids.shape[1] and int(inputs.input_ids[0, 0]) == 0
        out = theirs.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=40,
            repetition_penalty=1.5, pad_token_id=1,
        )  # fmt: skip
        new = out[0, inputs.input_ids.shape[1] :]
        assert one["tokens"] == new.tolist()
        if "\ufffd" not in one["text"]:
            assert one["text"] == fast.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_begin_and_end_of_an_imported_model(folders, capsys, tmp_path):
    loaded = load_for_inference(folders[1])
    language = language_of(loaded)
    assert (language.begin, language.end) == ((0,), (1, 2)) and loaded.model.context_length == 64
    assert language.encode(["a"])[0] == [0, *language.tokenizer.encode("a")] == language.encode(["a"], True)[0]
    assert language.encode(["a"], False)[0] == language.tokenizer.encode("a")
    (tmp_path / "t").write_text(TEXTS[1])
    capsys.readouterr()
    assert evaluate.main([str(folders[1]), "--threads", "1", "--text", str(tmp_path / "t"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    ids = language.encode([TEXTS[1]])[0]
    assert made["nats"] == score(loaded.model, np.array(ids), batch=8).nats
    assert (made["tokens"], made["bytes"]) == (len(ids) - 1, len(TEXTS[1].encode()))


@pytest.mark.parametrize(
    ("settings_of", "begin"),
    [({"add_bos_token": True}, (1,)), ({"add_bos_token": False}, ()), ({"tokenizer_class": "LlamaTokenizer"}, (1,)), ({}, ())],
    ids=str,
)
def test_begin_of_a_sentencepiece_model(tmp_path, settings_of, begin):
    """``tokenizer_config.json`` says; Llama's class adds it unless told not to. The end is ``config.json``'s."""
    from qeffect_lm.data.tokenizer import train_sentencepiece
    from tests.hf_folders import make_folder

    folder = make_folder(tmp_path / "hf", eos_token_id=7)
    train_sentencepiece(["some text of a few letters " * 9], folder / "tokenizer", vocab_size=22, byte_fallback=False)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_of))
    assert convert.main(["--from", "hf", "--to", "native", str(folder), str(tmp_path / "native")]) == 0
    language = language_of(load_for_inference(tmp_path / "native", device="cpu"))
    assert (language.begin, language.end) == (begin, (7,))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"generation_config.json": '{"eos_token_id": "</s>"}'}, "eos_token_id is '</s>', neither an id nor a list of ids"),
        ({"tokenizer_config.json": "nonsense"}, "is no JSON"),
    ],
    ids=str,
)
def test_files_that_cannot_be_read(tmp_path, files, message):
    from tests.hf_folders import make_folder

    folder = make_folder(tmp_path / "hf")
    state = json.loads(byte_level().to_str())
    state["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": []}
    state |= {"added_tokens": [], "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    for name, text in files.items():
        (folder / name).write_text(text)
    assert convert.main(["--from", "hf", "--to", "native", str(folder), str(tmp_path / "native")]) == 0
    with pytest.raises(UsageError, match=message):
        language_of(load_for_inference(tmp_path / "native", device="cpu"))
