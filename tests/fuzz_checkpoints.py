"""What may happen when hostile checkpoints are read: they are sound, or refused by an error of ours. Nothing else.

    python -m tests.fuzz_checkpoints FOLDER --first 0 --count 20000

Each number is one input (:mod:`tests.hostile`). Everything that reads checkpoints reads it, in a process whose address
space is bounded and that notes every file it opens. Exit code 0: each input was read as a sound checkpoint or refused
on one line; otherwise the first number that was not is printed with what happened.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import logging
import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkpoint import Checkpoint, SingleProcess, find_resumable, load_into, open_checkpoint, resolve, scan
from checkpoint import reader as reading
from checkpoint.layout import is_document
from checkpoint.manifest import incomplete_because
from checkpoint.retention import latest_name
from checkpoint.saved_run import check_saved_run
from checkpoint.verify import verify
from pipeline.plan import Plan
from qeffect_lm.app.shapes import config_problems
from qeffect_lm.config import config_diff_on_resume
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.data.loader import StepLoader, StepShape
from qeffect_lm.errors import QEffectError
from qeffect_lm.state import LogicalTensor
from tests.hostile import STEP, TEXT_MOST, bases, bombs, grid, hostile, lay_out
from tests.tiny import config
from tools import diff, inspect, plan_check
from tools import verify as verify_tool

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 120  # on the clock, for what waits for something; a machine may rest for a while, too
CPU_SECONDS = 5  # of one input; none takes a tenth of it
NEVER = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect", "os.remove", "os.rename")
OURS = ("checkpoint", "models", "pipeline", "qeffect_lm", "tools")
CODE = (sys.prefix, sys.base_prefix, *(f"{ROOT}/{name}/" for name in OURS))
MEMORY = 1 << 30  # bytes of address space beyond what the process has at the beginning


class Watch:
    """Notes what this process opens outside ``root`` and what it must never do, while ``on``. It stays for the
    process's life."""

    def __init__(self, root: Path) -> None:
        self.root, self.on, self.seen = str(root), False, list[str]()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path, flags = os.fsdecode(arguments[0]), arguments[2] or 0
            if path.startswith(CODE):  # modules and packages' own data, read when they are first needed
                return
            inside = os.path.dirname(os.path.abspath(path)).startswith(self.root)
            follows = os.path.islink(path) and not flags & os.O_NOFOLLOW
            waits = os.path.lexists(path) and not os.path.isfile(path) and not flags & os.O_NONBLOCK
            if not inside or follows or waits:
                self.seen.append(f"opened {path}")
            if flags & (os.O_WRONLY | os.O_RDWR):
                self.seen.append(f"opened {path} to write")
        elif event in NEVER:
            self.seen.append(f"{event} {arguments}")


def one_line(error: BaseException | str) -> None:
    text = str(error)
    if not text or not text.isprintable() or len(text) > 3000:
        raise AssertionError(f"not one line that can be printed: {text[:300]!r}")
    if "which are not there" in text:
        raise AssertionError(f"memory was asked for that nothing vouches for: {text}")


def attempt(work: Callable[[], Any]) -> Any:
    """The result, or None where it was refused as it should be. What lists several faults has a line for each."""
    try:
        return work()
    except QEffectError as error:
        for line in str(error).split("\n"):
            one_line(line)
        return None


def resume_from(checkpoint: Checkpoint) -> None:
    """What a resume takes from the meta data, in its order."""
    for problem in config_problems(checkpoint):
        one_line(str(problem))
    if attempt(lambda: check_saved_run(checkpoint) or True) is None:
        return
    for change in config_diff_on_resume(checkpoint.meta["config"], config()):
        one_line(str(change))
    data: Any = SimpleNamespace(prefix=Path("x"))
    source: Any = SimpleNamespace(dataset=data, seq_len=16, packing="stream", reset=False, sha256=lambda: "0")
    attempt(lambda: StepLoader([source], StepShape(2, 4), seed=1).load_state(checkpoint.meta["data"]))
    ScaleTimeline([]).load_state(checkpoint.meta["contract"]["timeline"])
    attempt(lambda: Plan.from_json(checkpoint.meta["plan"]))


