"""The demo: train an FP8 pipeline on the standard library's sources, kill it, resume it, and compare bit for bit.

Everything is real: the corpus is made on this machine, the ranks are launched with torchrun, and the proof of resume kills all
of them with SIGKILL. ``make demo`` runs it on a CPU with two ranks, ``make demo-gpu`` on one GPU or two, captured as CUDA
graphs, with an eager run beside it for its speed. It ends non-zero when any claim does not hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qeffect_lm.errors import QEffectError, UsageError
from tools.common import ROOT, TRAIN, add_traceback, children, last_step, run_tool

EAGER_STEPS = 40
CONTROL_SCALE = "scale/layers.0.attention.qkv.input"
VOCAB = 4096
MARKER = ".qeffect-demo"


class DemoError(QEffectError):
    """A claim of the demo does not hold."""


@dataclass(frozen=True)
class Setup:
    """Where the demo runs.

    Attributes:
        ranks: pipeline stages.
        steps, every, kill: of the proof: its length, how often it saves, and after which step it is killed.
        overrides: of every run.
    """

    device: str
    config: Path
    ranks: int
    steps: int
    every: int
    kill: int
    overrides: tuple[str, ...] = ()

    def proof(self) -> list[str]:
        """Overrides of the runs that prove the resume."""
        return [
            f"train.steps={self.steps}",
            "train.eval_every=0",
            "precision.fp8.history=3",
            "data.microbatch_size=2",
            f"checkpoint.every={self.every}",
            "checkpoint.keep=0",
            "optim.warmup_steps=3",
            "logging.wandb=disabled",
            "logging.progress=off",
        ]


def setup(arguments: argparse.Namespace) -> Setup:
    """Two ranks on a CPU; on GPUs one, or two where there are two.

    Raises:
        UsageError: no GPU, or fewer than asked for.
    """
    if arguments.device == "cpu":
        for given, flag in ((arguments.gpus is not None, "--gpus"), (arguments.backend != "native", "--backend te")):
            if given:
                raise UsageError(f"{flag} is for --device cuda: add that, or leave it out")
        return Setup("cpu", ROOT / "models/configs/demo.yaml", 2, 21, 5, 13)
    visible = gpus()
    if not visible:
        raise UsageError("--device cuda: torch sees no GPU here; `make demo` runs on a CPU")
    ranks = arguments.gpus or min(visible, 2)
    if not 1 <= ranks <= visible:
        raise UsageError(f"--gpus {ranks}: torch sees {visible}")
    overrides = [f"parallel.pp={ranks}", *(["pipeline.schedule=zb-v", "pipeline.w_delay=0"] if ranks > 1 else [])]
    if arguments.backend != "native":
        overrides.append(f"model.backend={arguments.backend}")
    return Setup("cuda", ROOT / "models/configs/demo-gpu.yaml", ranks, 40, 20, 27, tuple(overrides))


def gpus() -> int:
    """How many GPUs torch sees, asked in a process of its own: this one stays off the GPU.

    Raises:
        UsageError: this Python has no torch.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__, torch.cuda.device_count())"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise UsageError(f"{sys.executable} has no torch: name one that has, make demo-gpu PYTHON=...")
    version, count = done.stdout.split()
    print(f"torch {version}, {count} GPUs")
    return int(count)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__.splitlines()[0])
    made.add_argument("--dir", type=Path, help="where everything goes (default: runs/demo, on GPUs runs/demo-gpu)")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    made.add_argument("--gpus", type=int, help="GPUs to train on, as pipeline stages (default: two where there are two)")
    made.add_argument("--backend", choices=["native", "te"], default="native", help="on GPUs: of the layers")
    made.add_argument("--corpus", type=Path, metavar="DIR", help="use the corpus in DIR, made by an earlier demo")
    made.add_argument("--only-corpus", action="store_true", help="make the corpus and stop")
    made.add_argument("--max-mb", type=float, default=12.0, help="megabytes of corpus, at least 10 (default: %(default)s)")
    made.add_argument("--steps", type=int, help="optimizer steps of the training (default: the configuration's)")
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: demo(arguments), arguments.traceback)


