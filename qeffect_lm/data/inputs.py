"""Documents out of files: JSON lines (plain, .gz, .zst), Parquet, and texts of one document each; cut into shards.

A shard is what one worker reads in one go: a range of bytes of a JSON-lines file (the lines that begin in it), a compressed
file, row groups of a Parquet file, or several whole texts. How a corpus is cut depends on the files alone, so the order of the
documents does not depend on who reads which shard when.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from qeffect_lm.data.tokenizer import check_unicode
from qeffect_lm.errors import UsageError, shown

SMALLEST_SHARD, LARGEST_SHARD = 4 << 20, 256 << 20
_READ = 1 << 20
_PACKED = 1 << 16  # of a compressed file at a time: it may be a thousand times as much unpacked
_ZSTD_WINDOW = 1 << 31  # zstd --long=31
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")
FORMATS = ("auto", "jsonl", "parquet", "text")


class BadInputError(UsageError):
    """A line, row or file that holds no document."""


@dataclass(frozen=True)
class Bad:
    """What holds no document: the file, the line or row (from 1; 0: the whole file), and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        place = f", line {self.line}" if self.line else ""
        return f"{printable(self.file)}{place}: {self.reason}"


@dataclass(frozen=True)
class Document:
    """One document. ``name`` is the file's name of a text that is a file, else empty; ``record`` what was made of its JSON
    object, where something was."""

    text: str
    content: bytes
    name: str = ""
    record: Any = None


