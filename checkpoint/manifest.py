"""The manifest: what a checkpoint directory holds, validated, and sealed by a digest of its own bytes.

The file is ordinary JSON whose first line is ``{"digest": "<SHA-256 of everything after this line>",``. So a
change of any byte is noticed, and the file stays readable with any JSON tool.

Whoever writes a manifest can give it a digest that fits. So nothing in it is believed: sizes are bounded before anything is
allocated, names are plain, and slices have to tile their tensors and their files exactly.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import stat
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

import qeffect_lm
from checkpoint.digests import PIECE, opened, read_whole
from checkpoint.layout import MANIFEST, Box, CheckpointError, describe, is_companion, is_document, step_of, tiling_fault
from checkpoint.shards import DTYPE_TAGS, torch_dtype
from qeffect_lm.errors import shown
from qeffect_lm.state import Role

FORMAT = 2
OLDEST = 1

# What a reader takes, in bytes; a writer refuses to write more.
MANIFEST_MOST = 512 << 20  # a million slices
HEADER_MOST = 100_000_000  # of a shard, as the safetensors library has it
DOCUMENT_MOST = 256 << 20  # of a document, both as a file and as the text that it unpacks to
DEPTH_MOST = 64  # of brackets in the manifest
KEY_MOST = 1024  # characters of a key anywhere in it
DIMENSIONS_MOST = 32
NAME_MOST = 500  # characters of a tensor's name; its key in a shard may have a number more


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_printable)]
Shape = Annotated[tuple[Count, ...], Field(max_length=DIMENSIONS_MOST)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# A plain name, no separators: a manifest cannot make us open a file elsewhere, or one of another kind.
ShardName = Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")]
# A shard, a rank's document, or what travels with a model: its configuration, tokenizer and licence. Never a pickle.
FileName = Annotated[
    str,
    Field(
        max_length=255,
        pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|txt\.gz|json|jinja|model|txt|yaml)|LICENSE|NOTICE)$",
    ),
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SliceEntry(_Part):
    """One block of a logical tensor: the file and key that hold it, where its bytes are, their SHA-256."""

    file: ShardName
    key: Name
    start: Shape
    shape: Shape
    offset: Count
    sha256: Digest

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


class TensorEntry(_Part):
    """A logical tensor: unpadded global ``shape``, dtype, role, the mesh axis that cuts each dimension, its
    slices.
    """

    shape: Shape
    dtype: Name
    role: Role
    axes: Annotated[tuple[Name | None, ...], Field(max_length=DIMENSIONS_MOST)]
    per_rank: StrictBool = False
    slices: tuple[SliceEntry, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return torch_dtype(self.dtype).itemsize

    def nbytes(self, part: SliceEntry) -> int:
        """Bytes of a slice."""
        return math.prod(part.shape) * self.itemsize

    @model_validator(mode="after")
    def _sound(self) -> TensorEntry:
        if self.dtype not in DTYPE_TAGS:
            raise ValueError(f"unknown dtype {self.dtype!r}")
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axes for {len(self.shape)} dimensions")
        if math.prod(max(1, n) for n in self.shape) * self.itemsize >= 2**63:
            raise ValueError(f"the shape {list(self.shape)} is larger than any memory")
        fault = tiling_fault(self.shape, [part.box for part in self.slices])
        if fault:
            raise ValueError(fault)
        return self


class FileEntry(_Part):
    """A shard, or a document of a rank: size in bytes, and the SHA-256 of its first ``hashed`` bytes. Those are a
    shard's header, since its slices have digests of their own, and the whole of a document; in format 1, without
    ``hashed``, the whole of a shard too.
    """

    size: Count
    sha256: Digest
    hashed: Count | None = None


class RankEntry(_Part):
    """A rank that took part: its mesh coordinates and what it alone had to say."""

    rank: Count
    coords: dict[Name, Count]
    meta: dict[str, Any]


class Manifest(_Part):
    """Everything about a checkpoint but the tensors' bytes. ``meta`` is the caller's free JSON."""

    format: Count = FORMAT
    step: Count
    meta: dict[str, Any]
    ranks: tuple[RankEntry, ...]
    versions: dict[Name, Name]
    files: dict[FileName, FileEntry]
    tensors: dict[Name, TensorEntry]

    @property
    def piece(self) -> int:
        """Bytes of a piece of a slice: those that are hashed in one go."""
        return PIECE if self.format > 1 else sys.maxsize

    def hashed(self, file: str) -> int:
        """How many of a file's bytes, from its beginning, its own SHA-256 is of."""
        entry = self.files[file]
        return entry.size if entry.hashed is None else entry.hashed

    @model_validator(mode="after")
    def _slices_fill_files(self) -> Manifest:
        """Side by side and without gaps: so no byte of a file is unknown, and none counts twice."""
        if MANIFEST in self.files:
            raise ValueError(f"`files` lists {MANIFEST} itself")
        spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in self.files}
        for name, entry in self.tensors.items():
            for part in entry.slices:
                if part.file not in self.files:
                    raise ValueError(f"tensor {name!r} is in {part.file}, which `files` does not list")
                end = part.offset + entry.nbytes(part)
                if end > self.files[part.file].size:
                    raise ValueError(f"tensor {name!r} reaches beyond the end of {part.file}")
                if end > part.offset:
                    spans[part.file].append((part.offset, end, name))
        for file, held in spans.items():
            self._check_file(file, sorted(held))
        return self

    def _check_file(self, file: str, held: Sequence[tuple[int, int, str]]) -> None:
        entry = self.files[file]
        if (entry.hashed is None) != (self.format == 1):
            raise ValueError(f"{file}: format {self.format} {'has no' if self.format == 1 else 'needs'} `hashed`")
        if file == MANIFEST:
            raise ValueError("a manifest does not list itself")
        if is_document(file) or is_companion(file):
            if self.hashed(file) != entry.size or entry.size > DOCUMENT_MOST:
                raise ValueError(f"{file} has {entry.size} bytes (at most {DOCUMENT_MOST}), {self.hashed(file)} of them hashed")
            return
        at = self.hashed(file) if self.format > 1 or not held else held[0][0]
        if held and at > HEADER_MOST:
            raise ValueError(f"{file} has a header of {at} bytes; at most {HEADER_MOST}")
        for offset, end, name in held:
            if offset != at:
                raise ValueError(f"tensor {name!r} begins at byte {offset} of {file}, and what is before it ends at {at}")
            at = end
        if at != entry.size:
            raise ValueError(f"{file} has {entry.size} bytes, and header and tensors end at {at}")

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``."""
        body = self.model_dump(mode="json", exclude={"meta", "ranks"})
        body["ranks"] = [{"rank": r.rank, "coords": r.coords, "meta": r.meta} for r in self.ranks]
        body["meta"] = self.meta  # last and as it is: integers of any size and every float keep their value
        rest = json.dumps(body, indent=1).encode()[2:] + b"\n"
        raw = _first_line(rest) + rest
        if len(raw) > MANIFEST_MOST:
            raise CheckpointError(f"the manifest would have {len(raw)} bytes; at most {MANIFEST_MOST} can be read")
        return raw


def _first_line(rest: bytes) -> bytes:
    return b'{"digest": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Validate the bytes of ``path``. Raises :class:`CheckpointError` naming the file and what is wrong."""
    rest = raw[raw.find(b"\n") + 1 :]
    if raw != _first_line(rest) + rest:
        raise CheckpointError(f"{path} is damaged or was edited: its digest does not match its content")
    try:
        body = json.loads(raw.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not valid JSON ({shown(str(error))})") from None
    found = body["format"] if "format" in body else None
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{path} has format {shown(str(found))}; this version of qeffect-lm reads up to format {FORMAT}: "
            "update qeffect-lm"
        )
    if too_deep(body):
        raise CheckpointError(f"{path} is not a valid manifest: more than {DEPTH_MOST} brackets within each other")
    del body["digest"]
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is not a valid manifest: {shown(where)}: {shown(first['msg'], 600)}") from None
    if not OLDEST <= manifest.format <= FORMAT:
        raise CheckpointError(f"{path} has the unknown format {manifest.format}")
    return manifest


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Which of two values a name has would depend on the reader; and keys are joined to paths."""
    made = dict(pairs)
    if any(len(name) > KEY_MOST for name in made):
        raise ValueError(f"a key has more than {KEY_MOST} characters")
    if len(made) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(name)!r} is there twice")
    return made


def too_deep(value: Any) -> bool:
    """Whether lists and objects lie in each other more than ``DEPTH_MOST`` deep; functions that follow them stay shallow."""
    level = [value]
    for _ in range(DEPTH_MOST + 1):
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
        if not inner:
            return False
    return True


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises :class:`CheckpointError` when missing or not sound."""
    path = directory / MANIFEST
    try:
        raw = read_whole(path, MANIFEST_MOST)
    except FileNotFoundError:
        what = "no such directory" if not directory.is_dir() else f"it has no {MANIFEST}"
        raise CheckpointError(f"{directory} is not a complete checkpoint: {what}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {describe(error)}") from error
    return parse_manifest(raw, path)


