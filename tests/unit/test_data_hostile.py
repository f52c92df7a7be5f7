"""Inputs that nobody should have made, and processes that end where they should not: named, or gone on from; never silent."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.data import corpus as module
from qeffect_lm.data import inputs
from qeffect_lm.data.corpus import TokenizerTraining, make_corpus
from qeffect_lm.data.encoding import Settings, ShardEncoder, ShardJob
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.inputs import Bad, Document, Reading, cut
from qeffect_lm.data.manifest import open_mask
from qeffect_lm.data.pairs import working
from qeffect_lm.data.tokenizer import train_sentencepiece
from qeffect_lm.errors import UsageError

GOOD = b'{"text": "good"}\n'
BOM = b"\xef\xbb\xbf"


def read(path: Path, shard_bytes: int = 1 << 20, **more: Any) -> list[Document | Bad]:
    return [one for shard in cut([path], "auto", shard_bytes) for one in Reading(shard, "text", **more)]


def told(found: list[Document | Bad]) -> list[str]:
    return [one.text if isinstance(one, Document) else f"{one.line}: {one.reason}" for one in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (BOM + b'{"text": "a"}', "no JSON"),  # inside a file it is no mark
        (b"\0\0", "no JSON"),
        (b'{"text": "a\\u0000b"}', None),
        (b'{"text": "a"}\r', None),
        (b'{"text": "a\xed\xa0\x80"}', "not UTF-8 (byte 11)"),
        ('{"text": "ä"}'.encode("utf-16"), "not UTF-8 (byte 0)"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is there twice"),
        (b'{"text": "a", "more": {"x": 1, "x": 1}}', "the key 'x' is there twice"),
        (b'{"text": "a", "n": ' + b"1" * 9999 + b', "f": 1e99999}', None),
        (b'{"text": 7}', "no text under the key 'text'"),
        (b"NaN", "a JSON float, not an object: JSON lines have one object a line"),
        (b'[{"text": "a"}]', "a JSON list"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_lines(tmp_path: Path, line: bytes, expected: str | None, packed: bool) -> None:
    """Told by number, and the lines around it are read; the mark at a file's beginning is none of the text."""
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    data = BOM + GOOD + line + b"\n" + GOOD
    path.write_bytes(gzip.compress(data) if packed else data)
    first, middle, last = read(path)
    assert told([first, last]) == ["good", "good"]
    if expected is None:
        assert isinstance(middle, Document) and middle.text.startswith("a")
    else:
        assert isinstance(middle, Bad) and middle.line == 2 and middle.reason.startswith(expected)


class _Counted:
    """A file that counts what is read of it."""

    bytes = 0

    def __init__(self, path: str, mode: str) -> None:
        self.file = open(path, mode)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *unused: object) -> None:
        self.file.close()

    def seek(self, place: int) -> None:
        self.file.seek(place)

    def readline(self, most: int = -1) -> bytes:
        line = self.file.readline(most)
        _Counted.bytes += len(line)
        return line


def test_one_long_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many shards it lies in: a file that is one line takes time in proportion to its size."""
    path, text = tmp_path / "a.jsonl", "x" * 400_000
    path.write_bytes(GOOD + json.dumps({"text": text}).encode() + b"\n" + GOOD)
    monkeypatch.setattr(inputs, "_READ", 1000)
    monkeypatch.setattr(inputs, "open", _Counted, raising=False)
    assert told(read(path, 4000)) == ["good", text, "good"]
    assert _Counted.bytes < 2.5 * path.stat().st_size


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(1, 40), st.integers(0, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_compressed_lines_are_those_of_the_whole(lines: list[bytes], block: int, member: int, zeros: bool) -> None:
    """Whatever is read at a time, in members or one, with a tape's zeros behind."""
    data = b"\n".join(lines)
    packed = gzip.compress(data[:member]) + gzip.compress(data[member:]) + b"\0" * 50 * zeros
    blocks = (packed[i : i + block] for i in range(0, len(packed), block))
    assert b"".join(inputs._decompressed("a.gz", blocks)) == data
    with pytest.raises((EOFError, inputs.zlib.error)):
        list(inputs._decompressed("a.gz", [packed.rstrip(b"\0")[:-9]]))


def test_compressed_files(tmp_path: Path) -> None:
    """An empty one is truncated (an empty stream is not); a frame of a longer window than the library's default is read."""
    pytest.importorskip("zstandard")
    for name, data, expected in [
        ("a.jsonl.gz", b"", ["1: the compressed file ends in the middle: it is truncated"]),
        ("b.jsonl.gz", gzip.compress(b""), []),
        ("c.jsonl.zst", b"", ["1: the compressed file ends in the middle: it is truncated"]),
        # Magic, no flags, a window of 2^28 bytes, and one raw block, the last.
        ("d.jsonl.zst", b"\x28\xb5\x2f\xfd\x00\x90" + (len(GOOD) << 3 | 1).to_bytes(3, "little") + GOOD, ["good"]),
    ]:
        (tmp_path / name).write_bytes(data)
        assert told(read(tmp_path / name)) == expected, name


