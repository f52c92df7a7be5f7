"""Sentencepiece tokenizers whose text round-trips exactly: ``decode(encode(s)) == s``.

Source code is the reason: leading spaces, tabs and blank lines carry meaning. So nothing is normalised (rule
``identity``, no dummy prefix, no whitespace removed), runs of whitespace may be pieces, and a character
without a piece falls back to its UTF-8 bytes. One character needs help: sentencepiece spells a space as
U+2581 and would give back a space for a U+2581 in the text, so :class:`Tokenizer` encodes that character as
its three byte pieces.

API: https://github.com/google/sentencepiece (``SentencePieceTrainer``, ``SentencePieceProcessor``).
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import sentencepiece

from qeffect_lm.data.files import write_atomic
from qeffect_lm.errors import UsageError

SPACE_SYMBOL = "\u2581"
SETTINGS_FORMAT = 1
# Sentencepiece skips sentences longer than max_sentence_length bytes without an error. A chunk of 1000
# characters is at most 4000 bytes, so nothing is ever skipped.
_CHUNK_CHARACTERS = 1000
_MAX_SENTENCE_BYTES = 4 * _CHUNK_CHARACTERS
# Part of the result (sums are per thread), therefore a constant and not the number of cores.
_TRAINER_THREADS = 2


def train_sentencepiece(
    texts: Iterable[str],
    model_prefix: Path | str,
    *,
    vocab_size: int = 4096,
    model_type: Literal["bpe", "unigram"] = "bpe",
    byte_fallback: bool = True,
    max_sample_bytes: int = 6_000_000,
) -> Path:
    """Trains a model on ``texts`` (documents, newlines included) and returns its path,
    ``<model_prefix>.model``.

    Beside it, ``<model_prefix>.json`` holds the settings, the model's SHA-256 and the sentencepiece version.
    The same texts, settings and version give the same bytes. Texts of more than ``max_sample_bytes`` (UTF-8)
    are thinned to every 2nd, 4th, ... chunk of about a kilobyte, in one pass, so memory and time stay
    bounded. Piece ids: 0 unknown, 1 begin, 2 end of sequence, then the 256 bytes with ``byte_fallback``.

    Raises UsageError for an unknown ``model_type``, no text, or a vocabulary that the text cannot fill (the
    message gives sentencepiece's own bound); QEffectError when the files cannot be written.
    """
    if model_type not in ("bpe", "unigram"):
        raise UsageError(f"unknown tokenizer type {model_type!r}: use 'bpe' or 'unigram'")
    sample, stride = _sample(texts, max_sample_bytes)
    if not sample:
        raise UsageError("the tokenizer cannot be trained: the corpus has no text")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "model_type": model_type,
        "byte_fallback": byte_fallback,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "max_sentence_length": _MAX_SENTENCE_BYTES,
        # Unigram only: drop half of the candidates per round and not a quarter; twice as fast, 0.1 % more
        # tokens.
        "shrinking_factor": 0.5,
        "num_threads": _TRAINER_THREADS,
    }
    model = _train(sample, settings)
    prefix = Path(model_prefix)
    record = {
        "format": SETTINGS_FORMAT,
        "sha256": hashlib.sha256(model).hexdigest(),
        "sentencepiece": sentencepiece.__version__,
        "settings": settings,
        "sample": {"bytes": sum(len(chunk) for chunk in sample), "chunks": len(sample), "every": stride},
    }
    model_path = prefix.with_name(prefix.name + ".model")
    settings_path = _settings_path(model_path)
    if settings_path.exists():
        # A crash between the two writes must not leave a new model beside the settings of an old one.
        settings_path.unlink()
    write_atomic(model_path, model)
    write_atomic(settings_path, (json.dumps(record, indent=2) + "\n").encode())
    return model_path


class Tokenizer:
    """A sentencepiece model read from ``path`` (``*.model``).

    Attributes: ``path``; ``vocab_size`` (number of ids); ``bos_id``, ``eos_id`` (-1 where the model has
    none); ``sha256`` of the model file; ``settings``, the JSON stored beside the model, or None for a model
    from elsewhere. ``raw``, where it is given, is the file's content: no file is read then, and no settings.
    Raises UsageError when the file is missing, is no sentencepiece model, or is not the one its settings describe.
    """

    def __init__(self, path: Path | str, raw: bytes | None = None) -> None:
        self.path = Path(path)
        try:
            model = self.path.read_bytes() if raw is None else raw
        except FileNotFoundError:
            raise UsageError(
                f"tokenizer {self.path} does not exist: give the path of a .model file, or make one "
                "with python -m tools.preprocess --train-tokenizer"
            ) from None
        except OSError as error:
            raise UsageError(f"tokenizer {self.path} cannot be read: {error.strerror}") from error
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.settings = self._read_settings() if raw is None else None
        self._processor = self._load(model)
        self.vocab_size: int = self._processor.get_piece_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self._space_symbol_ids = self._byte_ids(SPACE_SYMBOL)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; no begin or end of sequence is added. Raises UsageError for a lone
        surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """``[encode(t) for t in texts]`` on ``threads`` threads; the result does not depend on their
        number."""
        plain, split = self._without_space_symbols(texts)
        result: list[list[int]] = self._processor.encode(plain, num_threads=threads)
        for i in split:
            result[i] = self._encode_around_space_symbols(texts[i])
        return result

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """:meth:`encode_batch` as int32 arrays, on one thread; without Python's integers where the package can."""
        plain, split = self._without_space_symbols(texts)
        try:
            found = self._processor.encode(plain, num_threads=1, return_type="numpy")
        except (TypeError, ValueError):  # a version that has only lists
            found = self._processor.encode(plain, num_threads=1)
        result = [np.asarray(ids, dtype=np.int32) for ids in found]
        for i in split:
            result[i] = np.array(self._encode_around_space_symbols(texts[i]), dtype=np.int32)
        return result

    def _without_space_symbols(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """The texts, those with a space symbol emptied, and which these are."""
        for text in texts:
            if not text.isascii():
                check_unicode(text)
        split = [i for i, text in enumerate(texts) if self._space_symbol_ids and SPACE_SYMBOL in text]
        plain = list(texts)
        for i in split:
            plain[i] = ""
        return plain, split

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``. Byte pieces that are no UTF-8 come out as U+FFFD; begin and end ids as
        nothing.

        Raises UsageError for an id outside the vocabulary.
        """
        numbers = [int(i) for i in ids]
        for i in numbers:
            self._check_id(i)
        text: str = self._processor.decode(numbers)
        return text

    def piece_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text that has begun already; none for begin and end ids.

        Of the unknown id sentencepiece's own picture. (A dummy prefix matters at a text's very beginning only.)
        """
        self._check_id(token)
        if self._processor.is_byte(token):
            return bytes([int(self._processor.id_to_piece(token)[3:5], 16)])
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return self.decode([token]).encode()
        piece: str = self._processor.id_to_piece(token)
        return piece.replace(SPACE_SYMBOL, " ").encode()

    def piece_name(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        self._check_id(token)
        return str(self._processor.id_to_piece(token))

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """What comes before a text: nothing, as in training on our corpora."""
        return ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return () if self.eos_id < 0 else (self.eos_id,)

    def decoder(self) -> PieceDecoder:
        """Text of one continuation, token by token."""
        return PieceDecoder(self.piece_bytes)

    def token_id(self, piece: str) -> int | None:
        """The id of a piece, control pieces included; None where there is none of that name."""
        found: int = self._processor.piece_to_id(piece)
        return None if self._processor.is_unknown(found) else found

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token} is outside the vocabulary of {self.path} (0 to {self.vocab_size - 1})")

    def _encode_around_space_symbols(self, text: str) -> list[int]:
        parts = self._processor.encode(text.split(SPACE_SYMBOL))
        ids: list[int] = parts[0]
        for part in parts[1:]:
            ids += self._space_symbol_ids
            ids += part
        return ids

    def _byte_ids(self, text: str) -> list[int]:
        """Ids of the byte pieces of ``text``; empty when the model was trained without byte fallback."""
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        return ids if all(self._processor.is_byte(i) for i in ids) else []

    def _load(self, model: bytes) -> sentencepiece.SentencePieceProcessor:
        problem = f"tokenizer {self.path} is not a sentencepiece model, or is damaged: make or copy it again"
        if not model:
            raise UsageError(problem + " (the file is empty)")
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as error:  # the binding raises several types for a bad protocol buffer
            raise UsageError(problem) from error

    def _read_settings(self) -> dict[str, Any] | None:
        path = _settings_path(self.path)
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text())
            if isinstance(record, dict) and "sha256" not in record and {"model", "added_tokens"} <= record.keys():
                return None  # tokenizer.json beside tokenizer.model: Hugging Face's own form of it
            found = record["sha256"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{path}, the settings of tokenizer {self.path}, cannot be read: {error}; restore it, or "
                "remove it to use the model without its settings"
            ) from error
        if found != self.sha256:
            raise UsageError(
                f"tokenizer {self.path} has SHA-256 {self.sha256}, but {path} describes {found}: one of "
                "the two was changed or damaged; copy both again"
            )
        return record


class PieceDecoder:
    """Text from tokens as they come; a character of several byte pieces appears when it is whole."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that ``token`` completes, perhaps none."""
        return self._decoder.decode(self._bytes_of(token))

    def finish(self) -> str:
        """U+FFFD where a character was left incomplete."""
        return self._decoder.decode(b"", final=True)


def _settings_path(model_path: Path) -> Path:
    return model_path.with_suffix(".json")


def is_settings(path: Path) -> bool:
    """Whether a file holds the settings that :func:`train_sentencepiece` writes."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"sentencepiece", "settings"} <= found.keys()


def check_unicode(text: str) -> None:
    """Raises UsageError for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}: "
            "it has no UTF-8 form"
        ) from error


