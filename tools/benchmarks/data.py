"""How fast data is made and read: encoding beside the bare tokenizer, indexing, and the loader's part of the training loop.

Each figure has a demand: encoding at 90 % of the bare tokenizer's rate or more, ten million documents indexed in 10 s and
1 GiB, 0.2 ms of the loop for each microbatch.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from qeffect_lm.data.encoding import Settings, ShardEncoder, ShardJob
from qeffect_lm.data.inputs import Shard
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