def test_parquet_columns(tmp_path: Path) -> None:
    """Texts of any of Arrow's types; a row that is no UTF-8 is named, and so is a column of another type; conversations are
    lists of structs."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = arrow.array(["a", "\u00e4", "c"])
    bad = arrow.Array.from_buffers(arrow.utf8(), 3, [*texts.buffers()[:2], arrow.py_buffer(b"a\xff\xffc")])
    for column, expected in [
        (arrow.array(["a", "b"], arrow.large_utf8()), ["a", "b"]),
        (arrow.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
        (bad, ["a", "2: not UTF-8 (byte 0)", "c"]),
        (arrow.array([b"a"]), ["1: no text in the column 'text' but bytes"]),
        (arrow.array([["a"]]), ["1: no text in the column 'text' but list"]),
        (arrow.array([], arrow.utf8()), []),
    ]:
        parquet.write_table(arrow.table({"text": column}), path)
        assert told(read(path)) == expected
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    parquet.write_table(arrow.table({"messages": [talk, talk[:1]]}), path)
    chat = Settings(key="messages", template="plain")
    found = [one for shard in cut([path], "auto", 1) for one in chat.reading(shard)]
    assert isinstance(found[0], Document) and [one.text for one in found[0].record] == ["a", "\n\n", "b", "\0end"]
    assert isinstance(found[1], Bad) and (found[1].line, "nothing to learn" in found[1].reason) == (2, True)


# ---- the making of a corpus ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["hello there, general talk of nothing 0123456789\n"] * 40
    return train_sentencepiece(texts, tmp_path_factory.mktemp("m") / "m", vocab_size=290)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    roles = ("user", "assistant")
    rows = [{"id": i, "messages": [{"role": role, "content": f"hello {i} {role}"} for role in roles]} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(files: list[Path], out: Path, tokenizer: Any, anew: bool = False, **changes: Any) -> module.CorpusReport:
    chosen = {"key": "messages", "template": "plain", "valid_fraction": 0.2, "shard_bytes": 2500, **changes}
    return make_corpus(files, out, Settings(**chosen), tokenizer=tokenizer, anew=anew)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


CHANGES = ("replace", "unlink", "rmdir", "mkdir")


def changes_until(number: int, work: Callable[[], object]) -> int:
    """How many changes of the file system a child process made with ``work``; killed (SIGKILL) before its ``number``-th."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def hooked(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                os.write(theirs, b".")
                return real(*arguments, **options)

            return call

        for name in CHANGES:
            setattr(os, name, hooked(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        made = len(pipe.read())
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]) == (made == number - 1)
    return made


