"""Tokenizers of Hugging Face's ``tokenizer.json``, as they come with a model: for its prompts and texts.

Encoding is the package ``tokenizers``' own. Decoding goes by the bytes of each piece, so that text can be shown token by token.
They are known for the two kinds that language models use, byte-level pieces (GPT-2, Llama 3, Qwen) and sentencepiece-like ones
(Llama 2, Mistral).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.tokenizer import SPACE_SYMBOL, PieceDecoder, check_unicode
from qeffect_lm.errors import UsageError

_SENTENCEPIECE_LIKE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class HuggingFaceTokenizer:
    """The tokenizer of a ``tokenizer.json``, with the interface of :class:`~qeffect_lm.data.tokenizer.Tokenizer`.

    Attributes: ``vocab_size`` (one more than the largest id, special tokens included), ``begin_ids`` (what the file says comes
    before a text), ``bos_id`` (the last of these, or -1), ``end_ids`` (none: the file does not say), ``sha256`` of the file.
    Special tokens written out in a text are those tokens, as Hugging Face has it.

    Args: ``raw``: the file's content, where it was read already.

    Raises UsageError where the file is missing or none of these, or the package ``tokenizers`` is.
    """

    def __init__(self, path: Path | str, raw: bytes | None = None) -> None:
        self.path = Path(path)
        try:
            raw = self.path.read_bytes() if raw is None else raw
        except OSError as error:
            raise UsageError(f"tokenizer {self.path} cannot be read: {error.strerror}") from error
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self._tokenizer = self._load(raw)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.bytes_of = self._bytes_of(json.loads(raw), vocabulary)
        first = self._tokenizer.encode("a", add_special_tokens=True)
        text_at = first.special_tokens_mask.index(0) if 0 in first.special_tokens_mask else 0
        self.begin_ids = tuple(first.ids[:text_at])
        self.bos_id: int = self.begin_ids[-1] if self.begin_ids else -1
        self.end_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; no begin or end of sequence is added. Raises UsageError for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """``[encode(t) for t in texts]``; with more than one of ``threads`` on as many as the package takes."""
        for text in texts:
            if not text.isascii():
                check_unicode(text)
        if threads > 1:
            return [made.ids for made in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        encode = self._tokenizer.encode
        return [encode(text, add_special_tokens=False).ids for text in texts]

    def encode_arrays(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """:meth:`encode_batch` as int32 arrays."""
        return [np.array(ids, dtype=np.int32) for ids in self.encode_batch(texts)]

    def encode_spans(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of ``text`` and, of each, where in it its characters end. Raises UsageError for a lone surrogate."""
        check_unicode(text)
        made = self._tokenizer.encode(text, add_special_tokens=False)
        return made.ids, [end for _, end in made.offsets]

    def token_id(self, piece: str) -> int | None:
        """The id of a piece, special tokens included; None where there is none of that name."""
        found: int | None = self._tokenizer.token_to_id(piece)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens come out as nothing. Raises UsageError for an id outside the vocabulary."""
        for token in ids:
            self.piece_bytes(token)
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text

    def piece_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text that has begun already; none for special tokens."""
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token id {token} is outside the vocabulary of {self.path} (0 to {self.vocab_size - 1})")
        return self.bytes_of.get(token, b"")

    def piece_name(self, token: int) -> str:
        """A token as the vocabulary spells it."""
        found: str | None = self._tokenizer.id_to_token(token)
        return f"<{token}>" if found is None else found

    def decoder(self) -> PieceDecoder:
        """Text of one continuation, token by token."""
        return PieceDecoder(self.piece_bytes)

    def _load(self, raw: bytes) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UsageError(
                f"tokenizer {self.path} is Hugging Face's: it needs the package tokenizers (pip install 'qeffect-lm[hf]')"
            ) from None
        try:
            made = Tokenizer.from_buffer(raw)
        except Exception as error:  # the binding raises plain Exceptions
            raise UsageError(f"tokenizer {self.path} is no tokenizer.json of Hugging Face: {error}") from error
        made.no_truncation()
        made.no_padding()
        return made

    def _bytes_of(self, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> dict[int, bytes]:
        """Id → what it adds to a text; nothing for special tokens."""
        kinds = set(_decoder_types(content.get("decoder")))
        if "ByteLevel" in kinds:
            letters = byte_letters()
            known = {piece: token for piece, token in vocabulary.items() if letters.keys() >= set(piece)}
            table = {token: bytes(letters[letter] for letter in piece) for piece, token in known.items()}
        elif kinds and kinds <= _SENTENCEPIECE_LIKE:
            fallback = "ByteFallback" in kinds
            table = {token: _sentencepiece_bytes(piece, fallback) for piece, token in vocabulary.items()}
        else:
            raise UsageError(
                f"tokenizer {self.path} puts pieces together by {', '.join(sorted(kinds)) or 'no decoder'}: only byte-level "
                "and sentencepiece-like ones can be read"
            )
        for token in content.get("added_tokens") or []:
            table[token["id"]] = b"" if token.get("special") else str(token["content"]).encode()
        return table


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_types(part)]
    return [str(decoder.get("type"))]


def _sentencepiece_bytes(piece: str, fallback: bool) -> bytes:
    if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE_SYMBOL, " ").encode()


def byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level pieces (Radford et al. 2019): printable ones for themselves, the
    others for the code points from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}