def _chunks(text: str) -> Iterator[str]:
    """Cuts ``text`` into pieces of at most 1000 characters, before a run of newlines where there is one.

    Before and not after: the trainer drops newlines at the end of a sentence, and keeps those at its start.
    """
    start = 0
    while start < len(text):
        end = start + _CHUNK_CHARACTERS
        if end < len(text):
            cut = text.rfind("\n", start + 1, end)
            while cut > start + 1 and text[cut - 1] == "\n":
                cut -= 1
            if cut > start and text[start:cut].strip("\n"):
                end = cut
        yield text[start:end]
        start = end


def _sample(texts: Iterable[str], limit: int) -> tuple[list[bytes], int]:
    """Chunks of ``texts`` as UTF-8, thinned to at most ``limit`` bytes, and the stride that was left."""
    kept: list[bytes] = []
    size = 0
    stride = 1
    number = 0
    for text in texts:
        check_unicode(text)
        for chunk in _chunks(text):
            if number % stride == 0:
                kept.append(chunk.encode())
                size += len(kept[-1])
                while size > limit and len(kept) > 1:
                    kept = kept[::2]
                    stride *= 2
                    size = sum(len(c) for c in kept)
            number += 1
    return kept, stride


def _train(sample: list[bytes], settings: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    try:
        # A writer instead of a file name: the trainer would store the path inside the model, and so in its
        # digest.
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=model, minloglevel=2, **settings
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = re.sub(r"^\w+: .*\] ", "", str(error))  # without the source line and the failed condition
        raise UsageError(
            f"sentencepiece cannot train a vocabulary of {settings['vocab_size']} on this corpus: "
            f"{reason.rstrip('.')}; use another vocabulary size or more text"
        ) from error
    return model.getvalue()
