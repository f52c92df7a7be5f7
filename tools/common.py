"""What the command-line tools share: error reporting, and launching training runs as processes."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qeffect_lm.errors import QEffectError

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"


def add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")


def add_inference(parser: argparse.ArgumentParser) -> None:
    """The options of the tools that run a checkpoint's model."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="where to run (default: as the run)")
    parser.add_argument("--context", type=int, help="tokens of the longest sequence (default: the run's data.seq_len)")
    parser.add_argument("--tokenizer", type=Path, help="a .model, or Hugging Face's .json (default: the checkpoint's)")
    parser.add_argument(
        "--bos", action=argparse.BooleanOptionalAction, help="begin-of-sequence token first (default: as the model has it)"
    )
    parser.add_argument(
        "--family", metavar="MODULE:FUNCTION", help="the run's own family: its code runs only if named here"
    )
    parser.add_argument("--no-fp8", dest="fp8", action="store_false", help="run FP8 linears in the model's dtype")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores); part of the last bits")


def inference_threads(arguments: argparse.Namespace) -> int:
    """CPU threads of a tool with :func:`add_inference`'s options."""
    return arguments.threads if arguments.threads is not None else len(os.sched_getaffinity(0))


def run_tool(body: Callable[[], int], show_traceback: bool, as_json: bool = False, *, os_error: int = 1) -> int:
    """Run a tool's body; an error becomes one line on stderr and its exit code, with ``as_json`` also ``{"error": …}`` on
    stdout, for whoever parses that.

    An error of the operating system is a failure, ``os_error``: 2 of tools whose 1 says "damaged" or "different".
    """
    try:
        code = body()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (QEffectError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError):
            said = f"{error.filename or 'input or output'}: {error.strerror or error}"
        if as_json:
            print(json.dumps({"error": said}), flush=True)
        print(printable(f"error: {said}"), file=sys.stderr)
        if show_traceback:
            traceback.print_exception(error)
        return error.exit_code if isinstance(error, QEffectError) else os_error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def printable(text: str) -> str:
    """What came out of other people's files, without characters that steer a terminal or that no encoding has."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def json_plain(value: Any) -> Any:
    """JSON proper has no NaN and no infinity: they are given as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: json_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_plain(item) for item in value]
    return value


@dataclass
class Launched:
    """The ranks of a run started by :func:`launch`."""

    processes: list[subprocess.Popen[str]]

    def wait(self, timeout: float = 600.0) -> tuple[int, str]:
        """(first non-zero exit code or 0, all output); kills everything past ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        outputs = []
        for process in self.processes:
            try:
                outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                self.kill()
                outputs.append(process.communicate()[0] + "\n(killed: the time ran out)")
        codes = [process.returncode for process in self.processes]
        return next((code for code in codes if code), 0), "".join(outputs)

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(
    config: Path, overrides: Sequence[str], world: int, environ: Mapping[str, str], extra: Mapping[str, str] | None = None
) -> Launched:
    """Start ``train.py`` with ``world`` ranks on this machine, with the variables that torchrun sets."""
    return launch_ranks([sys.executable, str(TRAIN), str(config), *overrides], world, {**environ, **(extra or {})})


def launch_ranks(command: Sequence[str], world: int, environ: Mapping[str, str]) -> Launched:
    """Start ``command`` as ``world`` ranks on this machine, with the variables that torchrun sets."""
    port = str(free_port())
    processes = []
    for rank in range(world):
        env = {key: value for key, value in environ.items() if not key.startswith("SLURM_")}
        if world > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env |= {"PYTHONUNBUFFERED": "1"}
        processes.append(
            subprocess.Popen(
                list(command),
                env=env,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return Launched(processes)


def last_step(metrics: Path) -> int:
    """The newest step in a metrics file; -1 while there is none."""
    try:
        lines = metrics.read_bytes().split(b"\n")
    except OSError:
        return -1
    for line in reversed(lines[:-1]):  # the part behind the last newline may be torn
        head, _, rest = line.partition(b'"step":')
        if rest:
            return int(rest.split(b",")[0].strip())
    return -1


def kill_after(run: Launched, metrics: Path, step: int, timeout: float = 300.0) -> bool:
    """SIGKILL all ranks once the run has logged ``step``; False if it ended before that."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if last_step(metrics) >= step:
            if not run.running:
                return False
            run.kill()
            return True
        if not run.running:
            return False
        time.sleep(0.002)
    run.kill()
    return False


def children(pid: int) -> list[int]:
    """Process ids of the direct children of ``pid``."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if listed.exists():
        return [int(word) for word in listed.read_text().split()]
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def environment() -> dict[str, str]:
    """A copy of this process's environment (tools may read it)."""
    return dict(os.environ)
