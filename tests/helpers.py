"""Helpers shared by the tests: run a function in several gloo processes, and say clearly what went wrong.

    from tests.helpers import run_distributed

    def _body(rank, world, extra):        # module level, in an importable test module
        ...
        return picklable

    def test_it():
        results = run_distributed(_body, 2, "extra", timeout=60)     # one entry per rank

Each rank is a fresh Python process started with torchrun's environment variables. Unless ``init=False`` its
default process group (gloo) is up before the function runs; a world of one gets no group, as in a real
launch. The parent hosts the rendezvous store on a port that the kernel picked, so that parallel test workers
never collide.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STDERR_TAIL = 6000  # characters of each rank's output shown on failure
GRACE_SECONDS = 3.0  # how long the other ranks may take to fail by themselves after the first failure


class DistributedError(AssertionError):
    """A rank failed or the time ran out; the message holds the exit codes and each rank's output."""


@dataclass
class RankResult:
    """How one rank ended: ``returncode`` (negative: the signal), its return ``value`` and what it printed."""

    rank: int
    returncode: int | None
    value: Any
    output: str

    @property
    def finished(self) -> bool:
        """True when the function returned and the process exited with 0."""
        return self.returncode == 0


class DistributedRun:
    """A running set of ranks. Use :func:`run_distributed` unless the test kills or watches single ranks."""

    def __init__(
        self, folder: Path, processes: list[subprocess.Popen[bytes]], store: Any, deadline: float
    ) -> None:
        self.folder = folder
        self.processes = processes
        self._store = store  # keeps the rendezvous server alive
        self._deadline = deadline

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(signum)

    def wait(self, check: bool = True, grace: float = GRACE_SECONDS) -> list[RankResult]:
        """Wait for all ranks. With ``check`` a failure or the timeout ends all and raises DistributedError.

        Without ``check`` every rank gets until the deadline, then the rest is killed; results are returned.
        """
        timed_out = False
        try:
            failed_at: float | None = None
            while any(p.poll() is None for p in self.processes):
                now = time.monotonic()
                if failed_at is None and any(p.returncode not in (None, 0) for p in self.processes):
                    failed_at = now
                if check and failed_at is not None and now - failed_at > grace:
                    break
                if now > self._deadline:
                    timed_out = True
                    break
                time.sleep(0.02)
        finally:
            results = self.close()
        if check and (timed_out or not all(r.finished for r in results)):
            raise DistributedError(_describe(results, timed_out))
        return results

    def close(self) -> list[RankResult]:
        """Kill what still runs, remove the temporary folder and return how each rank ended."""
        for process in self.processes:
            if process.poll() is None:
                _kill_group(process)
        results = []
        for rank, process in enumerate(self.processes):
            process.wait()
            output = _read_tail(self.folder / f"output_{rank}.txt")
            value = _load(self.folder / f"result_{rank}.pkl")
            results.append(RankResult(rank, process.returncode, value, output))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._store = None
        return results


def run_distributed(
    fn: Callable[..., Any] | str,
    world: int,
    *args: Any,
    timeout: float = 120.0,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Run ``fn(rank, world, *args)`` in ``world`` processes and return their results, in rank order.

    ``fn`` is a module-level function or ``"package.module:name"``. Arguments and results travel by pickle.
    ``env`` adds environment variables, or removes those whose value is None.
    Raises :class:`DistributedError` with the ranks' output when one fails or ``timeout`` (seconds) passes.
    """
    run = start_distributed(fn, world, *args, timeout=timeout, init=init, env=env)
    return [result.value for result in run.wait()]


def start_distributed(
    fn: Callable[..., Any] | str,
    world: int,
    *args: Any,
    timeout: float = 120.0,
    init: bool = True,
    env: Mapping[str, str | None] | None = None,
) -> DistributedRun:
    """Start the ranks of :func:`run_distributed` and return at once."""
    import torch.distributed as dist

    folder = Path(tempfile.mkdtemp(prefix="qeffect-test-"))
    module, file, name = _locate(fn)
    job = {"module": module, "file": file, "name": name, "world": world, "init": init, "timeout": timeout}
    (folder / "job.pkl").write_bytes(pickle.dumps(job))
    (folder / "args.pkl").write_bytes(pickle.dumps(args))
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    processes = []
    for rank in range(world):
        with open(folder / f"output_{rank}.txt", "wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.helpers", str(folder), str(rank)],
                    cwd=ROOT,
                    env=_child_environment(rank, world, store.port, env),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return DistributedRun(folder, processes, store, time.monotonic() + timeout)


def launch_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for one rank of a single-node job whose agent hosts the store at ``port``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent is the "agent": nobody else binds the port
    }


def _child_environment(
    rank: int, world: int, port: int, extra: Mapping[str, str | None] | None
) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_", "COV_"))}
    environ.update(launch_environment(rank, world, port))
    environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    environ["PYTHONUNBUFFERED"] = "1"
    for name, value in (extra or {}).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    return environ


def _locate(fn: Callable[..., Any] | str) -> tuple[str, str | None, str]:
    """The (module, file, qualified name) by which a child finds the function again."""
    if isinstance(fn, str):
        module, separator, name = fn.partition(":")
        if not separator:
            raise ValueError(f"give the function as 'package.module:name', not {fn!r}")
        return module, None, name
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} is not at module level, so another process cannot import it")
    return fn.__module__, getattr(sys.modules.get(fn.__module__), "__file__", None), fn.__qualname__


def _describe(results: list[RankResult], timed_out: bool) -> str:
    head = "the time ran out" if timed_out else "a rank failed"
    lines = [f"{head}; exit codes {[r.returncode for r in results]} (negative: the signal that ended it)"]
    for result in results:
        lines += [f"----- rank {result.rank}, exit code {result.returncode} -----", result.output.rstrip()]
    return "\n".join(lines)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the rank and whatever it started
    except ProcessLookupError:
        pass


def _read_tail(path: Path) -> str:
    try:
        return path.read_bytes()[-STDERR_TAIL:].decode(errors="replace")
    except OSError:
        return ""


def _load(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _import_function(job: dict[str, Any]) -> Callable[..., Any]:
    try:
        module = importlib.import_module(job["module"])
    except ImportError:
        if not job["file"]:
            raise
        spec = importlib.util.spec_from_file_location(job["module"], job["file"])
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[job["module"]] = module
        spec.loader.exec_module(module)
    target: Any = module
    for part in job["name"].split("."):
        target = getattr(target, part)
    return target


def _exit_later(seconds: float) -> None:
    """End this process by itself, for the case that the parent is gone and nobody kills it."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _child(folder: Path, rank: int) -> int:
    """One rank: rendezvous, call, write the result whole (rename), tear down."""
    job = pickle.loads((folder / "job.pkl").read_bytes())
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, job["timeout"] - 1.0))  # where does it hang?
    _exit_later(job["timeout"] + 10.0)
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch.distributed as dist

    function = _import_function(job)
    args = pickle.loads((folder / "args.pkl").read_bytes())
    if job["init"] and job["world"] > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout"]))
    value = function(rank, job["world"], *args)
    partial = folder / f"result_{rank}.tmp"
    partial.write_bytes(pickle.dumps(value))
    partial.rename(folder / f"result_{rank}.pkl")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still receives from it
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        code = _child(Path(sys.argv[1]), int(sys.argv[2]))
    except SystemExit as stop:  # a test may want to see an exit code
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo threads of a broken group must not keep a failed rank alive