@dataclass(frozen=True)
class Shard:
    """``format`` of ``files``; of a single file ``start`` to ``end``, in bytes (JSON lines) or row groups (Parquet)."""

    format: str
    files: tuple[str, ...]
    start: int = 0
    end: int = 0
    bytes: int = 0  # of the files, for the progress

    @property
    def label(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{printable(self.files[0])}{more}" + (f" [{self.start}, {self.end})" if self.end else "")


@dataclass
class Reading:
    """Reads a shard. ``digest`` covers the bytes (of Parquet: the texts) read so far, ``progress`` is told of each read's.

    Args:
        key: field or column of the text.
        parse: makes the document of a JSON object, or of a row's ``{key: value}``, or says why it is none; None: it is the text
            under ``key``.
    """

    shard: Shard
    key: str
    progress: Callable[[int], object] = lambda count: None
    parse: Callable[[dict[str, Any]], Document | str] | None = None
    digest: Any = field(default_factory=hashlib.sha256)
    _first_byte: int = 0  # of the first line that begins in the shard

    def __iter__(self) -> Iterator[Document | Bad]:
        if self.shard.format == "jsonl":
            return self._json_lines()
        return self._rows() if self.shard.format == "parquet" else self._texts()

    # ---- JSON lines -----------------------------------------------------------------------------------------------

    def _json_lines(self) -> Iterator[Document | Bad]:
        path = self.shard.files[0]
        first: int | None = None  # the first line's number, counted where a line is to be named
        number = 0
        try:
            for line in self._lines(path):
                number += 1
                if number == 1 and not self._first_byte:
                    line = line.removeprefix(codecs.BOM_UTF8)
                found = self._parsed(line)
                if isinstance(found, str):
                    if first is None:
                        first = 1 + newlines(path, self._first_byte)
                    yield Bad(path, first + number - 1, found)
                elif found is not None:
                    yield found
        except (OSError, EOFError, zlib.error) as error:
            yield Bad(path, number + 1 if path.endswith(_COMPRESSED) else 0, _reason(error))

    def _parsed(self, line: bytes) -> Document | str | None:
        """A document, or why it is none; None for an empty line."""
        if not line.strip():
            return None
        try:
            record = _DECODER.decode(line.decode())
        except UnicodeDecodeError as error:
            return f"not UTF-8 (byte {error.start})"
        except _TwiceError as error:
            return str(error)
        except (ValueError, RecursionError) as error:
            return f"no JSON: {shown(str(error))}"
        if not isinstance(record, dict):
            return f"a JSON {type(record).__name__}, not an object: JSON lines have one object a line"
        if self.parse is not None:
            return self.parse(record)
        text = record.get(self.key)
        if not isinstance(text, str):
            return f"no text under the key {self.key!r}"
        return _document(text)

    def _lines(self, path: str) -> Iterator[bytes]:
        """Lines without their ends; of a plain file those that begin in [start, end)."""
        with open(path, "rb") as file:
            if not path.endswith(_COMPRESSED):
                yield from self._range(file)
                return
            begun: list[bytes] = []  # of the line that no end was seen of
            for block in _decompressed(path, self._told(file)):
                head, *more = block.split(b"\n")
                begun.append(head)
                for following in more:
                    yield b"".join(begun)
                    begun = [following]
            if any(begun):
                yield b"".join(begun)

    def _range(self, file: IO[bytes]) -> Iterator[bytes]:
        at, end = self.shard.start, self.shard.end
        if at:
            at -= 1
            file.seek(at)
            # A line that began before, and perhaps ends in a later shard: no more of it is read than this shard's part.
            while at < end and (piece := file.readline(_READ)):
                at += len(piece)
                if piece.endswith(b"\n"):
                    break
        self._first_byte = at
        pending = 0
        while at < end:
            line = file.readline()
            if not line:
                break
            at += len(line)
            pending += len(line)
            self.digest.update(line)
            if pending >= _READ:
                self.progress(pending)
                pending = 0
            yield line.rstrip(b"\n")
        self.progress(pending)

    def _told(self, file: IO[bytes]) -> Iterator[bytes]:
        while block := file.read(_PACKED):
            self.digest.update(block)
            self.progress(len(block))
            yield block

    # ---- texts ----------------------------------------------------------------------------------------------------

    def _texts(self) -> Iterator[Document | Bad]:
        for path in self.shard.files:
            try:
                with open(path, "rb") as file:
                    blocks = self._told(file)
                    content = b"".join(_decompressed(path, blocks) if path.endswith(_COMPRESSED) else blocks)
                text = content.decode()
            except (OSError, EOFError, zlib.error) as error:
                yield Bad(path, 0, _reason(error))
            except UnicodeDecodeError as error:
                yield Bad(path, 0, f"not UTF-8 (byte {error.start})")
            else:
                yield Document(text, content, Path(path).name)

    # ---- Parquet --------------------------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Document | Bad]:
        path, arrow = self.shard.files[0], _parquet()
        row = 0
        try:
            file = arrow.ParquetFile(path)
            if self.key not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names[:20])
                raise BadInputError(f"{path} has no column {self.key!r} (it has {names}): name the text's with --key")
            groups = range(self.shard.start, self.shard.end)
            row = sum(file.metadata.row_group(group).num_rows for group in range(self.shard.start))
            share = self.shard.bytes // max(1, len(groups))
            for group in groups:
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[self.key]):
                    for value in _values(batch.column(self.key)):
                        row += 1
                        found = self._row(value)
                        if isinstance(found, str):
                            yield Bad(path, row, found)
                            continue
                        self.digest.update(found.content)
                        yield found
                self.progress(share)
        except BadInputError:
            raise
        except _arrow_errors() as error:
            yield Bad(path, 0, _reason(error))

    def _row(self, value: Any) -> Document | str:
        if self.parse is not None:
            return self.parse({self.key: value})
        if isinstance(value, str):
            return _document(value)
        if isinstance(value, UnicodeDecodeError):
            return f"not UTF-8 (byte {value.start})"
        return f"no text in the column {self.key!r}" + ("" if value is None else f" but {type(value).__name__}")


def _document(text: str) -> Document | str:
    try:
        check_unicode(text)
    except UsageError as error:
        return str(error)
    return Document(text, text.encode())


def _values(column: Any) -> list[Any]:
    """A column's values; in the place of a text that is not UTF-8 the error."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        found = []
        for one in column:
            try:
                found.append(one.as_py())
            except UnicodeDecodeError as error:
                found.append(error)
    return found


class _TwiceError(ValueError):
    """An object has a key twice; parsers differ on which one they take."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _TwiceError(f"the key {shown(repr(twice))} is there twice: which one counts?")
    return made


# Numbers are not ours, and may be longer than Python converts.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=lambda digits: 0, parse_float=lambda digits: 0.0)


