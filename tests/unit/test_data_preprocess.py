"""tools.preprocess: files in, token files and tokenizer out; reproducible, whole or not at all, errors by
name."""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece

from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.stats import entropy, token_counts
from qeffect_lm.data.tokenizer import Tokenizer
from qeffect_lm.errors import UsageError
from tools.preprocess import CorpusReport, find_files, main, preprocess_corpus, stdlib_python_files

LINES = inspect.getsource(argparse).splitlines(keepends=True)
NAMES = [f"{'pkg' if i % 2 else 'lib/sub'}/m{i:02}.py" for i in range(40)]
VOCAB = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 files of 60 lines in two folders, one of them empty, and a file that the glob does not match."""
    root = tmp_path_factory.mktemp("corpus")
    for i, name in enumerate(NAMES):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if i == 7 else "".join(LINES[60 * i % 2000 : 60 * i % 2000 + 60]))
    (root / "notes.txt").write_text("not taken")
    return root


def preprocess(corpus: Path, out: Path, **changes: object) -> CorpusReport:
    values = {"train_tokenizer": True, "vocab_size": VOCAB, "valid_fraction": 0.2, **changes}
    return preprocess_corpus(find_files([corpus], "*.py"), out, **values)  # type: ignore[arg-type]


def texts_of(report: CorpusReport, part: str) -> list[str]:
    """The documents of a part as text, each checked to end with the end-of-sequence token."""
    model = Tokenizer(report.tokenizer)
    split = getattr(report, part)
    dataset = IndexedDataset(split.prefix)
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    assert all(d[-1] == model.eos_id and model.eos_id not in d[:-1] for d in documents)
    return [model.decode(d[:-1]) for d in documents]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_command_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--input",
        str(corpus),
        "--glob",
        "*.py",
        "--output",
        str(tmp_path / "o" / "c"),
        "--train-tokenizer",
    ]
    assert main([*arguments, "--vocab-size", "400", "--valid-fraction", "0.2", "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "40 files" in out and "unigram entropy" in out and "nats/token" in out and "skipped" not in out
    names = {"c.json", "c.model", "c.train.bin", "c.train.idx", "c.valid.bin", "c.valid.idx"}
    assert set(content(tmp_path / "o")) == names
    assert Tokenizer(tmp_path / "o" / "c.model").vocab_size == 400
    assert content(tmp_path / "o") == content_after(corpus, tmp_path / "p", workers=3)


def content_after(corpus: Path, folder: Path, **changes: object) -> dict[str, bytes]:
    preprocess(corpus, folder / "c", **changes)
    return content(folder)


def test_every_document_once_and_exact(corpus: Path, tmp_path: Path) -> None:
    """Train and valid together hold each file's text exactly, in the order of the files, empty ones
    included."""
    report = preprocess(corpus, tmp_path / "c")
    train, valid = texts_of(report, "train"), texts_of(report, "valid")
    originals = [path.read_bytes().decode() for path in find_files([corpus], "*.py")]
    assert sorted(train + valid) == sorted(originals) and "" in train + valid
    assert train == [t for t in originals if t in train] and valid == [t for t in originals if t in valid]
    assert len(valid) >= 2 and len(train) >= 20
    assert (report.files, report.bytes) == (40, sum(len(t.encode()) for t in originals))
    assert report.valid is not None
    assert (report.train.documents, report.valid.documents) == (len(train), len(valid))
    counts = [token_counts(IndexedDataset(p.prefix), VOCAB) for p in (report.train, report.valid)]
    assert [int(c.sum()) for c in counts] == [report.train.tokens, report.valid.tokens]
    assert report.unigram_entropy == entropy(counts[0] + counts[1])
    assert report.train.unigram_entropy == entropy(counts[0])
    # The tokenizer saw the training part and nothing else.
    settings = Tokenizer(report.tokenizer).settings
    assert settings is not None and settings["sample"]["bytes"] == sum(len(t.encode()) for t in train)


def test_same_bytes_wherever_the_corpus_lies(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "elsewhere" / "deep")
    moved = content_after(tmp_path / "elsewhere", tmp_path / "a")
    assert moved == content_after(corpus, tmp_path / "b")
    assert moved != content_after(corpus, tmp_path / "c", seed=1)


def test_copies_stay_on_one_side(tmp_path: Path) -> None:
    """The split hashes file name and content: no text is both trained and validated on; the share is kept."""
    for i in range(300):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"f{i}.py").write_text("".join(LINES[i : i + 3]) + f"# {i}\n")
    report = preprocess(tmp_path, tmp_path / "out" / "c", vocab_size=350)
    train, valid = texts_of(report, "train"), texts_of(report, "valid")
    assert not set(train) & set(valid)
    assert 0.12 < len(valid) / 600 < 0.28
    assert all(train.count(t) == 2 for t in train)


def test_skipped_files_are_counted_and_named(corpus: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_bytes(b"ab\xff")
    gone = tmp_path / "gone.py"
    files = [*find_files([corpus], "*.py"), bad, gone]
    report = preprocess_corpus(
        files, tmp_path / "c", train_tokenizer=True, vocab_size=VOCAB, valid_fraction=0.2
    )
    assert report.skipped == ((bad, "not UTF-8 (byte 2)"), (gone, "No such file or directory"))
    assert report.files == 40
    for line in ("skipped   2 files:", f"  {bad}: not UTF-8 (byte 2)", f"  {gone}: No such file"):
        assert line in report.summary()
    assert "and 2 more" not in report.summary()
    many = replace(report, skipped=report.skipped * 11)
    assert many.summary().endswith("  and 2 more") and many.summary().count("not UTF-8") == 10


def test_a_name_that_is_no_unicode_can_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff.py"))
    try:
        path.write_bytes(b"\xff")
    except OSError:
        pytest.skip("this file system takes no such names")
    (tmp_path / "ok.py").write_text("".join(LINES))
    report = preprocess(tmp_path, tmp_path / "out" / "c", valid_fraction=0.0)
    assert "b\\udcff.py: not UTF-8" in report.summary()
    report.summary().encode()


def test_max_bytes(corpus: Path, tmp_path: Path) -> None:
    """A subset within the limit and close to it, spread over the corpus, chosen by the seed, in file
    order."""
    sizes = [path.stat().st_size for path in find_files([corpus], "*.py")]
    limit = sum(sizes) // 2
    report = preprocess(corpus, tmp_path / "a", max_bytes=limit)
    assert limit - max(sizes) <= report.bytes <= limit
    assert 10 < report.files < 35
    originals = [path.read_bytes().decode() for path in find_files([corpus], "*.py")]
    train = texts_of(report, "train")
    assert train == [t for t in originals if t in train] and train != originals[: len(train)]
    other = preprocess(corpus, tmp_path / "b", max_bytes=limit, seed=2)
    assert texts_of(other, "train") != train
    assert preprocess(corpus, tmp_path / "c", max_bytes=10**9).files == 40


def test_given_tokenizer_and_no_end_token(corpus: Path, tmp_path: Path) -> None:
    first = preprocess(corpus, tmp_path / "a" / "c")
    second = preprocess(
        corpus, tmp_path / "b" / "c", train_tokenizer=False, tokenizer=first.tokenizer, append_eos=False
    )
    assert second.tokenizer == first.tokenizer and not (tmp_path / "b" / "c.model").exists()
    assert second.train.tokens == first.train.tokens - first.train.documents
    assert second.train.documents == first.train.documents  # the empty one is still a document
    # Into the folder of its own tokenizer: that one stays as it is.
    model = first.tokenizer.read_bytes()
    third = preprocess(corpus, tmp_path / "a" / "c", train_tokenizer=False, tokenizer=first.tokenizer)
    assert first.tokenizer.read_bytes() == model and texts_of(third, "train") == texts_of(first, "train")


def test_no_validation_part(corpus: Path, tmp_path: Path) -> None:
    """A fraction of 0 writes none, and removes an earlier one, whose documents are now trained on."""
    assert preprocess(corpus, tmp_path / "c").valid is not None
    report = preprocess(corpus, tmp_path / "c", valid_fraction=0.0)
    assert report.valid is None and report.train.documents == 40
    assert sorted(content(tmp_path)) == ["c.json", "c.model", "c.train.bin", "c.train.idx"]


@pytest.mark.parametrize("stage", ["tokenizer", "encode", "disk"])
def test_a_failure_keeps_the_earlier_corpus(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopped at any point before the end: the old corpus and tokenizer are untouched and nothing else is
    left."""
    before = content_after(corpus, tmp_path / "o")

    def full(*unused: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if stage == "disk":
        monkeypatch.setattr(os, "fsync", full)
    elif stage == "encode":
        monkeypatch.setattr(Tokenizer, "encode_batch", full)
    vocab_size = "100000" if stage == "tokenizer" else "420"
    arguments = [
        "--input",
        str(corpus),
        "--glob",
        "*.py",
        "--output",
        str(tmp_path / "o" / "c"),
        "--train-tokenizer",
    ]
    arguments += ["--vocab-size", vocab_size]
    if stage == "encode":
        with pytest.raises(OSError):
            main(arguments)
    else:
        assert main(arguments) == (1 if stage == "disk" else 2)
        error = capsys.readouterr().err
        assert ("No space left" if stage == "disk" else "vocabulary of 100000") in error
    assert content(tmp_path / "o") == before


def test_a_crash_while_publishing_leaves_no_mixture(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped among the renames: a part is missing, and a reader says so; never an old part beside a new
    one."""
    preprocess(corpus, tmp_path / "c")
    real, calls = os.replace, []

    def interrupted(source: Path, target: Path) -> None:
        if Path(target).parent == tmp_path:
            calls.append(Path(target).suffix)
            if ".idx" in calls:
                raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preprocess(corpus, tmp_path / "c", seed=9)
    assert calls.count(".idx") == 1 and calls[-1] == ".idx" and len(calls) == 5
    for part in ("train", "valid"):
        with pytest.raises(UsageError, match="idx not found"):
            IndexedDataset(tmp_path / f"c.{part}")


def test_find_files(corpus: Path, tmp_path: Path) -> None:
    assert find_files([corpus], "*.py") == sorted(corpus / name for name in NAMES)
    one = corpus / NAMES[3]
    files = find_files([one, corpus, corpus / "notes.txt"], "*.py")
    assert files[0] == one and files[-1] == corpus / "notes.txt" and len(files) == 41


def test_the_standard_library_is_a_corpus() -> None:
    files = stdlib_python_files()
    assert sum(path.stat().st_size for path in files) >= 10_000_000
    assert files == sorted(set(files), key=lambda path: path.as_posix())
    root = sysconfig.get_path("stdlib")
    assert not any({"site-packages", "dist-packages"} & set(path.relative_to(root).parts) for path in files)
    assert any(path.name == "argparse.py" for path in files)


# ---- errors
# ----------------------------------------------------------------------------------------------------


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--input", str(tmp_path), "--glob", "*.py", "--output", str(tmp_path / "c"), *more]


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the thing, exit code 2, no traceback unless asked, and nothing written."""
    (tmp_path / "a.py").write_text("".join(LINES))
    for arguments, message in [
        (options(tmp_path / "none", "--train-tokenizer"), "none does not exist"),
        (options(tmp_path, "--train-tokenizer", "--glob", "*.rs"), "no file matches '*.rs'"),
        (options(tmp_path, "--tokenizer", str(tmp_path / "x.model")), "x.model does not exist"),
        (
            options(tmp_path, "--train-tokenizer", "--valid-fraction", "1"),
            "valid fraction 1.0 is not in [0, 1)",
        ),
        (options(tmp_path, "--train-tokenizer", "--workers", "0"), "workers must be at least 1"),
        (options(tmp_path, "--train-tokenizer", "--max-bytes", "0"), "max bytes must be at least 1"),
        (options(tmp_path, "--train-tokenizer", "--max-bytes", "9"), "larger than max bytes 9"),
        (
            options(tmp_path, "--train-tokenizer", "--vocab-size", "420"),
            "the valid part has no text: 1 documents",
        ),
    ]:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and "error: " in error and "Traceback" not in error
    assert main(options(tmp_path / "none", "--train-tokenizer", "--traceback")) == 2
    assert "Traceback" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


def test_tokenizer_choice_is_explicit(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--train-tokenizer", "--tokenizer", "x.model"]):
        with pytest.raises(SystemExit) as caught:
            main(options(tmp_path, *more))
        assert caught.value.code == 2
    for changes in ({"train_tokenizer": False}, {"tokenizer": "x.model"}):
        with pytest.raises(UsageError, match="exactly one of"):
            preprocess(corpus, tmp_path / "c", **changes)
    with pytest.raises(UsageError, match="no files"):
        preprocess_corpus([], tmp_path / "c", train_tokenizer=True)


def test_a_corpus_without_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="no text"):
        preprocess(tmp_path, tmp_path / "c")


def test_a_tokenizer_without_end_token(corpus: Path, tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(tmp_path / "m"),
        vocab_size=300,
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(UsageError, match=r"m\.model has no end of sequence.*--no-append-eos"):
        preprocess(corpus, tmp_path / "c", train_tokenizer=False, tokenizer=tmp_path / "m.model")
