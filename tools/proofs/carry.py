"""``python -m tools.proofs.carry CONFIG KEY=VALUE …``: resume in the configuration's layout, and save at once.

``checkpoint.resume`` says from what. The launcher's variables say which rank this is. What is saved has been
through the layout's own storages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from checkpoint import open_checkpoint, resolve
from qeffect_lm.app.run import build, join
from qeffect_lm.app.saving import Saver
from qeffect_lm.config import load_config
from qeffect_lm.runtime.launch import LaunchEnv, init_process_group
from tools.common import run_tool


def carry(arguments: Sequence[str]) -> int:
    """One rank's part; all ranks of the layout call it."""
    config = load_config(Path(arguments[0]), arguments[1:])
    env = LaunchEnv.from_mapping(os.environ)
    with ExitStack() as stack:
        if init_process_group(env, "gloo", config.launch.timeout_seconds):
            stack.callback(dist.destroy_process_group)  # a group that outlives the interpreter may end in an abort
        mesh, comm = join(config, env)
        checkpoint = open_checkpoint(resolve(Path(config.checkpoint.resume)))
        run = build(config, env, mesh, comm, checkpoint, lambda line: print(line) if env.rank == 0 else None)
        stack.callback(run.assembly.release)
        stack.callback(run.loader.close)
        run.saver = Saver(config, run.assembly, mesh, comm, run.leads, run.companions)
        run.save(run.start, run.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(lambda: carry(sys.argv[1:]), False))