def incomplete_because(directory: Path) -> str | None:
    """None when manifest and files are all there with the right sizes (digests of shards unread); else the
    reason.
    """
    try:
        manifest = read_manifest(directory)
        for name, entry in manifest.files.items():
            found = os.lstat(directory / name)  # a link is not followed when it is read either
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                return f"{directory / name} is not a regular file"
            if size != entry.size:
                return f"{directory / name} has {size} bytes, the manifest says {entry.size}"
        if step_of(directory.name) not in (None, manifest.step):
            return f"{directory} holds step {manifest.step}: it was renamed, or copied to another name"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"cannot read {error.filename}: {describe(error)}"
    return None


def unreadable_because(directory: Path) -> str | None:
    """Why it cannot be known what the directory holds: rights that this user lacks, a disk or a server that does not answer.
    None when it can. Such a checkpoint may be whole: nobody may pass over it as if it were not.
    """
    try:
        with opened(directory / MANIFEST):
            pass
        for name in read_manifest(directory).files:
            with opened(directory / name):
                pass
    except CheckpointError:
        return None  # it is known: what it holds is no manifest
    except OSError as error:
        if error.errno not in NOT_THERE:
            return f"cannot read {error.filename or directory}: {describe(error)}"
    return None


NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP)  # a name without a file, or with something else


