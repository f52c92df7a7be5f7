"""What every report begins with, and where it goes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from qeffect_lm import __version__
from tools.common import ROOT


def say(text: str) -> None:
    """A line on the terminal, at once."""
    print(text, flush=True)


def deterministic() -> None:
    """What training sets before torch is imported, and after, with one thread."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)


def write(report: dict[str, Any], path: Path | None) -> None:
    """The figures as JSON, if a file was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def header(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """What a report begins with: what ran, how to run it again, on what."""
    import torch

    return {
        "benchmark": arguments.what,
        "command": arguments.command,
        "qeffect_lm": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }


def commit() -> str:
    """The commit of the source tree, of a repository or of an archive made from one; else "unknown"."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    archived = ROOT / ".git_archival.txt"  # git fills it in when it writes an archive of the tree
    text = archived.read_text().strip() if archived.exists() else ""
    return text.removeprefix("node: ") if re.fullmatch(r"node: [0-9a-f]{40,64}", text) else "unknown"
