"""Train a language model: ``python train.py CONFIG.yaml [section.key=value ...]``, or under torchrun or srun."""

from __future__ import annotations

import os
import sys

from qeffect_lm.app.main import leave
from qeffect_lm.app.main import main as run


def main() -> None:
    """Entry of the console script ``qeffect-train`` too."""
    leave(run(sys.argv[1:], os.environ), os.environ)


if __name__ == "__main__":
    main()
