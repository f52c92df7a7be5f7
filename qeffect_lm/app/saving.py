"""A run's checkpoints: what is in them, at once or in the background, and what the logs say of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from checkpoint import save_checkpoint
from checkpoint.background import DURABLE, AsyncSaver, SaveEvent
from checkpoint.comm import Communicator, GroupCommunicator
from checkpoint.layout import step_name
from checkpoint.resume import GRAPHS, check_replicas, contract_meta, saved_state
from checkpoint.staging import Staging
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.config import Config
from qeffect_lm.errors import QEffectError
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.events import EventLog
from qeffect_lm.state import LogicalTensor

log = logging.getLogger(__name__)


class Saver:
    """Writes one run's checkpoints; every method but ``news`` is called by all ranks together.

    Args:
        comm: all ranks.
        leads: this rank tells people and logs.
        companions: files that every checkpoint holds as they are (configuration, tokenizer); the leading rank's count.
    """

    def __init__(
        self,
        config: Config,
        assembly: Assembly,
        mesh: Mesh,
        comm: Communicator,
        leads: bool,
        companions: Mapping[str, bytes] | None = None,
    ) -> None:
        self._config, self._assembly, self._mesh, self._comm, self._leads = config, assembly, mesh, comm, leads
        self._companions = companions
        self._lock = threading.Lock()
        self._news: dict[str, float] = {}
        self._waited = 0.0  # of the copies' time, what is told already
        self.say: Callable[[str], object] = lambda _: None
        self.events = EventLog(config.run.dir)
        self._saver: AsyncSaver | None = None
        if config.checkpoint.async_save:
            # A group of its own: what the writing thread sends must not meet the loop's messages.
            self._background = comm if comm.world == 1 else GroupCommunicator(dist.new_group(backend="gloo"))
            staging = Staging(assembly.engine.copies)
            staging.reserve(saved_state(assembly, mesh.coords))
            self._saver = AsyncSaver(staging, self._on_event)

    def save(self, step: int, meta: Callable[[dict[str, Any]], dict[str, Any]], settle: Callable[[], object]) -> None:
        """Write ``step_<step>``, or begin to.

        Args:
            meta: makes the checkpoint's meta data from the contract's counters; called on rank 0, now.
            settle: called before the commit, on rank 0: what the meta data speak of is on disk afterwards.

        Raises:
            QEffectError: this save failed, or the one before it in the background; the previous checkpoint survives.
        """
        began = time.monotonic()
        assembly = self._assembly
        assembly.register.check_addresses()
        assembly.require_caches("the checkpoint")
        contract = contract_meta(assembly, self._comm)
        told = {} if contract is None else meta(contract)
        documents = {GRAPHS: "\n".join(assembly.graph_document())}
        items = saved_state(assembly, self._mesh.coords)

        def write(tensors: list[LogicalTensor], comm: Communicator) -> Path:
            check_replicas(tensors, comm, self._mesh)
            if comm.rank == 0:
                settle()
            return save_checkpoint(
                self._config.checkpoint_dir(),
                step,
                tensors,
                told,
                comm,
                self._mesh.coords,
                keep=self._config.checkpoint.keep,
                documents=documents,
                companions=self._companions,
            )

        if self._saver is None:
            path = write(items, self._comm)
            if self._leads:
                size = sum(file.stat().st_size for file in path.iterdir())
                self._note(SaveEvent(DURABLE, step, time.monotonic() - began, size))
        else:
            self._saver.save(step, items, lambda tensors: write(tensors, self._background))
        self._add("checkpoint_stall_ms", 1000 * (time.monotonic() - began))

    @property
    def failed(self) -> bool:
        """A save in the background failed on this rank; :meth:`finish` says why."""
        return self._saver is not None and self._saver.failed

    def finish(self) -> None:
        """Wait for what is still being written. Raises the error of a save that failed, once."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """At the end of a run that failed: as :meth:`finish`, but another error is on its way already."""
        try:
            self.finish()
        except QEffectError as error:
            log.error("%s", error)

    def news(self) -> dict[str, float]:
        """What happened since the last call, for the next step's metrics: ``checkpoint_stall_ms`` (the loop's time, its
        optimizer's wait for copies included) and, of saves in the background, ``checkpoint_durable_ms`` (from the request on)
        and ``checkpoint_bytes``."""
        waited, self._waited = self._assembly.engine.copies.waited - self._waited, self._assembly.engine.copies.waited
        if waited:
            self._add("checkpoint_stall_ms", 1000 * waited)
        with self._lock:
            news, self._news = self._news, {}
        return news

    def _add(self, name: str, value: float) -> None:
        with self._lock:
            self._news[name] = self._news.get(name, 0) + value

    def _on_event(self, event: SaveEvent) -> None:
        if not self._leads:
            return
        if event.what == DURABLE:
            self._add("checkpoint_durable_ms", 1000 * event.seconds)
            self._add("checkpoint_bytes", event.nbytes)
        self.say(str(event))
        self._note(event)

    def _note(self, event: SaveEvent) -> None:
        """One line of the run's events."""
        told: dict[str, Any] = {"seconds": event.seconds, "bytes": event.nbytes, "text": event.text, "other": event.other}
        if event.what == DURABLE:
            told["path"] = str(self._config.checkpoint_dir() / step_name(event.step))
        self.events.add(f"save_{event.what}", event.step, **told)
