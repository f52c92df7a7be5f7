"""The tokenizer that goes with a checkpoint, and what its model wants before a text and takes for its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
    """The tokenizer's file in the checkpoint itself."""
    return next((checkpoint.path / name for name in _preferred() if name in checkpoint.manifest.files), None)


def _preferred() -> tuple[str, str]:
    """Where both forms came along, Hugging Face's, which alone knows added tokens, unless the package for it is missing."""
    return (HF_TOKENIZER, TOKENIZER) if find_spec("tokenizers") is not None else (TOKENIZER, HF_TOKENIZER)


def language_of(loaded: Loaded, given: Path | None = None) -> Language:
    """The tokenizer, with begin and end as the files say that came along with it from Hugging Face.

    Begin: what the template of a ``tokenizer.json`` puts first; of a sentencepiece model as ``tokenizer_config.json`` has it
    (``add_bos_token``). End: ``eos_token_id`` of ``generation_config.json``, else of ``config.json``, else the tokenizer's.
    """
    tokenizer = tokenizer_of(loaded, given)
    if tokenizer.path != travelling(loaded.checkpoint):
        return Language(tokenizer, tokenizer.begin_ids, tokenizer.end_ids)
    checkpoint = loaded.checkpoint

    def read(name: str) -> dict[str, Any]:
        return _object(checkpoint.path / name, checkpoint.read_file(name)) if name in checkpoint.manifest.files else {}

    return Language(tokenizer, *_begin_and_end(tokenizer, read, checkpoint.path))


def _begin_and_end(
    tokenizer: AnyTokenizer, read: Callable[[str], dict[str, Any]], folder: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the files beside a tokenizer say; ``read`` gives the JSON object of a name in ``folder``, {} where there is none."""
    begin, end = tokenizer.begin_ids, tokenizer.end_ids
    settings = read(HF_SETTINGS)
    # Llama's class adds the token unless it is told not to.
    usual = str(settings.get("tokenizer_class")).startswith("Llama")
    if not begin and tokenizer.bos_id >= 0 and settings.get("add_bos_token", usual) is True:
        begin = (tokenizer.bos_id,)
    for name in ("generation_config.json", "config.json"):
        ids = read(name).get("eos_token_id")
        if ids is not None:
            end = tuple(ids) if isinstance(ids, list) else (ids,)
            if any(type(token) is not int for token in end):
                raise UsageError(f"{folder / name}: eos_token_id is {ids!r}, neither an id nor a list of ids")
            break
    return begin, end


def _object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object; {} for JSON that is none."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {shown(str(error))}") from error
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class TokenizerFound:
    """The tokenizer among a model's files.

    Attributes:
        file, ids: the one that generation takes, and how many ids it has; None where there is none, or it cannot be used.
        warnings: what will not work with the model, each with the name of its file.
    """

    file: str | None
    ids: int | None
    warnings: tuple[str, ...]


def check_tokenizer(files: Mapping[str, bytes], vocab_size: int, folder: Path) -> TokenizerFound:
    """Whether texts can be made with the tokenizer files that travel with a model of ``vocab_size`` tokens.

    A model without a tokenizer still trains and is scored on token sets, so nothing here is an error. All forms are loaded as
    generation would.
    """
    sizes: dict[str, int | None] = {}
    warnings: list[str] = []
    for name in (each for each in _preferred() if each in files):
        sizes[name] = None
        try:
            made = HuggingFaceTokenizer if name == HF_TOKENIZER else Tokenizer
            tokenizer: AnyTokenizer = made(folder / name, files[name])
            _, end = _begin_and_end(tokenizer, lambda each: _object(folder / each, files.get(each, b"{}")), folder)
        except UsageError as error:
            warnings.append(str(error))
            continue
        if tokenizer.vocab_size > vocab_size:
            warnings.append(
                f"tokenizer {folder / name} has {tokenizer.vocab_size:,} ids, the model knows {vocab_size:,}: it belongs to "
                "another model, or tokens were added to it alone; texts need another one"
            )
            continue
        sizes[name] = tokenizer.vocab_size
        outside = [token for token in end if not 0 <= token < vocab_size]
        if outside:
            warnings.append(f"{folder}: eos_token_id {outside[0]} is none of the model's {vocab_size:,} tokens and ends none")
    file, ids = next(iter(sizes.items()), (None, None))
    return TokenizerFound(file if ids is not None else None, ids, tuple(dict.fromkeys(warnings)))
