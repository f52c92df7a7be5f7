"""Checkpoints: the directory format, writing it atomically, and the one ordered restore.

``save_checkpoint`` and ``load_into`` move lists of :class:`qeffect_lm.state.LogicalTensor` to disk and back;
``find_resumable`` says where to go on; ``compare`` tells two checkpoints apart. docs/checkpoints.md describes
the format.
"""

from __future__ import annotations

from checkpoint.comm import Communicator, GroupCommunicator, SingleProcess
from checkpoint.compare import Comparison, Difference, MetaDifference, compare
from checkpoint.fileops import FileOps
from checkpoint.layout import CheckpointError, step_name
from checkpoint.load import load_into
from checkpoint.manifest import FORMAT, Manifest
from checkpoint.reader import Checkpoint, Problem, open_checkpoint, verify_checkpoint
from checkpoint.retention import Found, find_resumable, resolve, scan
from checkpoint.writer import rewrite_checkpoint, save_checkpoint

__all__ = [
    "FORMAT",
    "Checkpoint",
    "CheckpointError",
    "Communicator",
    "Comparison",
    "Difference",
    "FileOps",
    "Found",
    "GroupCommunicator",
    "Manifest",
    "MetaDifference",
    "Problem",
    "SingleProcess",
    "compare",
    "find_resumable",
    "load_into",
    "open_checkpoint",
    "resolve",
    "rewrite_checkpoint",
    "save_checkpoint",
    "scan",
    "step_name",
    "verify_checkpoint",
]