def plain_json(value: Any, where: str, depth: int = DEPTH_MOST - 3) -> Any:
    """A copy of ``value`` in JSON's own types (tuples become lists; NaN and infinity are allowed, as Python
    writes them).

    Raises :class:`CheckpointError` naming the place of anything that would not come back equal, or lies more than ``depth``
    brackets deep.
    """
    if depth < 0:
        raise CheckpointError(f"{shown(where)}: brackets lie in each other too deep for a manifest")
    if value is None or isinstance(value, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):  # an enum member or numpy's float64 becomes the builtin it derives from
            return str.__str__(value) if base is str else base(value)
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]", depth - 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: keys must be strings to survive JSON")
            if len(key) > KEY_MOST:
                raise CheckpointError(f"{shown(where)} has a key of {len(key)} characters; at most {KEY_MOST} can be read")
        return {str(key): plain_json(item, f"{where}.{key}", depth - 1) for key, item in value.items()}
    raise CheckpointError(f"{where} is a {type(value).__name__}, which JSON does not hold: convert it first")


def library_versions() -> dict[str, str]:
    """What wrote a checkpoint: python and the libraries that have a say in its numbers."""
    versions = {"python": platform.python_version(), "qeffect-lm": qeffect_lm.__version__}
    for name in ("torch", "numpy", "pydantic", "transformer-engine"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