def demo(arguments: argparse.Namespace) -> int:
    """Run the parts in order."""
    began = time.monotonic()
    where = setup(arguments)
    folder = arguments.dir or Path("runs/demo-gpu" if where.device == "cuda" else "runs/demo")
    _refuse(arguments, folder)
    _fresh(folder)
    corpus = arguments.corpus or folder / "corpus"
    overrides = [*_paths(corpus), *where.overrides]
    entropy = make_corpus(corpus, arguments.max_mb) if arguments.corpus is None else given_corpus(corpus)
    if arguments.only_corpus:
        return 0
    stages = "one pipeline stage" if where.ranks == 1 else f"{where.ranks} pipeline stages"
    heading(f"2. training: {stages}, FP8, captured, contract enforced")
    steps = [] if arguments.steps is None else [f"train.steps={arguments.steps}"]
    torchrun(where, [*overrides, f"run.dir={folder / 'train'}", *steps])
    if where.device == "cuda":
        compare_speeds(where, folder, overrides)
    prove_resume(where, folder, overrides)
    show_results(folder, entropy)
    print(f"\ndemo finished in {time.monotonic() - began:.0f} s")
    return 0


def heading(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def _refuse(arguments: argparse.Namespace, folder: Path) -> None:
    """What cannot work, before an earlier demo is removed for it.

    Raises:
        UsageError: too small a corpus, no steps, or a given corpus that is not there or would be removed.
    """
    corpus = arguments.corpus
    if corpus is None and not arguments.max_mb >= 10:
        raise UsageError(f"--max-mb is {arguments.max_mb:g}; the demo's corpus has at least 10 MB")
    if arguments.steps is not None and arguments.steps < 1:
        raise UsageError(f"--steps is {arguments.steps}; it must be at least 1")
    if corpus is not None and not (corpus / "stdlib.train.idx").exists():
        raise UsageError(f"--corpus {corpus}: no stdlib.train.idx there; give the folder `corpus` of an earlier demo")
    if corpus is not None and corpus.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"--corpus {corpus} lies in {folder}, which this demo makes anew: choose another folder with --dir")


def _fresh(folder: Path) -> None:
    """An empty folder of our own; what an earlier demo left there is removed, anything else is not touched."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        raise UsageError(f"{folder} exists and is not a demo's folder: choose another one with --dir")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("made by tools.demo; removed by the next demo\n")


def _paths(corpus: Path) -> list[str]:
    tokenizer = corpus / "stdlib.model" if importlib.util.find_spec("sentencepiece") is not None else "null"
    return [
        f"data.train={corpus / 'stdlib.train'}",
        f"data.valid={corpus / 'stdlib.valid'}",
        f"data.tokenizer={tokenizer}",
    ]


def given_corpus(corpus: Path) -> float:
    """Part 1, made before: its unigram entropy in nats per token.

    Raises:
        UsageError: it is not there, or was made with another tokenizer.
    """
    from qeffect_lm.data.indexed import IndexedDataset
    from qeffect_lm.data.stats import unigram_entropy

    heading(f"1. corpus: {corpus}")
    return unigram_entropy(IndexedDataset(corpus / "stdlib.train"), VOCAB)


def make_corpus(corpus: Path, megabytes: float) -> float:
    """Part 1. Returns the corpus's unigram entropy in nats per token."""
    from qeffect_lm.data.corpus import TokenizerTraining
    from qeffect_lm.data.corpus import make_corpus as preprocess
    from qeffect_lm.data.encoding import Settings
    from tools.preprocess import stdlib_python_files, subset

    heading("1. corpus: the .py sources of this interpreter's standard library")
    settings = Settings(valid_fraction=0.02, bad="skip")  # a few of the library's tests are no UTF-8, on purpose
    report = preprocess(
        subset(stdlib_python_files(), int(megabytes * 1e6), settings.seed),
        corpus / "stdlib",
        settings,
        tokenizer=TokenizerTraining(VOCAB),
        workers=os.cpu_count() or 1,
        progress=True,
    )
    print(report.summary())
    return report.unigram_entropy


# ---- launching -------------------------------------------------------------------------------------------------


