"""How a process learns its place in the job, joins the others, and hears that it should stop.

Nothing here reads ``os.environ``: train.py passes it in as a mapping. torch is imported only where processes
talk.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from qeffect_lm.errors import QEffectError, UsageError

if TYPE_CHECKING:
    import torch.distributed as dist

    from qeffect_lm.config import ParallelConfig

SLURM_PORTS = range(10000, 30000)  # below Linux's ephemeral ports, which other programs are handed at random
MAX_HOSTS = 100_000


@dataclass(frozen=True)
class LaunchEnv:
    """This process's place: ``rank`` of ``world``, ``local_rank`` on its machine, where rank 0 listens.

    ``launcher`` is ``torchrun``, ``slurm`` or ``single``; ``restart_count`` counts earlier attempts.
    ``agent_store`` says that torchrun's agent, not rank 0, hosts the rendezvous store.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    restart_count: int = 0
    launcher: str = "single"
    agent_store: bool = False

    @staticmethod
    def from_mapping(environ: Mapping[str, str]) -> LaunchEnv:
        """Read torchrun's variables, else SLURM's, else describe a single process.

        torchrun started by srun sees both; torchrun's are then the right ones. ``SLURM_*`` without
        SLURM_PROCID is an allocation's shell, not a task. Raises :class:`UsageError` for missing or
        contradicting variables.
        """
        if "RANK" in environ or "WORLD_SIZE" in environ:
            env = _from_torchrun(environ)
        elif "SLURM_PROCID" in environ:
            env = _from_slurm(environ)
        else:
            return LaunchEnv()
        if not 0 <= env.rank < env.world:
            raise UsageError(f"the launcher's variables disagree: rank {env.rank} of world size {env.world}")
        if not 0 <= env.local_rank <= env.rank:
            raise UsageError(
                f"the launcher's variables disagree: local rank {env.local_rank} of global rank {env.rank}"
            )
        return env


def _from_torchrun(environ: Mapping[str, str]) -> LaunchEnv:
    needed = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if not environ.get(name)]
    if missing:
        present = [name for name in needed if environ.get(name)]
        raise UsageError(
            f"{', '.join(present)} set but {', '.join(missing)} missing: start with torchrun, which sets "
            "them all, or unset them for a single process"
        )
    return LaunchEnv(
        rank=_integer(environ, "RANK"),
        world=_integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        master_addr=environ["MASTER_ADDR"],
        master_port=_integer(environ, "MASTER_PORT"),
        restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher="torchrun",
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnv:
    # The step's own numbers come first: `srun -n 2` inside an allocation of 8 tasks is a world of 2.
    world = next((n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if n in environ), None)
    if world is None:
        raise UsageError(
            "SLURM_PROCID set but SLURM_NTASKS missing: start with srun --ntasks N python train.py …"
        )
    size = _integer(environ, world)
    hosts = next(
        (n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(n)), None
    )
    if environ.get("MASTER_ADDR"):
        address = environ["MASTER_ADDR"]
    elif hosts is not None:
        address = expand_hostlist(environ[hosts])[0]
    elif size == 1:
        address = "127.0.0.1"
    else:
        raise UsageError(
            "SLURM_NODELIST is missing, so rank 0's machine is unknown: start with srun, or set MASTER_ADDR"
        )
    return LaunchEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        world=size,
        local_rank=_integer(environ, "SLURM_LOCALID", 0 if size == 1 else None),
        master_addr=address,
        master_port=_slurm_port(environ, size),
        restart_count=_integer(environ, "SLURM_RESTART_COUNT", 0),
        launcher="slurm",
    )


def _slurm_port(environ: Mapping[str, str], world: int) -> int:
    """A port that all tasks of a step agree on without talking, different for neighbouring jobs and steps."""
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT")
    if world == 1:
        return 0
    if not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "SLURM_JOB_ID is missing, so no common port can be derived: start with srun, or set MASTER_PORT"
        )
    step = _integer(environ, "SLURM_STEP_ID", 0)
    return SLURM_PORTS[(_integer(environ, "SLURM_JOB_ID") + 131 * step) % len(SLURM_PORTS)]


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not re.fullmatch(r"[0-9]+", text):
        raise UsageError(f"environment variable {name} is {text!r}, a whole number is expected")
    return int(text)


def expand_hostlist(text: str) -> list[str]:
    """SLURM's compact host list, expanded in order: ``node[01-03,7],gpu5`` → node01 node02 node03 node7 gpu5.

    The zero padding of a range is that of its first number. Raises :class:`UsageError` for malformed lists.
    """
    hosts = [host for item in _split_outside_brackets(text) for host in _expand_item(item, text)]
    if not hosts:
        raise UsageError(f"empty host list {text!r}")
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    items, depth, current = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise UsageError(f"unbalanced brackets in the host list {text!r}")
        if character == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise UsageError(f"unbalanced brackets in the host list {text!r}")
    return [item.strip() for item in [*items, current] if item.strip()]