def _decompressed(path: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a compressed file; an error where it ends too early."""
    if path.endswith(".gz"):
        make: Callable[[], Any] = lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)  # noqa: E731
    else:
        make = _zstandard().ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj
    unit = make()
    for block in blocks:
        while block:
            if unit.eof:  # members follow each other, or zeros to the end of a tape's block
                block = block.lstrip(b"\0")
                if not block:
                    break
                unit = make()
            try:
                made = unit.decompress(block)
            except zlib.error:
                raise
            except Exception as error:  # zstandard's own
                raise zlib.error(str(error)) from error
            if made:
                yield made
            block = unit.unused_data if unit.eof else b""
    if not unit.eof:
        raise EOFError


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the compressed file ends in the middle: it is truncated"
    if isinstance(error, (zlib.error, gzip.BadGzipFile)):
        return f"the compressed file is damaged ({error})"
    return shown(str(getattr(error, "strerror", None) or error))


def newlines(path: str, end: int) -> int:
    """Line ends in the first ``end`` bytes."""
    count = 0
    with open(path, "rb") as file:
        while end and (block := file.read(min(end, _READ))):
            count += block.count(b"\n")
            end -= len(block)
    return count


def printable(path: str) -> str:
    """``path`` with what is no Unicode spelled out, so that printing it cannot fail."""
    return path.encode("utf-8", "backslashreplace").decode()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UsageError("a .zst file needs the package zstandard: pip install 'qeffect-lm[data]'") from None
    return zstandard


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError("a Parquet file needs the package pyarrow: pip install 'qeffect-lm[data]'") from None
    return pyarrow.parquet


def _arrow_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that it cannot read."""
    import pyarrow

    return OSError, ValueError, KeyError, NotImplementedError, pyarrow.ArrowException


# ---- shards --------------------------------------------------------------------------------------------------------


def format_of(path: Path, asked: str = "auto") -> str:
    """``jsonl``, ``parquet`` or ``text``, by the name's ending unless asked for."""
    if asked != "auto":
        return asked
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSED]
    last = suffixes[-1] if suffixes else ""
    return "jsonl" if last in _JSON_LINES else "parquet" if last == ".parquet" else "text"


def shard_size(files: Sequence[Path]) -> int:
    """Bytes of a shard: about a thousandth of the files, within bounds."""
    return min(max(sum(_size(path) for path in files) // 1024, SMALLEST_SHARD), LARGEST_SHARD)


def cut(files: Sequence[Path], asked: str, shard_bytes: int) -> list[Shard]:
    """Shards of about ``shard_bytes`` bytes in the order of the files."""
    shards: list[Shard] = []
    texts: list[str] = []
    size_of_texts = 0

    def close() -> None:
        nonlocal size_of_texts
        if texts:
            shards.append(Shard("text", tuple(texts), bytes=size_of_texts))
            texts.clear()
            size_of_texts = 0

    for path in files:
        kind, size = format_of(path, asked), _size(path)
        if kind == "text":
            texts.append(str(path))
            size_of_texts += size
            if size_of_texts >= shard_bytes:
                close()
            continue
        close()
        if kind == "parquet":
            shards += _row_groups(str(path), size, shard_bytes)
        elif path.suffix in _COMPRESSED:
            shards.append(Shard("jsonl", (str(path),), bytes=size))
        else:
            for start in range(0, max(size, 1), shard_bytes):
                end = min(size, start + shard_bytes)
                shards.append(Shard("jsonl", (str(path),), start, end, end - start))
    close()
    return shards


def _row_groups(path: str, size: int, shard_bytes: int) -> Iterator[Shard]:
    try:
        groups = _parquet().ParquetFile(path).metadata.num_row_groups
    except _arrow_errors():
        groups = 0
    if not groups:  # reading it says whether there are no rows, or why it cannot be read
        yield Shard("parquet", (path,), bytes=size)
        return
    step = max(1, groups * shard_bytes // max(1, size))
    for start in range(0, groups, step):
        end = min(groups, start + step)
        yield Shard("parquet", (path,), start, end, size * end // groups - size * start // groups)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it says why it cannot be read