def read_all(root: Path, like: list[LogicalTensor]) -> str:
    """Everything that reads a checkpoint reads this one. Returns how far it got."""
    path = root / STEP
    attempt(lambda: find_resumable(root))
    attempt(lambda: resolve(root))
    attempt(lambda: scan(root))
    fault = incomplete_because(path)
    if fault is not None:
        one_line(fault)
    latest_name(root)
    checkpoint = attempt(lambda: open_checkpoint(path))
    if checkpoint is None:
        return "refused"
    problems = verify(checkpoint, 1)
    for problem in problems:
        one_line(str(problem))
    for name in checkpoint.names():
        corner = [1] * len(checkpoint.entry(name).shape)
        attempt(lambda name=name: checkpoint.read(name))
        attempt(lambda name=name, corner=corner: checkpoint.read(name, [0] * len(corner), corner))
    for name in filter(is_document, checkpoint.manifest.files):
        attempt(lambda name=name: checkpoint.read_document(name))
    resume_from(checkpoint)
    for item in like:
        item.tensor.zero_()
    attempt(lambda: load_into(checkpoint, like, strict=False, comm=SingleProcess()))
    return "damaged" if problems or fault else "sound"


def run_tools(root: Path) -> None:
    """The command lines: exit codes 0, 1 and 2, and an error is one line."""
    path = str(root / STEP)
    for main, arguments in (
        (verify_tool.main, [str(root), "--all"]),
        (verify_tool.main, [path, "--json"]),
        (diff.main, [path, path, "--meta"]),
        (inspect.main, [path]),
    ):
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
        said = err.getvalue()
        if code not in (0, 1, 2) or "Traceback" in said or (said and not said.startswith("error: ")):
            raise AssertionError(f"{main.__module__} {arguments}: exit code {code}, {said}")
    attempt(lambda: plan_check.load(root / STEP))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--tools", type=int, default=25, help="the command lines read every n-th input")
    arguments = parser.parse_args()
    reading.DOCUMENT_MOST = TEXT_MOST  # type: ignore[attr-defined]
    logging.disable(logging.CRITICAL)  # a skipped checkpoint is warned about
    folder = arguments.folder.resolve()
    sound, documents = bases(folder / "base"), bombs()
    like = [*grid(0), *(item for item in grid(1) if item.per_rank)]
    root = folder / "case"
    for files in sound:  # so that everything is imported before anybody watches
        lay_out(root, files)
        run_tools(root)
        if read_all(root, like) != "sound":
            raise AssertionError("a sound checkpoint was not read as one")
    watch, counts = Watch(root), Counter[str]()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for number in range(arguments.first, arguments.first + arguments.count):
        kind, files = hostile(number, sound, documents)
        lay_out(root, files)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        began = time.process_time()
        watch.on = True
        try:
            got = read_all(root, like)
            counts[f"{kind} {got}"] += 1
            if number % arguments.tools == 0 or (got != "refused" and kind in ("manifest", "meta")):
                run_tools(root)
            if time.process_time() - began > CPU_SECONDS:
                raise AssertionError(f"it took {time.process_time() - began:.1f} s of CPU time")
        except BaseException:
            watch.on = False
            print(f"input {number} ({kind}), left in {root}:\n{traceback.format_exc()[-4000:]}")
            return 1
        finally:
            watch.on = False
            faulthandler.cancel_dump_traceback_later()
        if watch.seen:
            print(f"input {number} ({kind}), left in {root}: {watch.seen}")
            return 1
    # not ru_maxrss: a process begins with that of the one it was started from
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000  # type: ignore[index]
    print(json.dumps({"inputs": arguments.count, "peak_mb": peak, **counts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