def _expand_item(item: str, whole: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    ranges, _, tail = rest.partition("]")
    tails = list(_expand_item(tail, whole)) if tail else [""]
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise UsageError(f"cannot read {part!r} in the host list {whole!r}")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_HOSTS:
            raise UsageError(f"cannot read the range {part!r} in the host list {whole!r}")
        for number in range(int(first), int(last) + 1):
            for end in tails:
                yield f"{head}{number:0{len(first)}d}{end}"


def check_world(parallel: ParallelConfig, world: int) -> None:
    """Raise :class:`UsageError` unless pp*dp*ep*cp*tp ranks were started; the message says how to mend it."""
    wanted = parallel.world
    if wanted == world:
        return
    sizes = " x ".join(f"{axis} {size}" for axis, size in parallel.sizes.items())
    layout = f"parallel.{sizes} = {wanted}"
    if wanted == 1:
        remedy = "start one process (python train.py CONFIG)"
    else:
        remedy = (
            f"start {wanted} processes (torchrun --nproc-per-node {wanted} train.py CONFIG, "
            f"or srun --ntasks {wanted} python train.py CONFIG)"
        )
    model_ranks = wanted // parallel.dp
    change = f" or set parallel.dp={world // model_ranks}" if world % model_ranks == 0 else ""
    raise UsageError(f"{layout}, but WORLD_SIZE = {world}: {remedy}{change}")


class StopSignals:
    """While entered, SIGTERM and SIGUSR1 ask for an orderly stop instead of ending the process.

    The loop polls :attr:`requested` between steps. SIGTERM comes from schedulers and torchrun, SIGUSR1 from
    ``sbatch --signal=USR1@60``. The earlier handlers are back on leaving. Use it in the main thread.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self._requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """The name of the first signal that came (``"SIGTERM"``), or None."""
        return self._requested

    def __enter__(self) -> StopSignals:
        for signum in self.SIGNALS:
            self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signum, handler = self._before.popitem()
            # None: the earlier handler was not set from Python, and cannot be put back from here.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requested = self._requested or signal.Signals(signum).name


def init_process_group(env: LaunchEnv, backend: str = "gloo", timeout: float = 300.0) -> bool:
    """Join the default process group of ``env.world`` ranks; False (and no group) for one process.

    ``timeout`` in seconds bounds the rendezvous and every later collective. Under torchrun its agent hosts
    the store; otherwise rank 0 does, at ``env.master_addr:master_port``. Raises :class:`QEffectError` when
    the ranks do not meet.
    """
    if env.world == 1:
        return False
    import torch.distributed as dist

    wait = timedelta(seconds=timeout)
    try:
        hosts = env.rank == 0 and not env.agent_store
        store = dist.TCPStore(env.master_addr, env.master_port, env.world, hosts, wait, multi_tenant=True)
        # An agent's store outlives a restart: without a prefix, killed ranks' addresses would be found there.
        attempt = dist.PrefixStore(f"qeffect/attempt_{env.restart_count}", store)
        dist.init_process_group(backend, store=attempt, rank=env.rank, world_size=env.world, timeout=wait)
    except (RuntimeError, ValueError) as error:  # torch's DistStoreError, DistNetworkError and friends
        hint = ""
        if env.launcher == "slurm":
            hint = " A job script must start the ranks by `srun python train.py …`, not by python alone."
        raise QEffectError(
            f"rank {env.rank} of {env.world} did not meet the others at {env.master_addr}:{env.master_port} "
            f"within {timeout:g} s (launch.timeout_seconds): {str(error).splitlines()[0]}.{hint}"
        ) from error
    return True


class _HasPlace(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...


def shared_folder_check(
    path: str | Path, env: _HasPlace, group: dist.ProcessGroup | None = None, patience: float = 10.0
) -> None:
    """Make the folder and prove that every rank sees the same one; all ranks call it and all raise alike.

    Rank 0 writes a random token into ``path``; the others look for it, up to ``patience`` seconds, because
    network file systems show new files late. ``group`` is the group of all ranks (None: the default one).
    Raises :class:`UsageError` when rank 0 cannot write there, or naming the ranks and machines that do not
    see the token.
    """
    folder = Path(path)
    token = secrets.token_hex(16)
    file = folder / f".shared-folder-check-{token}"
    problem = _write_token(folder, file, token) if env.rank == 0 else None
    try:
        if env.world > 1:
            token, problem = _from_rank_zero((token, problem), group)
        if problem is not None:
            raise UsageError(
                f"cannot write to the folder {folder}: {problem}; free space, mend its rights, or name "
                "another one"
            )
        if env.world == 1:
            return
        seen = env.rank == 0 or _sees(folder / f".shared-folder-check-{token}", token, patience)
        blind = [
            f"{rank} (on {host})"
            for rank, host, ok in _gather((env.rank, socket.gethostname(), seen), group)
            if not ok
        ]
    finally:
        if env.rank == 0:
            with contextlib.suppress(OSError):
                file.unlink()
    if blind:
        raise UsageError(
            f"the folder {folder} is not the same for all ranks: rank 0 wrote a file there that rank "
            f"{', '.join(blind)} cannot see. Name a folder on a file system that every machine mounts at "
            "this path (checkpoint.dir, run.dir)"
        )


def _write_token(folder: Path, file: Path, token: str) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _sees(file: Path, token: str, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _from_rank_zero(value: tuple[str, str | None], group: dist.ProcessGroup | None) -> tuple[str, str | None]:
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return box[0]


def _gather(value: tuple[int, str, bool], group: dist.ProcessGroup | None) -> list[tuple[int, str, bool]]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
