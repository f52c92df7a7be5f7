"""The manifest: what a checkpoint directory holds, validated, and sealed by a digest of its own bytes.

The file is ordinary JSON whose first line is ``{"digest": "<SHA-256 of everything after this line>",``. So a
change of any byte is noticed, and the file stays readable with any JSON tool.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import qeffect_lm
from checkpoint.digests import PIECE
from checkpoint.layout import MANIFEST, Box, CheckpointError, describe, tiling_fault
from checkpoint.shards import DTYPE_TAGS, torch_dtype
from qeffect_lm.state import Role

FORMAT = 2
OLDEST = 1

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# A plain name, no separators: a manifest cannot make us open a file elsewhere, or one of another kind.
ShardName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors$")]
# A shard, a rank's document, or what travels with a model: its configuration, tokenizer and licence. Never a pickle.
FileName = Annotated[
    str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|txt\.gz|json|jinja|model|txt|yaml)|LICENSE|NOTICE)$")
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SliceEntry(_Part):
    """One block of a logical tensor: the file and key that hold it, where its bytes are, their SHA-256."""

    file: ShardName
    key: str
    start: tuple[Count, ...]
    shape: tuple[Count, ...]
    offset: Count
    sha256: Digest

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


class TensorEntry(_Part):
    """A logical tensor: unpadded global ``shape``, dtype, role, the mesh axis that cuts each dimension, its
    slices.
    """

    shape: tuple[Count, ...]
    dtype: str
    role: Role
    axes: tuple[str | None, ...]
    per_rank: bool = False
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
    coords: dict[str, int]
    meta: dict[str, Any]


class Manifest(_Part):
    """Everything about a checkpoint but the tensors' bytes. ``meta`` is the caller's free JSON."""

    format: int = FORMAT
    step: Count
    meta: dict[str, Any]
    ranks: tuple[RankEntry, ...]
    versions: dict[str, str]
    files: dict[FileName, FileEntry]
    tensors: dict[str, TensorEntry]

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
        at = self.hashed(file) if self.format > 1 or not held else held[0][0]
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
        return _first_line(rest) + rest


def _first_line(rest: bytes) -> bytes:
    return b'{"digest": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Validate the bytes of ``path``. Raises :class:`CheckpointError` naming the file and what is wrong."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: not valid JSON ({error})") from error
    found = body.get("format") if isinstance(body, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}; this version of qeffect-lm reads up to format {FORMAT}: "
            "update qeffect-lm"
        )
    rest = raw[raw.find(b"\n") + 1 :]
    if raw != _first_line(rest) + rest:
        raise CheckpointError(f"{path} is damaged or was edited: its digest does not match its content")
    del body["digest"]
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is not a valid manifest: {where}: {first['msg']}") from error
    if not OLDEST <= manifest.format <= FORMAT:
        raise CheckpointError(f"{path} has the unknown format {manifest.format}")
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory. Raises :class:`CheckpointError` when missing or not sound."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
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
            size = (directory / name).stat().st_size
            if size != entry.size:
                return f"{directory / name} has {size} bytes, the manifest says {entry.size}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"cannot read {error.filename}: {describe(error)}"
    return None


def plain_json(value: Any, where: str) -> Any:
    """A copy of ``value`` in JSON's own types (tuples become lists; NaN and infinity are allowed, as Python
    writes them).

    Raises :class:`CheckpointError` naming the place of anything that would not come back equal.
    """
    if value is None or isinstance(value, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):  # an enum member or numpy's float64 becomes the builtin it derives from
            return str.__str__(value) if base is str else base(value)
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: keys must be strings to survive JSON")
        return {str(key): plain_json(item, f"{where}.{key}") for key, item in value.items()}
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
