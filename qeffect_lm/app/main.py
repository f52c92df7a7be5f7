"""The command line of ``train.py`` and ``qeffect-train``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from qeffect_lm import __version__
from qeffect_lm.config import Config, help_text, load_config
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.apex_probe import probe_apex
from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch
from qeffect_lm.runtime.install_check import check_installation
from qeffect_lm.runtime.launch import LaunchEnv, StopSignals


def parser(program: str = "train.py") -> argparse.ArgumentParser:
    """The options, under the name it was started by."""
    made = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} CONFIG.yaml [section.key=value ...] [--dry-run [--gradients]]",
        description="Train a language model as CONFIG.yaml says. Launch several ranks with torchrun, or with srun "
        "(ranks and master from SLURM_*).",
        epilog=help_text(100),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("config", metavar="CONFIG.yaml", help="YAML configuration; it may inherit another by `base: other.yaml`")
    made.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="override single keys")
    made.add_argument("--dry-run", action="store_true", help="print what would run (config, plan, memory) and train nothing")
    made.add_argument("--gradients", action="store_true", help="with --dry-run: print where every main gradient lies, too")
    made.add_argument(
        "--accept-new-graphs", action="store_true", help="resume although captured graphs differ from the checkpoint's"
    )
    made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    made.add_argument("--version", action="version", version=f"qeffect-lm {__version__}")
    return made


def main(argv: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run the command; returns the exit code. ``environ`` is the process environment (determinism variables are set in it)."""
    program = "qeffect-train" if Path(sys.argv[0]).stem == "qeffect-train" else "train.py"
    arguments = parser(program).parse_intermixed_args(argv)
    rank = environ.get("RANK") or environ.get("SLURM_PROCID") or ""
    try:
        check_installation()
        return _run(arguments, environ)
    except QEffectError as error:
        _report(error, rank, arguments.traceback)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        hint = "run `make venv` once, then use .venv/bin/python (or `source .venv/bin/activate`)"
        missing = QEffectError(f"the package {error.name!r} is not installed for {sys.executable}: {hint}")
        _report(missing, rank, arguments.traceback)
        return 1
    except OSError as error:
        _report(QEffectError(f"{error.strerror or error}: {error.filename or 'no file named'}"), rank, arguments.traceback)
        return 1
    except Exception as error:
        _report(error, rank, arguments.traceback)
        return 1


def _run(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    if arguments.gradients and not arguments.dry_run:
        raise UsageError("--gradients prints with --dry-run only: add that, or leave it out")
    accept = ["checkpoint.accept_new_graphs=true"] if arguments.accept_new_graphs else []
    config: Config = load_config(arguments.config, [*arguments.overrides, *accept])
    apply_before_torch(environ, threads=config.train.threads)
    env = LaunchEnv.from_mapping(environ)
    apply_to_torch(threads=config.train.threads)
    apex = probe_apex()
    if apex.kind == "unrelated" and env.rank == 0:
        print(f"note: {apex.message}", file=sys.stderr)
    if arguments.dry_run:
        from qeffect_lm.app.dry_run import describe

        if env.rank == 0:
            print(describe(config, arguments.gradients))
        return 0
    from qeffect_lm.app.run import train_run

    with StopSignals() as signals:
        return train_run(config, env, lambda text: print(text, flush=True), signals)


def _report(error: BaseException, rank: str, show_traceback: bool) -> None:
    where = f" (rank {rank})" if rank else ""
    kind = "" if isinstance(error, QEffectError) else f"{type(error).__name__}: "
    print(f"error{where}: {kind}{error}", file=sys.stderr, flush=True)
    if show_traceback:
        traceback.print_exception(error)
    elif not isinstance(error, QEffectError):
        print("(unexpected; run again with --traceback to see where)", file=sys.stderr, flush=True)


def leave(code: int, environ: Mapping[str, str]) -> None:
    """End the process. After a failure among several ranks at once: background threads of a broken group must not keep it."""
    for signum in StopSignals.SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # a late repeat must not replace the exit code
    sys.stdout.flush()
    sys.stderr.flush()
    if code and int(environ.get("WORLD_SIZE") or environ.get("SLURM_NTASKS") or 1) > 1:
        os._exit(code)
    sys.exit(code)
