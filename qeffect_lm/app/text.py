"""The tokenizer that goes with a checkpoint, and what its model wants before a text and takes for its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from checkpoint import Checkpoint
from qeffect_lm.app.inference import Loaded
from qeffect_lm.app.starting import HF_TOKENIZER, TOKENIZER
from qeffect_lm.data.hf_tokenizer import HuggingFaceTokenizer
from qeffect_lm.data.tokenizer import PieceDecoder, Tokenizer
from qeffect_lm.errors import UsageError, shown

HF_SETTINGS = "tokenizer_config.json"


class AnyTokenizer(Protocol):
    """What :class:`Tokenizer` and :class:`HuggingFaceTokenizer` share."""

    path: Path
    vocab_size: int
    bos_id: int
    sha256: str

    @property
    def begin_ids(self) -> tuple[int, ...]: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def piece_bytes(self, token: int) -> bytes: ...
    def decoder(self) -> PieceDecoder: ...


@dataclass(frozen=True)
class Language:
    """A tokenizer, the ids that its model is used to see before a text, and those that end one."""

    tokenizer: AnyTokenizer
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def encode(self, texts: Sequence[str], bos: bool | None = None) -> list[list[int]]:
        """Ids of texts after ``begin``; ``bos`` True: after the begin-of-sequence token, False: after nothing.

        Raises:
            UsageError: ``bos``, and the tokenizer has no such token.
        """
        begin = self.begin
        if bos is not None:
            if bos and self.tokenizer.bos_id < 0:
                raise UsageError("--bos: the tokenizer has no begin-of-sequence token")
            begin = (self.tokenizer.bos_id,) if bos else ()
        return [[*begin, *ids] for ids in self.tokenizer.encode_batch(texts)]


def tokenizer_of(loaded: Loaded, given: Path | None = None) -> AnyTokenizer:
    """The tokenizer that goes with a model: the given file, else the checkpoint's own, else the run's ``data.tokenizer``.

    Raises:
        UsageError: there is none, or it has ids that the model does not know.
    """
    path = given or travelling(loaded.checkpoint)
    if path is None and loaded.config.data.tokenizer is not None:
        path = Path(loaded.config.data.tokenizer)
    if path is None:
        raise UsageError("neither the checkpoint nor data.tokenizer has a tokenizer: give one with --tokenizer")
    tokenizer: AnyTokenizer = HuggingFaceTokenizer(path) if path.suffix == ".json" else Tokenizer(path)
    known = loaded.model.vocab_size
    if tokenizer.vocab_size > known:
        raise UsageError(
            f"tokenizer {path} has {tokenizer.vocab_size} ids, the model knows {known}: give the one it was trained with"
        )
    return tokenizer


def travelling(checkpoint: Checkpoint) -> Path | None:
    """The tokenizer's file in the checkpoint itself. Where both forms came along, Hugging Face's, which alone knows added
    tokens, unless the package for it is missing."""
    names = [HF_TOKENIZER, TOKENIZER] if find_spec("tokenizers") is not None else [TOKENIZER, HF_TOKENIZER]
    return next((checkpoint.path / name for name in names if name in checkpoint.manifest.files), None)


def language_of(loaded: Loaded, given: Path | None = None) -> Language:
    """The tokenizer, with begin and end as the files say that came along with it from Hugging Face.

    Begin: what the template of a ``tokenizer.json`` puts first; of a sentencepiece model as ``tokenizer_config.json`` has it
    (``add_bos_token``). End: ``eos_token_id`` of ``generation_config.json``, else of ``config.json``, else the tokenizer's.
    """
    tokenizer = tokenizer_of(loaded, given)
    if tokenizer.path != travelling(loaded.checkpoint):
        return Language(tokenizer, tokenizer.begin_ids, tokenizer.end_ids)
    begin, end = tokenizer.begin_ids, tokenizer.end_ids
    settings = _companion(loaded.checkpoint, HF_SETTINGS)
    # Llama's class adds the token unless it is told not to.
    usual = str(settings.get("tokenizer_class")).startswith("Llama")
    if not begin and tokenizer.bos_id >= 0 and settings.get("add_bos_token", usual) is True:
        begin = (tokenizer.bos_id,)
    for name in ("generation_config.json", "config.json"):
        ids = _companion(loaded.checkpoint, name).get("eos_token_id")
        if ids is not None:
            end = tuple(ids) if isinstance(ids, list) else (ids,)
            if any(type(token) is not int for token in end):
                raise UsageError(f"{loaded.checkpoint.path / name}: eos_token_id is {ids!r}, neither an id nor a list of ids")
            break
    return Language(tokenizer, begin, end)


def _companion(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A JSON file that travels with the model; {} without it."""
    if name not in checkpoint.manifest.files:
        return {}
    try:
        found = json.loads(checkpoint.read_file(name))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{checkpoint.path / name} is no JSON: {shown(str(error))}") from error
    return found if isinstance(found, dict) else {}