def _torchrun_command(where: Setup, overrides: Sequence[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(where.ranks)]
    return [*launcher, str(TRAIN), str(where.config), *overrides]


def torchrun(where: Setup, overrides: Sequence[str]) -> None:
    """Run to the end with its output shown as it comes."""
    command = _torchrun_command(where, overrides)
    print(f"$ torchrun --nproc-per-node {where.ranks} train.py {where.config.relative_to(ROOT)} …", flush=True)
    code = subprocess.run(command, stdin=subprocess.DEVNULL, env=_environment()).returncode
    if code:
        raise DemoError(f"the training ended with exit code {code}")


def captured_torchrun(where: Setup, overrides: Sequence[str]) -> str:
    """Run to the end; returns its output."""
    done = subprocess.run(
        _torchrun_command(where, overrides), stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environment()
    )
    if done.returncode:
        raise DemoError(f"a run ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def killed_torchrun(where: Setup, overrides: Sequence[str], metrics: Path) -> list[int]:
    """Start, SIGKILL all ranks once the step to be killed after is logged; returns their process ids."""
    agent = subprocess.Popen(
        _torchrun_command(where, overrides),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
    )
    try:
        while last_step(metrics) < where.kill:
            if agent.poll() is not None:
                raise DemoError(f"the run to be killed ended by itself with exit code {agent.returncode}")
            time.sleep(0.002)
        ranks = children(agent.pid)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        code = agent.wait(60)
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    if code == 0 or len(ranks) < where.ranks:
        raise DemoError("the run was not killed in the middle")
    return ranks


def compare_speeds(where: Setup, folder: Path, overrides: list[str]) -> None:
    """Tokens a second of the training just done, and of a short eager run; medians over steps that were logged one by one."""
    from qeffect_lm.runtime.metrics import read_metrics

    eager = folder / "eager"
    plain = ["graphs.backend=eager", f"train.steps={EAGER_STEPS}", "train.eval_every=0", "checkpoint.save_at_end=false"]
    captured_torchrun(where, [*overrides, *plain, "checkpoint.every=0", "logging.progress=off", f"run.dir={eager}"])
    rates = []
    for run in (eager, folder / "train"):
        records = read_metrics(run / "metrics.jsonl")
        rates.append(statistics.median(m.tokens_per_second for m in records if m.step > 5 and m.tokens_per_second))
    print(f"tokens/s: {rates[0]:,.0f} eager, {rates[1]:,.0f} captured ({rates[1] / rates[0]:.2f} times)")


# ---- the proof -------------------------------------------------------------------------------------------------


def prove_resume(where: Setup, folder: Path, overrides: list[str]) -> None:
    """Part 3: uninterrupted; killed and resumed; compared; and a control that must fail."""
    every = {1: "the rank", 2: "both ranks"}[where.ranks]
    heading(f"3. resume: kill -9 {every}, restart, {'capture anew, ' if where.device == 'cuda' else ''}compare bit for bit")
    proof = [*overrides, *where.proof()]
    whole, killed, control = (folder / "resume" / name for name in ("uninterrupted", "killed", "control"))
    captured_torchrun(where, [*proof, f"run.dir={whole}"])
    ranks = killed_torchrun(where, [*proof, f"run.dir={killed}"], killed / "metrics.jsonl")
    reached = last_step(killed / "metrics.jsonl")
    print(f"killed {every} (pids {', '.join(map(str, ranks))}) with SIGKILL after step {reached} of {where.steps}")
    before = (killed / "metrics.jsonl").read_bytes()
    shutil.copytree(killed, control)
    output = captured_torchrun(where, [*proof, f"run.dir={killed}"])
    resumed = check_resumed(output, before, killed / "metrics.jsonl", where.steps)
    result = compare_runs(whole, killed, resumed.at, where.steps)
    if result.first is not None:
        print(f"resume parity: FAILED, first differing: {result.first}")
        raise DemoError(f"the resumed run differs from the uninterrupted one, first in {result.first}")
    print(f"resume parity: {result.tensors} tensors bitwise equal")
    print(f"  ({result.detail})")
    run_control(where, whole, control, proof, resumed.at)


@dataclass(frozen=True)
class Resumed:
    at: int
    to: int


def check_resumed(output: str, before: bytes, metrics: Path, end: int) -> Resumed:
    """``resumed at S, ran S+1…T``, and the metrics agree: no step up to S ran again."""
    found = re.search(r"resumed at (\d+), ran (\d+)…(\d+)", output)
    if found is None:
        raise DemoError(f"the restarted run does not say that it resumed:\n{output}")
    at, first, to = map(int, found.groups())
    print(found.group(0))
    lines = metrics.read_bytes().splitlines(keepends=True)
    steps = [int(re.search(rb'"step":\s*(\d+)', line).group(1)) for line in lines]  # type: ignore[union-attr]
    kept = b"".join(line for line, step in zip(lines, steps, strict=True) if step <= at)
    if first != at + 1 or to != end or steps != list(range(1, to + 1)):
        raise DemoError(f"the resumed run ran {first}…{to} and logged steps {steps}; expected {at + 1}…{end}")
    if not before.startswith(kept):
        raise DemoError(f"a step up to {at} ran again after the resume")
    return Resumed(at, to)


@dataclass(frozen=True)
class Parity:
    """``first`` names the first thing that differs, None when all is equal."""

    tensors: int
    first: str | None
    differing: int
    detail: str


def compare_runs(a: Path, b: Path, resumed_at: int, end: int) -> Parity:
    """Every loss, and at the resumed and the last step every tensor, counter, cursor and fingerprint, as bytes."""
    from checkpoint import compare, open_checkpoint, step_name
    from qeffect_lm.runtime.metrics import read_metrics

    tensors = differing = 0
    first: str | None = None
    meta = ("contract", "data", "tokens", "step", "plan_fingerprint", "graph_fingerprints")
    for step in (resumed_at, end):
        x, y = (open_checkpoint(run / "checkpoints" / step_name(step)) for run in (a, b))
        result = compare(x, y, meta_keys=meta)
        tensors += len(result.equal)
        differing += len(result.different)
        if first is None and not result.same:
            first = f"{result.first_name or result.meta[0].key} (step {step})"
    losses = [[(m.step, m.loss, m.grad_norm) for m in read_metrics(run / "metrics.jsonl")] for run in (a, b)]
    if losses[0] != losses[1] and first is None:
        first = next(f"loss of step {p[0]}" for p, q in zip(*losses, strict=False) if p != q)
    detail = (
        f"weights, masters, moments, scales, histories, open slots, cached FP8 weights and generators at steps {resumed_at} "
        f"and {end}; contract counters, versions, epochs, data cursor, plan and graph fingerprints; "
        f"{len(losses[0])} losses"
    )
    return Parity(tensors, first, differing, detail)


def run_control(where: Setup, whole: Path, control: Path, proof: list[str], resumed_at: int) -> None:
    """Double one scale in the checkpoint and resume from it: the comparison must fail, by that tensor's name."""
    from checkpoint import open_checkpoint, rewrite_checkpoint, step_name

    path = control / "checkpoints" / step_name(resumed_at)
    saved = open_checkpoint(path)
    tampered = control / "tampered"
    rewrite_checkpoint(saved, tampered, {CONTROL_SCALE: saved.read(CONTROL_SCALE) * 2})
    shutil.rmtree(control / "checkpoints")
    tampered.rename(control / "checkpoints")
    captured_torchrun(where, [*proof, f"run.dir={control}"])
    result = compare_runs(whole, control, resumed_at, where.steps)
    if result.first is None or not result.first.startswith(CONTROL_SCALE):
        raise DemoError(f"the control with {CONTROL_SCALE} doubled was not noticed (first difference: {result.first})")
    print(
        f"control: {CONTROL_SCALE} doubled in the checkpoint of step {resumed_at}: fails as it must, first differing "
        f"{result.first}, {result.differing} tensors differ"
    )


# ---- results ---------------------------------------------------------------------------------------------------


def show_results(folder: Path, entropy: float) -> None:
    """Part 4: held-out loss before and after, a sample, and where everything is."""
    from qeffect_lm.runtime.metrics import read_metrics
    from qeffect_lm.runtime.plots import plot_loss

    heading("4. results")
    train = folder / "train"
    records = read_metrics(train / "metrics.jsonl")
    held_out = [(m.step, m.eval_loss) for m in records if m.eval_loss is not None]
    before, after = held_out[0][1], held_out[-1][1]
    picture = train / "loss.png"
    try:
        plot_loss(train / "metrics.jsonl", picture, held_out=held_out, unigram_entropy=entropy, title="QEffect LM demo")
    except QEffectError as error:  # an environment of the user's own may lack matplotlib
        print(f"no loss plot: {error}")
    print(f"held-out loss: {before:.3f} before, {after:.3f} after ({before - after:.3f} nats/token lower)")
    perplexity = f"{math.exp(before):.0f} -> {math.exp(after):.0f}"
    print(f"unigram entropy of the corpus: {entropy:.3f} nats/token; held-out perplexity {perplexity}")
    if importlib.util.find_spec("sentencepiece") is not None:
        print("sample:", flush=True)
        sample = [sys.executable, "-m", "tools.generate", str(train.absolute() / "checkpoints"), "--prompt", "def "]
        hidden = {"CUDA_VISIBLE_DEVICES": ""}  # one token at a time is no work for a GPU
        subprocess.run([*sample, "--max-new-tokens", "80", "--seed", "1"], check=True, env={**_environment(), **hidden})
    runs = sorted((train / "wandb").glob("offline-run-*"))
    print(f"\nloss plot:   {picture if picture.exists() else 'none (install matplotlib)'}")
    print(f"metrics:     {train / 'metrics.jsonl'}")
    print(f"wandb run:   {runs[-1] if runs else 'none'}")
    print(f"checkpoint:  {train / 'checkpoints' / (train / 'checkpoints/latest').read_text().strip()}")
    if before - after < 3.0:
        raise DemoError(f"the held-out loss fell by {before - after:.3f} nats/token, less than 3")
    if after >= entropy:
        raise DemoError(f"the held-out loss {after:.3f} is not below the unigram entropy {entropy:.3f}")


if __name__ == "__main__":
    sys.exit(main())
