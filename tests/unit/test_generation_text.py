"""Text from tokens: whole characters only, stop strings wherever tokens begin and end, any sentencepiece model."""

from __future__ import annotations

import io

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from qeffect_lm.errors import UsageError
from qeffect_lm.inference.text import Continuation, StopFinder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    texts = ["def f(x):\n    return x + 1\n" * 30, "a \u2581 über\n  naïve 日本\n" * 20]
    return Tokenizer(train_sentencepiece(texts, tmp_path_factory.mktemp("tok") / "t", vocab_size=300))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Tokenizer:
    """As models come from elsewhere: a dummy prefix, normalised text, no bytes for unknown characters."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "hello there, general world"] * 20), model_writer=model, vocab_size=40,
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("foreign") / "f.model"
    path.write_bytes(model.getvalue())
    return Tokenizer(path)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By the definition: before the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=8),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_across_any_borders(pieces, stops):
    """The text and the stop string are those of the whole text, and what was shown never has to be taken back."""
    wanted, which = cut("".join(pieces), stops)
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        shown += finder.push(piece)
        assert wanted.startswith(shown)
    shown += finder.finish()
    assert (shown, finder.found) == (wanted, which)
    if which is not None:
        assert finder.push("more") == "" and finder.finish() == ""


def test_a_certain_piece_is_not_held_back():
    finder = StopFinder(["END", "\n\n"])
    assert [finder.push(piece) for piece in ("ab", "cE", "N", "x\n", "y")] == ["ab", "c", "", "ENx", "\ny"]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="--stop is empty"):
        StopFinder(["a", ""])


@settings(max_examples=150)
@given(text=st.text(st.sampled_from("ab \n\t\u2581üő日本🎉\ufffd\u0301e"), max_size=20))
def test_pieces_are_whole_characters_and_make_the_text(tokenizer, text):
    """D4: leading spaces, U+2581 and characters without a piece come back exactly, and never in parts."""
    continuation, pieces = Continuation(tokenizer.decoder()), []
    for token in tokenizer.encode(text):
        pieces.append(continuation.push(token))
    pieces.append(continuation.finish())
    assert "".join(pieces) == continuation.text == text == tokenizer.decode(tokenizer.encode(text))
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_broken_bytes_show_as_soon_as_they_are_known_to_be_broken(tokenizer):
    first, second = tokenizer.encode("ő")
    assert tokenizer.piece_bytes(first) == b"\xc5"
    continuation = Continuation(tokenizer.decoder())
    a = tokenizer.encode("x")[0]
    assert [continuation.push(token) for token in (first, a, first, second, first)] == ["", "\ufffdx", "", "ő", ""]
    assert continuation.finish() == "\ufffd" and continuation.text == "\ufffdxő\ufffd"


def test_stop_strings_see_characters_not_bytes(tokenizer):
    continuation = Continuation(tokenizer.decoder(), ["ő"])
    pushed = [continuation.push(token) for token in tokenizer.encode("aőb")]
    assert "".join(pushed) == "a" and continuation.stop == "ő" and continuation.finish() == ""


def test_what_was_held_back_comes_at_the_end(tokenizer):
    continuation = Continuation(tokenizer.decoder(), ["xő!"])
    pushed = [continuation.push(token) for token in tokenizer.encode("axő")]
    assert "".join(pushed) == "a" and continuation.finish() == "xő" and continuation.text == "axő"


def test_models_from_elsewhere(foreign):
    """D4: the space of a dummy prefix is swallowed at the text's beginning only, an unknown character shows as
    sentencepiece shows it, and begin and end tokens are no text."""
    prompt, rest = foreign.encode("hello"), foreign.encode("world, hello")
    assert foreign.decode(prompt) == "hello"
    continuation = Continuation(foreign.decoder())
    for token in [foreign.bos_id, *rest, foreign.eos_id]:
        continuation.push(token)
    continuation.finish()
    assert continuation.text == foreign.decode(prompt + rest)[len("hello") :] == " world, hello"
    unknown = foreign.encode("日")[-1]
    assert unknown == 0 and foreign.piece_bytes(unknown).decode() == foreign.decode([unknown])


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.piece_bytes(token)