def test_killed_anywhere(talks: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL before changes of the file system: some of the encoding's, each of the end's. What can be read then, with its
    mask, is the old corpus or the new one, not a part of each; the same command ends with the bytes of an undisturbed run, one
    of other settings with its own where it is told --anew, and both leave nothing else."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses nothing that it gave to the system
    pairs, out = {}, tmp_path / "o"
    for name, seed in (("old", 1), ("new", 2), ("third", 3)):
        make([talks], tmp_path / name / "c", model, seed=seed)
        pairs[name] = content(tmp_path / name)
    total, seen = changes_until(0, lambda: make([talks], out / "c", model, seed=2)), set()
    assert content(out) == pairs["new"]
    for number in [*range(1, total - 60, 25), *range(total - 60, total - 4, 3)]:
        for name, files in pairs["old"].items():
            (out / name).write_bytes(files)
        assert changes_until(number, lambda: make([talks], out / "c", model, seed=2)) == number - 1
        found, versions = content(out), set()
        for part in ("c.train", "c.valid"):
            try:
                open_mask(IndexedDataset(out / part))
            except UsageError:
                continue
            names = [f"{part}{mask}.{end}" for mask in ("", ".mask") for end in ("idx", "bin")]
            whole = {name for name, files in pairs.items() if all(files[one] == found.get(one) for one in names)}
            versions |= whole or {"mixed"}
        assert versions <= {"old"} or versions <= {"new"}, f"killed at {number} of {total}: {versions}"
        seen |= versions or {"none"}
        if number % 4:
            make([talks], out / "c", model, seed=2)
        else:
            make([talks], out / "c", model, seed=3, anew=True)
        assert content(out) == pairs["new" if number % 4 else "third"] and not list(out.glob("*.work"))
    assert seen == {"old", "new", "none"}


@pytest.mark.parametrize("what", ["changed", "gone", "read twice"])
def test_files_that_change_while_they_are_read(talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Told, and nothing is written; where the file went and came back as it was, the command goes on. A file that the tokenizer
    saw otherwise than the encoder is told too, though its size and time are the same."""
    talks.write_text("".join(json.dumps({"text": f"row {i}: hello there, general talk"}) + "\n" for i in range(60)))
    before, stamp, real = talks.read_bytes(), talks.stat().st_mtime_ns, ShardEncoder.__call__
    texts = {"key": "text", "template": None, "bad": "skip"}

    def call(self: ShardEncoder, job: ShardJob, progress: Callable[[int], object]) -> Any:
        if what == "read twice" and job.number == 0:
            talks.write_bytes(before.replace(b"row 0: hello", b"row 0: hullo"))
            os.utime(talks, ns=(stamp, stamp))
        found = real(self, job, progress)
        if job.number == 1 and what == "changed":
            talks.write_bytes(before + b"\n")
        elif job.number == 1 and what == "gone":
            talks.rename(talks.with_suffix(".away"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ShardEncoder, "__call__", call)
        with pytest.raises(UsageError, match=r"a\.jsonl changed while it was read.*--anew"):
            make([talks], tmp_path / "o" / "c", TokenizerTraining(290), **texts)
    assert [path.name for path in (tmp_path / "o").iterdir()] in (["c.work"], [])
    talks.write_bytes(before)
    assert make([talks], tmp_path / "o" / "c", TokenizerTraining(290), **texts).resumed == (0 if what == "read twice" else 1)


def test_nothing_of_the_users_is_replaced(talks: Path, model: Path, tmp_path: Path) -> None:
    """Neither an input, nor the tokenizer, nor a file of another program that has the name of an output."""
    named = talks.with_name("x.train.json")
    talks.rename(named)
    before = content(tmp_path / "in")
    own = Path(shutil.copy(model, tmp_path / "in" / "own.model"))
    before["own.model"] = model.read_bytes()
    (tmp_path / "in" / "y.json").write_bytes(GOOD)
    before["y.json"] = GOOD
    training = TokenizerTraining(290)
    for prefix, tokenizer, more in [
        ("x", model, {}),
        ("y", training, {"template": None}),
        ("own", training, {"template": None}),
    ]:
        with pytest.raises(UsageError, match="choose another output"):
            make([named], tmp_path / "in" / prefix, tokenizer, **more)
    named.rename(talks)
    with pytest.raises(UsageError, match="would be read and replaced"):
        make([Path(shutil.copy(talks, tmp_path / "in" / "z.train.bin"))], tmp_path / "in" / "z", model, format="jsonl")
    (tmp_path / "in" / "z.train.bin").unlink()
    talks.rename(named)
    assert content(tmp_path / "in") == before and own.exists()


def test_going_on_with_less(talks: Path, model: Path, tmp_path: Path) -> None:
    """A bad line stops the work, and the same command with --bad skip goes on from there; a part without text keeps nothing, so
    that another fraction needs no --anew; the first of what was left out is told. Texts as conversations are refused."""
    lines = talks.read_bytes().splitlines(keepends=True)
    talks.write_bytes(b"".join([*lines[:30], b"{}\n", *lines[30:]]))
    with pytest.raises(UsageError, match=r"line 31: no list of messages.*--bad skip"):
        make([talks], tmp_path / "o" / "c", model)
    report = make([talks], tmp_path / "o" / "c", model, bad="skip")
    assert (report.documents, report.bad_count) == (40, 1) and report.resumed == 1
    talks.write_bytes(lines[0] + b"{}\n")
    with pytest.raises(UsageError, match=r"no text: .* \(the first: .*a\.jsonl, line 2: no list of messages"):
        make([talks], tmp_path / "p" / "c", model, bad="skip", valid_fraction=1e-9)
    assert make([talks], tmp_path / "p" / "c", model, bad="skip", valid_fraction=0.0).documents == 1
    with pytest.raises(UsageError, match="is read as one text: conversations are JSON lines or rows of Parquet"):
        make([model], tmp_path / "q" / "c", model)
    for name, value in (("bad", "no"), ("format", "csv")):
        with pytest.raises(UsageError, match=f"{name} is '{value}'"):
            make([talks], tmp_path / "q" / "c", model, **{name: value})


def test_copies_of_a_conversation_stay_on_one_side(talks: Path, model: Path, tmp_path: Path) -> None:
    """Whatever else their lines hold."""
    rows = [json.loads(line) for line in talks.read_bytes().splitlines()]
    talks.write_text("".join(json.dumps({**row, "id": (i, n)}) + "\n" for n in range(3) for i, row in enumerate(rows)))
    parts = make([talks], tmp_path / "c", model).parts
    seen = [
        {tuple(dataset.document(i).tolist()) for i in range(dataset.num_documents)}
        for dataset in (IndexedDataset(part.prefix) for part in parts.values())
    ]
    assert len(seen[0]) + len(seen[1]) == 40 and not seen[0] & seen[1] and parts["train"].documents == 3 * len(seen[0])


def test_one_at_a_time(talks: Path, model: Path, tmp_path: Path) -> None:
    """Another process at the same output is refused by name; a lock whose folder was removed keeps nobody out."""
    out = tmp_path / "c"
    with working(out) as work:
        with pytest.raises(UsageError, match=rf"c\.work is in use by another run \(process {os.getpid()} .*another output"):
            make([talks], out, model)
        shutil.rmtree(work)
        make([talks], out, model)
    assert not work.exists() and (tmp_path / "c.train.idx").exists()
