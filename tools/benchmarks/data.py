"""How fast data is made and read: encoding beside the bare tokenizer, indexing, and the loader's part of the training loop.

Each figure has a demand: encoding at 90 % of the bare tokenizer's rate or more, ten million documents indexed in 10 s and
1 GiB, 0.2 ms of the loop for each microbatch.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qeffect_lm.data.encoding import Settings, ShardEncoder, ShardJob
from qeffect_lm.data.index import IndexCache, content_hash
from qeffect_lm.data.indexed import (
    HEADER,
    MAGIC,
    VERSION,
    IndexedDataset,
    IndexedWriter,
    bin_path,
    idx_path,
    sequence_offsets,
)
from qeffect_lm.data.inputs import Shard
from qeffect_lm.data.loader import StepLoader, StepShape
from qeffect_lm.data.packing import Samples
from qeffect_lm.data.tokenizer import train_sentencepiece

Say = Callable[[str], None]


def encoding(folder: Path, files: list[Path], rounds: int, say: Say) -> list[dict[str, Any]]:
    """Seconds of CPU (this thread's and its helpers') to encode a JSON-lines shard to token files, beside the bare tokenizers'
    encode of the same texts, which are in memory as lists of a megabyte; they take turns."""
    texts = [text for path in files if (text := _text(path))]
    corpus = folder / "corpus.jsonl"
    with open(corpus, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    size = corpus.stat().st_size
    rows = []
    job, megabytes = ShardJob(0, Shard("jsonl", (str(corpus),), 0, size, size), str(folder)), size / 1e6
    for name, path, bare in _tokenizers(folder, texts):
        encoder = ShardEncoder(path, None, Settings(append_eos=False))
        works: dict[str, Callable[[], object]] = {output: partial(_each, own, texts) for output, own in bare.items()}
        works["shard"] = partial(encoder, job, lambda count: None)
        times: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(rounds):
            for work, run in works.items():
                with _timed(times[work]):
                    run()
        middle = {work: statistics.median(seconds) for work, seconds in times.items()}
        rates = {output: round(middle[output] / middle["shard"], 4) for output in bare}
        rows.append({"tokenizer": name, "megabytes": round(megabytes, 2), "cpu_seconds": times, "rate_of_bare": rates})
        told = ", ".join(f"{rate:.3f} of bare to {output}" for output, rate in rates.items())
        say(f"encode, {name}: {megabytes / middle['shard']:.2f} MB/s, {told}")
    return rows


def _each(encode: Callable[[list[str]], object], texts: list[str]) -> None:
    for batch in _megabytes(texts):
        encode(batch)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _megabytes(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= 1 << 20:
            yield batch
            batch, size = [], 0
    yield batch


def _tokenizers(folder: Path, texts: list[str]) -> Iterator[tuple[str, Path, dict[str, Callable[[list[str]], object]]]]:
    """Name, file, and the package's own encode of a list of texts on one thread, to its lists and where it can to arrays."""
    import sentencepiece

    for kind in ("bpe", "unigram"):
        path = train_sentencepiece(texts[::4], folder / kind, vocab_size=8192, model_type=kind)  # type: ignore[arg-type]
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        own = partial(processor.encode, num_threads=1)
        yield f"sentencepiece {kind}", path, {"lists": own, "arrays": partial(own, return_type="numpy")}
    try:
        import tokenizers
    except ImportError:
        return
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts[::4], trainer)
    made.save(str(folder / "tokenizer.json"))
    encode = made.encode
    yield "tokenizers BPE", folder / "tokenizer.json", {"lists": lambda batch: [encode(text).ids for text in batch]}


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    before = time.process_time()
    yield
    into.append(time.process_time() - before)


def peak_mib() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- indexing --------------------------------------------------------------------------------------------------------


def indexing(folder: Path, documents: int, seq_len: int, say: Say) -> dict[str, Any]:
    """Seconds and memory of a fresh process to index ``documents`` documents of 10 to 110 tokens (a token file of holes): the
    digest of the files apart, then where documents begin and how whole ones are packed, then all again from the cache."""
    prefix = folder / "many"
    sizes = np.random.Generator(np.random.PCG64(1)).integers(10, 110, documents, dtype=np.int32)
    header = HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1)
    with open(idx_path(prefix), "wb") as file:
        file.write(header)
        for part in (sizes, sequence_offsets(sizes, 2), np.arange(documents + 1, dtype=np.int64)):
            file.write(part.data)
    with open(bin_path(prefix), "wb") as file:
        file.truncate(2 * int(sizes.sum(dtype=np.int64)))
    code = f"from tools.benchmarks.data import indexed; indexed({str(prefix)!r}, {str(folder / 'cache')!r}, {seq_len})"
    row: dict[str, Any] = {"documents": documents, "seq_len": seq_len, "tokens": int(sizes.sum(dtype=np.int64))}
    for name in ("first", "again"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        row[name] = json.loads(done.stdout.splitlines()[-1])
        say(f"index, {name}: {done.stdout.splitlines()[-1]}")
    return row


def indexed(prefix: str, cache: str, seq_len: int) -> None:
    """In a process of its own: open and index, and print seconds and MiB as JSON."""
    before = peak_mib()
    began = time.perf_counter()
    dataset = IndexedDataset(prefix)
    opened = time.perf_counter()
    kept = IndexCache(Path(cache))
    digest = content_hash(dataset, kept)
    hashed, started = time.perf_counter(), time.process_time()
    samples = Samples(dataset, seq_len, "whole", True, kept, digest)
    done, ended = time.perf_counter(), time.process_time()
    seconds = {"open": opened - began, "digest": hashed - opened, "index": done - hashed, "index_cpu": ended - started}
    padding = 1 - dataset.num_tokens / (samples.size * (seq_len + 1))
    told = {name: round(value, 3) for name, value in seconds.items()}
    print(json.dumps({**told, "samples": samples.size, "padding": round(padding, 4), "mib": round(peak_mib() - before, 1)}))


# ---- the loader ------------------------------------------------------------------------------------------------------


def loading(folder: Path, workers: int, steps: int, say: Say) -> list[dict[str, Any]]:
    """Milliseconds of the training loop for each microbatch of 4,096 tokens (8 a step), by the number of workers: what
    ``next_step`` takes where the step itself takes half a second, which is when workers read ahead."""
    prefix = folder / "tokens"
    generator = np.random.Generator(np.random.PCG64(2))
    with IndexedWriter(prefix, vocab_size=32000) as writer:
        writer.add_documents([generator.integers(0, 32000, size) for size in generator.integers(50, 3000, 4000)])
    rows = []
    for count in (0, workers):
        samples = Samples(IndexedDataset(prefix), 2048, "whole", True, IndexCache(folder / "cache"))
        loader = StepLoader(samples, StepShape(2, 8), vocab_size=32000, workers=count)
        times, busy = [], []
        try:
            for step in range(steps + 2):
                began, began_cpu = time.perf_counter(), time.thread_time()
                loader.next_step()
                if step >= 2:  # the first ones wait for workers to start
                    times.append(1000 * (time.perf_counter() - began) / 8)
                    busy.append(1000 * (time.thread_time() - began_cpu) / 8)
                time.sleep(0.5)
        finally:
            loader.close()
        row = {"workers": count, "steps": steps, "median_ms": statistics.median(times), "most_ms": max(times)}
        row["median_cpu_ms"] = statistics.median(busy)
        rows.append(row)
        say(f"loader, {count} workers: {row['median_ms']:.3f} ms of the loop per microbatch, {row['median_cpu_ms']:.3f} of CPU")
    return rows
