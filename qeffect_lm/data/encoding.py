"""One shard's documents to tokens: the work of one worker.

A document belongs to the part (``train``, ``valid``, ``test``) that a hash of the seed, of its file's name (of texts that are
files) and of its content says, so that equal documents are in one part, wherever they lie and whoever reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.chat import TEMPLATES, check_template, messages_of, tokens_of
from qeffect_lm.data.files import write_atomic
from qeffect_lm.data.indexed import IndexedWriter
from qeffect_lm.data.inputs import Bad, BadInputError, Document, Reading, Shard
from qeffect_lm.data.tokenizer import Tokenizer
from qeffect_lm.errors import UsageError

PARTS = ("train", "valid", "test")
BATCH_BYTES = 1 << 20
KEPT_BAD = 1000  # bad lines of a shard that are remembered by place; all are counted


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a corpus, besides its files. With a ``template`` (:mod:`qeffect_lm.data.chat`) the documents
    are conversations, and each part has a mask beside it."""

    key: str = "text"
    format: str = "auto"
    append_eos: bool = True
    valid_fraction: float = 0.0
    test_fraction: float = 0.0
    seed: int = 1234
    bad: str = "refuse"
    shard_bytes: int = 0
    template: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are written."""
        held_out = {"valid": self.valid_fraction, "test": self.test_fraction}
        return tuple(part for part in PARTS if part == "train" or held_out[part])

    @property
    def pairs(self) -> tuple[str, ...]:
        """The token files of all parts, masks among them."""
        return self.parts if self.template is None else (*self.parts, *(f"{part}.mask" for part in self.parts))

    def conversation(self, record: dict[str, Any]) -> Document | str:
        """A JSON object, or a row, rendered, or why it is no conversation. Its content is what the template makes of it: what
        else the object holds does not tell copies apart."""
        assert self.template is not None
        messages = messages_of(record, self.key)
        if isinstance(messages, str):
            return messages
        try:
            made = TEMPLATES[self.template](messages)
        except UsageError as error:
            return str(error)
        return Document("", "\0".join(segment.text for segment in made).encode(), record=made)

    def reading(self, shard: Shard, progress: Callable[[int], object] = lambda count: None) -> Reading:
        """Reads the documents of a shard."""
        return Reading(shard, self.key, progress, None if self.template is None else self.conversation)

    def part_of(self, document: Document) -> str:
        """The part of a document."""
        return self.part_at(f"{self.seed}\0{document.name}\0".encode(errors="surrogateescape") + document.content)

    def part_at(self, key: bytes) -> str:
        """The part that a hash of ``key`` falls into."""
        if not self.valid_fraction and not self.test_fraction:
            return "train"
        place = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
        if place < self.valid_fraction:
            return "valid"
        return "test" if place < self.valid_fraction + self.test_fraction else "train"


class TextTokenizer(Protocol):
    """What encoding wants of a tokenizer."""

    vocab_size: int
    sha256: str

    @property
    def path(self) -> Path: ...
    @property
    def end_ids(self) -> tuple[int, ...]: ...
    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]: ...
    def encode_arrays(self, texts: list[str]) -> list[npt.NDArray[np.int32]]: ...
    def token_id(self, piece: str) -> int | None: ...


def open_tokenizer(path: Path | str, end: str | None = None) -> TextTokenizer:
    """The tokenizer of a file, by its ending: Hugging Face's ``.json``, else sentencepiece's. ``end`` names the piece that
    ends a text, where the file does not say (Hugging Face's does not).

    Raises:
        UsageError: it cannot be used, or has no piece ``end``.
    """
    made: Any
    if Path(path).suffix == ".json":
        from qeffect_lm.data.hf_tokenizer import HuggingFaceTokenizer

        made = HuggingFaceTokenizer(path)
    else:
        made = Tokenizer(path)
    if end is not None:
        token = made.token_id(end)
        if token is None:
            raise UsageError(f"tokenizer {path} has no piece {end!r} to end a document with: name another one")
        return _Ended(made, token)
    return made


class _Ended:
    """A tokenizer whose end of text was named."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer = tokenizer
        self.end_ids = (end,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass(frozen=True)
class ShardJob:
    """``shard``, to be written below ``folder`` as number ``number``."""

    number: int
    shard: Shard
    folder: str

    @property
    def label(self) -> str:
        return self.shard.label

    @property
    def prefix(self) -> Path:
        return Path(self.folder) / f"shard-{self.number:06d}"

    @property
    def record(self) -> Path:
        """There once the shard is finished."""
        return self.prefix.with_suffix(".json")


@dataclass
class ShardResult:
    """What became of a shard: documents that went into a part and the bytes of their texts, bad lines (all counted, the first
    ones named), and the SHA-256 of what was read."""

    documents: int = 0
    text_bytes: int = 0
    bad_count: int = 0
    bad: list[Bad] = field(default_factory=list)
    sha256: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ShardResult:
        values = json.loads(text)
        return cls(**{**values, "bad": [Bad(**one) for one in values["bad"]]})


class ShardEncoder:
    """Encodes shards; sent to a worker, it opens the tokenizer there, once."""

    def __init__(self, tokenizer: Path | str, end: str | None, settings: Settings) -> None:
        self._tokenizer, self._end, self.settings = str(tokenizer), end, settings

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return open_tokenizer(self._tokenizer, self._end)

    def __call__(self, job: ShardJob, progress: Callable[[int], object]) -> ShardResult:
        """Encode a shard into ``<prefix>.<part>.bin/.idx``; its record is written last, when all of it is on disk.

        Raises:
            BadInputError: the first line that holds no document, where those are refused.
        """
        settings, tokenizer = self.settings, self.tokenizer
        append = settings.append_eos and settings.template is None
        end = np.array(tokenizer.end_ids[:1] if append else [], dtype=np.int32)
        result, reading = ShardResult(), settings.reading(job.shard, progress)
        if settings.template is not None:
            check_template(settings.template, tokenizer)
        writers = {pair: IndexedWriter(f"{job.prefix}.{pair}", vocab_size=tokenizer.vocab_size) for pair in settings.pairs}
        try:
            for batch in batches(good(reading, settings.bad, result)):
                placed: dict[str, list[npt.NDArray[np.int32]]] = {pair: [] for pair in writers}
                if settings.template is None:
                    encoded = tokenizer.encode_arrays([document.text for document in batch])
                    for document, ids in zip(batch, encoded, strict=True):
                        placed[settings.part_of(document)].append(ids)
                else:
                    for document in batch:
                        ids, counted = tokens_of(document.record, tokenizer)
                        placed[settings.part_of(document)].append(ids)
                        placed[f"{settings.part_of(document)}.mask"].append(counted)
                for pair, documents in placed.items():
                    writers[pair].add_documents(documents, end)
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.discard()
        result.sha256 = reading.digest.hexdigest()
        write_atomic(job.record, result.to_json())
        return result


def good(found: Iterable[Document | Bad], policy: str, result: ShardResult) -> Iterator[Document]:
    """The documents, counted; what is none is refused or counted, by ``policy``."""
    for one in found:
        if isinstance(one, Document):
            result.documents += 1
            result.text_bytes += len(one.content)
            yield one
            continue
        if policy == "refuse":
            raise BadInputError(f"{one}; mend it, or leave such lines and files out with --bad skip")
        result.bad_count += 1
        if len(result.bad) < KEPT_BAD:
            result.bad.append(one)


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of about a megabyte at a time."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.content)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
