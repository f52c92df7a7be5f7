"""Metrics to TensorBoard's event files in ``run.dir/tensorboard``, where the ``tensorboard`` extra is installed.

Every process of a run writes a file of its own. One that resumes after step 5 tells TensorBoard so, which then shows the rows
of 6 and later that an earlier process wrote no more (they stay in its file).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qeffect_lm.runtime.metrics import StepMetrics

FOLDER = "tensorboard"


class _Records:
    """A TFRecord file whose records are with the operating system when :meth:`write_event` returns.

    The package's own writers either hold rows back, with a thread, or wait for the disk (fsync) at each: milliseconds of the
    training loop. ``checksum`` is the package's masked CRC-32C.
    """

    def __init__(self, path: Path, checksum: Callable[[bytes], int]) -> None:
        self._file, self._checksum = open(path, "ab", buffering=0), checksum

    def write_event(self, event: Any) -> None:
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checks = (struct.pack("<I", self._checksum(part)) for part in (length, data))
        record = memoryview(length + next(checks) + data + next(checks))
        while record:
            record = record[self._file.write(record) :]

    def close(self) -> None:
        self._file.close()


class TensorboardLogger:
    """Logs :class:`StepMetrics`. Make one on the one rank that logs.

    Args:
        folder: the run's folder.
        config: shown as a text.
        resume_step: the step a resumed run continues after; None for a fresh one.
        notice: gets one-line messages for the user.

    Without the package, or where its file cannot be written, it says so once and logs nothing.
    """

    def __init__(
        self,
        enabled: bool,
        folder: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        notice: Callable[[str], None] = print,
    ) -> None:
        self._notice = notice
        self._writer: Any = None
        if not enabled:
            return
        try:
            from tensorboardX import summary
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import masked_crc32c
        except ImportError as error:
            why = "is not installed" if error.name == "tensorboardX" else f"cannot be imported ({error})"
            notice(
                f"tensorboardX {why}: metrics go to metrics.jsonl only. Install it (pip install 'qeffect-lm[tensorboard]') or "
                "set logging.tensorboard=false"
            )
            return
        self._event, self._summary, self._text = event_pb2, summary_pb2.Summary, summary.text
        path = Path(folder) / FOLDER
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Process id and step tell files apart that begin within one second.
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{resume_step or 0}"
            self._writer = _Records(path / name, masked_crc32c)
            self._writer.write_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        except OSError as error:
            notice(f"TensorBoard: cannot write to {path} ({error.strerror}); metrics go to metrics.jsonl only")
            return
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(resume_step + 1, session_log=start)
        if config is not None:
            text = "\n".join(f"    {line}" for line in json.dumps(config, indent=1, default=str).splitlines())
            self._add(resume_step or 0, summary=self._text("config", text))

    def log(self, metrics: StepMetrics) -> None:
        """Every number of a step, a list as ``name/0``, ``name/1``, … . A failing writer is given up with a notice."""
        if self._writer is None:
            return
        values = []
        for key, value in metrics.as_dict().items():
            told = {f"{key}/{rank}": one for rank, one in enumerate(value)} if isinstance(value, list) else {key: value}
            values += [
                self._summary.Value(tag=name, simple_value=float(one))
                for name, one in told.items()
                if isinstance(one, (int, float)) and key != "step"
            ]
        self._add(metrics.step, summary=self._summary(value=values))

    def event(self, event: Mapping[str, Any]) -> None:
        """Warnings and skipped steps, as text; from any thread."""
        if self._writer is not None and event["event"] in ("skip", "warning"):
            said = event.get("text") or f"skipped: {event.get('reason')}"
            self._add(event["step"], summary=self._text(event["event"], said))

    def finish(self) -> None:
        """Close the file; twice is fine."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, step: int, **what: Any) -> None:
        """One record, handed to the operating system at once."""
        writer = self._writer
        if writer is None:
            return
        try:
            writer.write_event(self._event.Event(wall_time=time.time(), step=step, **what))
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._notice(f"TensorBoard: logging failed ({said}); steps from {step} on are in metrics.jsonl only")
            self._writer = None
