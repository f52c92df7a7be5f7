"""What a run is made of, told once at its start: versions of packages, the state of our sources, the device."""

from __future__ import annotations

import platform
import resource
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from qeffect_lm import __version__
from qeffect_lm.runtime.gpu_memory import reserved

PACKAGES = (
    "torch", "numpy", "triton", "pydantic", "safetensors", "sentencepiece", "transformer-engine", "nvidia-cudnn-frontend",
    "wandb", "tensorboardX",
)  # fmt: skip
SECONDS = 5.0  # that git may take


def versions() -> dict[str, str]:
    """Python and the packages that are installed, ours first."""
    found = {"qeffect-lm": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """``commit`` and ``dirty`` (tracked files differ from it) of the sources that run, or of ``folder``'s.

    None where they are no git checkout (an installed package, also one that lies within somebody's checkout), or without git.
    """
    folder = folder or Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()

    try:
        if not git("ls-files", "--", "."):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """What this process holds now: of a GPU all that torch has reserved there (graphs' pools too), else its resident memory."""
    if device.type == "cuda":
        return reserved(device)
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
