"""Documents out of files: every format gives the same documents, and whatever is none is named by file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data.inputs import Bad, Document, Reading, Shard, cut, format_of, shard_size
from qeffect_lm.errors import UsageError

TEXTS = ["one", "zwei\nLinien", "", "trois \u2581 \U0001f600", "x" * 3000]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "n": 1}).encode() + b"\n" for text in texts)


def zstd(data: bytes) -> bytes:
    made: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return made


def parquet(path: Path, texts: list[Any], rows: int = 2, column: str = "text") -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({column: texts}), path, row_group_size=rows)
    return path


def read(files: list[Path], shard_bytes: int = 1 << 20, key: str = "text") -> list[Document | Bad]:
    return [one for shard in cut(files, "auto", shard_bytes) for one in Reading(shard, key)]


def texts_in(found: list[Document | Bad]) -> list[str]:
    assert all(isinstance(one, Document) and one.content == one.text.encode() for one in found), found
    return [one.text for one in found if isinstance(one, Document)]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "no last newline", "members"])
def test_every_format_gives_the_documents(tmp_path: Path, kind: str) -> None:
    data = lines_of(TEXTS)
    path = tmp_path / "a.jsonl"
    if kind == "parquet":
        path = parquet(tmp_path / "a.parquet", TEXTS)
    elif kind == "jsonl.gz":
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(data))
    elif kind == "jsonl.zst":
        path = tmp_path / "a.jsonl.zst"
        path.write_bytes(zstd(data[:50]) + zstd(data[50:]))
    elif kind == "members":
        path = tmp_path / "a.json.gz"
        path.write_bytes(gzip.compress(data[:70]) + gzip.compress(data[70:]))
    else:
        path.write_bytes(data if kind == "jsonl" else data[:-1])
    assert texts_in(read([path])) == TEXTS
    assert texts_in(read([path], shard_bytes=100)) == TEXTS


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=12),
    size=st.integers(1, 200),
    end=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ranges_of_bytes_lose_and_repeat_nothing(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, end: bool
) -> None:
    """However a file is cut, each line is read in the shard that it begins in; so is its number."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    data = lines_of(texts) + (b"{" if end else b"")
    path.write_bytes(data)
    found = read([path], shard_bytes=size)
    if end:
        last = found.pop()
        assert isinstance(last, Bad) and last.line == len(texts) + 1
    assert texts_in(found) == texts
    assert sum(shard.bytes for shard in cut([path], "auto", size)) == len(data)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "no JSON"),
        (b'["a"]', "a JSON list, not an object"),
        (b'{"txt": "a"}', "no text under the key 'text'"),
        (b'{"text": 3}', "no text under the key 'text'"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"[" * 100_000, "no JSON"),
    ],
)
@pytest.mark.parametrize("shard_bytes", [1 << 20, 40])
def test_bad_lines_are_named(tmp_path: Path, line: bytes, reason: str, shard_bytes: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of(["a", "b"]) + b"\n" + line + b"\n" + lines_of(["c"]))
    *first, bad, last = read([path], shard_bytes)
    assert texts_in([*first, last]) == ["a", "b", "c"]
    assert isinstance(bad, Bad) and (bad.file, bad.line) == (str(path), 4) and reason in bad.reason
    assert str(bad).startswith(f"{path}, line 4: ")


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["truncated", "damaged", "no such"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    texts = [str(i) * 200 for i in range(200)]
    data = gzip.compress(lines_of(texts)) if kind == "gz" else zstd(lines_of(texts))
    path = tmp_path / f"a.jsonl.{kind}"
    if damage == "truncated":
        path.write_bytes(data[:-3])
    elif damage == "damaged":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes(255 - byte for byte in data[middle : middle + 20]) + data[middle + 20 :])
    found = read([path])
    assert isinstance(found[-1], Bad) and found[-1].file == str(path)
    assert {"truncated": "truncated", "damaged": "damaged", "no such": "No such file"}[damage] in found[-1].reason
    assert len(found) <= 201


def test_parquet_faults(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["a", None, "b", None], rows=3)
    found = read([path], 1)
    assert [str(one) for one in found if isinstance(one, Bad)] == [
        f"{path}, line {row}: no text in the column 'text'" for row in (2, 4)
    ]
    with pytest.raises(UsageError, match=r"has no column 'body' \(it has text\).*--key"):
        read([path], key="body")
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"PAR1 no")
    (bad,) = read([broken])
    assert isinstance(bad, Bad) and (bad.file, bad.line) == (str(broken), 0) and "Parquet" in bad.reason


def test_texts_and_shards(tmp_path: Path) -> None:
    """Whole files go together until they make a shard; formats go by the last ending that says one."""
    files = [tmp_path / f"{i}.py" for i in range(6)]
    for i, path in enumerate(files):
        path.write_text(f"{i}" * 10)
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"packed"))
    shards = cut([*files, tmp_path / "z.txt.gz"], "auto", 30)
    assert [len(shard.files) for shard in shards] == [3, 3, 1]
    assert texts_in(read([*files, tmp_path / "z.txt.gz"], 30)) == [str(i) * 10 for i in range(6)] + ["packed"]
    names = {"a.jsonl": "jsonl", "a.json.zst": "jsonl", "a.b.parquet": "parquet", "a.py": "text", "a": "text", "jsonl": "text"}
    assert {name: format_of(Path(name)) for name in names} == names
    assert format_of(Path("a.log"), "jsonl") == "jsonl"
    assert shard_size(files) == 4 << 20


def test_a_shard_has_a_short_name() -> None:
    assert Shard("jsonl", ("a.jsonl",), 10, 20).label == "a.jsonl [10, 20)"
    assert Shard("text", ("a.py", "b.py", "c.py")).label == "a.py and 2 more"
