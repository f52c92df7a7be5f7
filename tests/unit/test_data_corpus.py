"""Corpora made by workers: the same bytes whoever does the work, interrupted or not; merged, divided, looked at."""

from __future__ import annotations

import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qeffect_lm.data import corpus as module
from qeffect_lm.data.corpus import make_corpus
from qeffect_lm.data.encoding import Settings, ShardEncoder, ShardJob
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter
from qeffect_lm.data.pairs import merge
from qeffect_lm.data.pool import run_jobs
from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from qeffect_lm.errors import QEffectError, UsageError
from tools.preprocess import main

LINES = inspect.getsource(json.decoder).splitlines(keepends=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(LINES, tmp_path_factory.mktemp("model") / "m", vocab_size=400)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """120 documents as JSON lines, about 10 kB."""
    path = tmp_path / "a.jsonl"
    documents = ["".join(LINES[i : i + 3]) + f"# {i}" for i in range(120)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make(texts: Path, out: Path, model: Path, **changes: Any) -> module.CorpusReport:
    options = {name: changes.pop(name) for name in ("workers", "anew") if name in changes}
    settings = Settings(**{"valid_fraction": 0.1, "shard_bytes": 2000, **changes})
    return make_corpus([texts], out, settings, tokenizer=model, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def interrupted(texts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output whose making ended after the third shard."""
    count = 0

    real = ShardEncoder.__call__

    def until_three(self: ShardEncoder, job: ShardJob, progress: Callable[[int], object]) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt
        return real(self, job, progress)

    with monkeypatch.context() as patch:
        patch.setattr(ShardEncoder, "__call__", until_three)
        with pytest.raises(KeyboardInterrupt):
            make(texts, tmp_path / "o" / "c", model)
    assert content(tmp_path / "o") == {}
    return tmp_path / "o" / "c"


def test_the_same_bytes_from_any_number_of_workers(texts: Path, model: Path, tmp_path: Path) -> None:
    """Workers are processes of their own; shards of any size make the same files, and the manifest tells who made them."""
    report = make(texts, tmp_path / "one" / "c", model)
    make(texts, tmp_path / "two" / "c", model, workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    make(texts, tmp_path / "three" / "c", model, shard_bytes=100_000)
    whole, pieces = content(tmp_path / "three"), content(tmp_path / "one")
    assert all(whole[name] == pieces[name] for name in whole if not name.endswith(".json"))
    train = report.parts["train"]
    manifest = json.loads((tmp_path / "one" / "c.train.json").read_bytes())
    tokenizer = Tokenizer(model)
    assert manifest["tokenizer"]["sha256"] == tokenizer.sha256
    assert manifest["tokenizer"]["trained_with"]["vocab_size"] == 400
    assert (manifest["documents"], manifest["tokens"]) == (train.documents, train.tokens)
    assert report.documents == 120 and report.bad_count == 0
    assert not list((tmp_path / "one").glob("*.work"))


def test_it_goes_on_where_it_was(texts: Path, model: Path, tmp_path: Path, interrupted: Path) -> None:
    """Finished shards are not read again, and the result is that of a run without the interruption."""
    jobs: list[int] = []

    real = ShardEncoder.__call__

    def counted(self: ShardEncoder, job: ShardJob, progress: Callable[[int], object]) -> Any:
        jobs.append(job.number)
        return real(self, job, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardEncoder, "__call__", counted)
        report = make(texts, interrupted, model)
    assert report.resumed == 3 and jobs[0] == 3 and "3 shards were finished before" in report.summary()
    make(texts, tmp_path / "p" / "c", model)
    assert content(tmp_path / "o") == content(tmp_path / "p")


def test_another_request_is_refused(texts: Path, model: Path, interrupted: Path) -> None:
    with pytest.raises(UsageError, match=r"c\.work holds unfinished work .*append_eos was True, is False.*--anew"):
        make(texts, interrupted, model, append_eos=False)
    with pytest.raises(UsageError, match="sha256 was"):
        other = train_sentencepiece(LINES, texts.parent / "other", vocab_size=380)
        make(texts, interrupted, other)
    report = make(texts, interrupted, model, append_eos=False, anew=True)
    assert report.resumed == 0
    assert report.parts["train"].tokens < make(texts, interrupted, model).parts["train"].tokens


@pytest.mark.parametrize("change", ["time", "content", "size"])
def test_changed_files_are_noticed(texts: Path, model: Path, interrupted: Path, change: str) -> None:
    """Another time alone: the file is read again and compared. Another content: refused."""
    data = texts.read_bytes()
    if change == "content":
        texts.write_bytes(data.replace(b"# 1\"", b"# 9\"", 1))
    elif change == "size":
        texts.write_bytes(data + b"\n")
    os.utime(texts, ns=(1, 1))
    if change == "time":
        assert make(texts, interrupted, model).resumed == 3
        return
    message = "another content" if change == "content" else "other sizes"
    with pytest.raises(UsageError, match=message):
        make(texts, interrupted, model)


def test_bad_lines_over_shards(texts: Path, model: Path, tmp_path: Path) -> None:
    """Refused: the first in the order of the file is told, whichever worker met one first. Skipped: all are counted."""
    lines = texts.read_bytes().splitlines(keepends=True)
    for number in (20, 90, 110):
        lines[number - 1] = b"{}\n"
    texts.write_bytes(b"".join(lines))
    for workers in (1, 2):
        with pytest.raises(UsageError, match=r"a\.jsonl, line 20: no text under the key 'text'; mend it.*--bad skip"):
            make(texts, tmp_path / "o" / "c", model, workers=workers, anew=True)
    report = make(texts, tmp_path / "o" / "c", model, bad="skip", anew=True)
    assert [one.line for one in report.bad] == [20, 90, 110] and report.documents == 117
    assert json.loads((tmp_path / "o" / "c.train.json").read_bytes())["skipped"] == 3


def _dies(job: Any, progress: Callable[[int], object]) -> int:
    progress(1)
    if job == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return job * 10


def _sleeps(job: Any, progress: Callable[[int], object]) -> int:
    time.sleep(600)
    return 0


def _fails(job: Any, progress: Callable[[int], object]) -> int:
    time.sleep(1.0 if job == 0 else 0.0)
    raise UsageError(f"job {job}")


def test_the_first_failure_is_told() -> None:
    """Job 1 has long failed when job 0 does: the error is job 0's, as with one worker."""
    with pytest.raises(UsageError, match="job 0"):
        list(run_jobs(_fails, [0, 1, 2], 2, lambda count: None))


def test_a_dead_worker_is_an_error() -> None:
    with pytest.raises(QEffectError, match=r"was ended by SIGKILL at 2; .*goes on from there"):
        list(run_jobs(_dies, [0, 1, 2, 3], 2, lambda count: None))


def test_workers_end_with_their_parent() -> None:
    """Closing the iteration (as an interruption does) ends workers in the middle of a job."""
    before = set(threading.enumerate())
    jobs = run_jobs(_sleeps, [0, 1], 2, lambda count: None)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(jobs)
    timer.join()
    signal.signal(signal.SIGINT, usual)
    assert time.monotonic() - began < 120 and set(threading.enumerate()) == before


# ---- merge, split, inspect ----------------------------------------------------------------------------------------


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 100) -> Path:
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        writer.add_documents([np.array(document, dtype=np.int64) for document in documents])
    return prefix


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """D1: [[], [1, 2]] with [[3]], and one without any token; the types are widened where they must be."""
    a, b, c = write(tmp_path / "a", [[], [1, 2]]), write(tmp_path / "b", [[3]]), write(tmp_path / "e", [[]])
    assert main(["merge", str(a), str(c), str(b), "--output", str(tmp_path / "m")]) == 0
    assert documents_of(tmp_path / "m") == [[], [1, 2], [], [3]]
    assert "4 documents, 3 tokens" in capsys.readouterr().out
    wide = write(tmp_path / "w", [[70_000]], 70_001)
    merge([a, wide], tmp_path / "n")
    assert documents_of(tmp_path / "n") == [[], [1, 2], [70_000]] and IndexedDataset(tmp_path / "n").dtype.name == "int32"


def test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each document in one part, equal ones in the same, about as many as asked for, and the same every time."""
    documents = [[i % 90, i % 7, 5] for i in range(400)]
    prefix = write(tmp_path / "a", documents)
    options = ["--valid-fraction", "0.2", "--test-fraction", "0.1"]
    assert main(["split", str(prefix), "--output", str(tmp_path / "b"), *options]) == 0
    parts = {part: documents_of(tmp_path / f"b.{part}") for part in ("train", "valid", "test")}
    assert sorted(sum(parts.values(), [])) == sorted(documents)
    seen = [{tuple(document) for document in part} for part in parts.values()]
    assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]
    assert 50 < len(parts["valid"]) < 110 and 15 < len(parts["test"]) < 70
    before = content(tmp_path)
    assert main(["split", str(prefix), "--output", str(tmp_path / "b"), *options]) == 0
    assert content(tmp_path) == before
    assert main(["split", str(prefix), "--output", str(tmp_path / "b"), "--valid-fraction", "1"]) == 2
    assert "valid fraction 1.0" in capsys.readouterr().err


def test_inspect(texts: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(texts, tmp_path / "c", model, valid_fraction=0.0)
    prefix = str(tmp_path / "c.train")
    assert main(["inspect", prefix, "--verify", "--document", "3", "--tokenizer", str(model)]) == 0
    out = capsys.readouterr().out
    assert "120 documents" in out and Tokenizer(model).sha256 in out and "those of the manifest" in out and "# 3" in out
    damaged = tmp_path / "c.train.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    assert main(["inspect", prefix, "--verify"]) == 1
    assert "c.train.bin is not what" in capsys.readouterr().err
    assert main(["inspect", prefix, "--document", "120"]) == 2
