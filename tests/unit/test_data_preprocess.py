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
from typing import Any

import pytest
import sentencepiece

from qeffect_lm.data.corpus import CorpusReport, TokenizerTraining, make_corpus
from qeffect_lm.data.encoding import Settings
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.inputs import Bad
from qeffect_lm.data.stats import entropy, token_counts
from qeffect_lm.data.tokenizer import Tokenizer
from qeffect_lm.errors import UsageError
from tools.preprocess import find_files, main, stdlib_python_files, subset

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


def preprocess(
    corpus: Path, out: Path, *, tokenizer: object = None, workers: int = 1, vocab_size: int = VOCAB, **changes: Any
) -> CorpusReport:
    settings = Settings(**{"valid_fraction": 0.2, "bad": "skip", **changes})
    chosen: Any = tokenizer or TokenizerTraining(vocab_size)
    return make_corpus(find_files([corpus], "*.py"), out, settings, tokenizer=chosen, workers=workers)


def texts_of(report: CorpusReport, part: str) -> list[str]:
    """The documents of a part as text, each checked to end with the end-of-sequence token."""
    model = Tokenizer(report.tokenizer)
    split = report.parts[part]
    dataset = IndexedDataset(split.prefix)
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    assert all(d[-1] == model.eos_id and model.eos_id not in d[:-1] for d in documents)
    return [model.decode(d[:-1]) for d in documents]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


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
    assert "40 documents" in out and "unigram entropy" in out and "nats/token" in out and "skipped" not in out
    names = {f"c.{part}.{ending}" for part in ("train", "valid") for ending in ("bin", "idx", "json")} | {"c.json", "c.model"}
    assert {path.name for path in (tmp_path / "o").iterdir()} == names
    assert Tokenizer(tmp_path / "o" / "c.model").vocab_size == 400
    assert content(tmp_path / "o") == content_after(corpus, tmp_path / "p", bad="refuse")


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
    assert (report.documents, report.bytes) == (40, sum(len(t.encode()) for t in originals))
    assert [part.documents for part in report.parts.values()] == [len(train), len(valid)]
    counts = [token_counts(IndexedDataset(part.prefix), VOCAB) for part in report.parts.values()]
    assert [int(c.sum()) for c in counts] == [part.tokens for part in report.parts.values()]
    assert report.unigram_entropy == entropy(counts[0] + counts[1])
    assert report.parts["train"].unigram_entropy == entropy(counts[0])
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
    training = TokenizerTraining(VOCAB)
    report = make_corpus(files, tmp_path / "c", Settings(valid_fraction=0.2, bad="skip"), tokenizer=training)
    assert report.bad == (Bad(str(bad), 0, "not UTF-8 (byte 2)"), Bad(str(gone), 0, "No such file or directory"))
    assert (report.documents, report.bad_count) == (40, 2)
    for line in ("skipped   2 lines or files:", f"  {bad}: not UTF-8 (byte 2)", f"  {gone}: No such file"):
        assert line in report.summary()
    assert "and 2 more" not in report.summary()
    many = replace(report, bad=report.bad * 11, bad_count=22)
    assert many.summary().endswith("  and 2 more") and many.summary().count("not UTF-8") == 10
    with pytest.raises(UsageError, match=r"bad\.py: not UTF-8 \(byte 2\); mend it, or .*--bad skip"):
        make_corpus(files, tmp_path / "d", Settings(), tokenizer=training)


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


def test_max_bytes(corpus: Path) -> None:
    """A subset within the limit and close to it, spread over the corpus, chosen by the seed, in file order."""
    files = find_files([corpus], "*.py")
    sizes = {path: path.stat().st_size for path in files}
    limit = sum(sizes.values()) // 2
    taken = subset(files, limit, 1)
    assert limit - max(sizes.values()) <= sum(sizes[path] for path in taken) <= limit
    assert 10 < len(taken) < 35
    assert taken == [path for path in files if path in taken] and taken != files[: len(taken)]
    assert subset(files, limit, 2) != taken
    assert subset(files, 10**9, 1) == files


def test_given_tokenizer_and_no_end_token(corpus: Path, tmp_path: Path) -> None:
    first = preprocess(corpus, tmp_path / "a" / "c")
    second = preprocess(corpus, tmp_path / "b" / "c", tokenizer=first.tokenizer, append_eos=False)
    assert second.tokenizer == first.tokenizer and not (tmp_path / "b" / "c.model").exists()
    assert second.parts["train"].tokens == first.parts["train"].tokens - first.parts["train"].documents
    assert second.parts["train"].documents == first.parts["train"].documents  # the empty one is still a document
    # Into the folder of its own tokenizer: that one stays as it is.
    model = first.tokenizer.read_bytes()
    third = preprocess(corpus, tmp_path / "a" / "c", tokenizer=first.tokenizer)
    assert first.tokenizer.read_bytes() == model and texts_of(third, "train") == texts_of(first, "train")


def test_parts(corpus: Path, tmp_path: Path) -> None:
    """A fraction of 0 writes no part, and removes an earlier one, whose documents are now trained on; with three parts each
    document is in one, and what is held out for validation does not change with the third."""
    before = preprocess(corpus, tmp_path / "c")
    report = preprocess(corpus, tmp_path / "c", valid_fraction=0.0)
    assert list(report.parts) == ["train"] and report.parts["train"].documents == 40
    assert sorted(content(tmp_path)) == ["c.json", "c.model", "c.train.bin", "c.train.idx", "c.train.json"]
    three = preprocess(corpus, tmp_path / "d", test_fraction=0.3, tokenizer=report.tokenizer)
    assert list(three.parts) == ["train", "valid", "test"]
    assert sum(part.documents for part in three.parts.values()) == 40
    assert three.parts["valid"].documents == before.parts["valid"].documents and three.parts["test"].documents > 4


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
        monkeypatch.setattr(Tokenizer, "encode_arrays", full)
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
    assert main(arguments) == (2 if stage == "tokenizer" else 1)
    error = capsys.readouterr().err
    assert ("vocabulary of 100000" if stage == "tokenizer" else "No space left") in error
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
    assert calls.count(".idx") == 1 and calls[-1] == ".idx" and len(calls) == 7
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
        (options(tmp_path, "--train-tokenizer", "--valid-fraction", ".5", "--test-fraction", ".5"), "nothing to train on"),
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
    with pytest.raises(UsageError, match="no files"):
        make_corpus([], tmp_path / "c", tokenizer=TokenizerTraining())


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
        preprocess(corpus, tmp_path / "c", tokenizer=tmp_path / "m.model")
