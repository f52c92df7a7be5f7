"""Logging to wandb with the real client, offline: what is in its files after crash and resume (case D5)."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.runtime.wandb_logger import WandbLogger

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "x_save_requirements": False}


def _metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step, 1.0 / step, 0.5, 1e-3, 100 * step, 1e4, 12.5, scale_epoch=step, skipped=step == 7
    )


def _records(path: Path) -> Iterator[Any]:
    """The protobuf records of a run file: LevelDB's log format, blocks of 32 KiB, after a header of 7
    bytes."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if kind == 0:
            return
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            message = internal.Record()
            message.ParseFromString(record)
            record = b""
            yield message


def _history(path: Path) -> list[dict[str, Any]]:
    rows = [record.history.item for record in _records(path) if record.WhichOneof("record_type") == "history"]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows
    ]


def _run_file(logger: WandbLogger) -> Path:
    assert logger.directory is not None
    (path,) = logger.directory.glob("*.wandb")
    return path


def _run_child(script: str, folder: Path, *arguments: str) -> int:
    """Run a script in a process of its own, with this test's helpers."""
    header = (
        "import json, os, shutil, signal, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from qeffect_lm.runtime.metrics import StepMetrics\n"
        "from qeffect_lm.runtime.wandb_logger import WandbLogger\n"
        f"QUICK = {QUICK!r}\n"
        f"{inspect.getsource(_metrics)}\n"
    )
    command = [sys.executable, "-c", header + script, str(folder), *arguments]
    return subprocess.run(command, timeout=60, cwd=folder).returncode


KILLED = """
logger = WandbLogger("offline", project="p", directory=sys.argv[1], name="n", group="mine", settings=QUICK)
for step in range(1, 6):
    logger.log(_metrics(step))
state = logger.state()
shutil.copy(next(logger.directory.glob("*.wandb")), "at_5.wandb")
open("state.json", "w").write(json.dumps(state))
for step in range(6, 9):
    logger.log(_metrics(step))
open("state8.json", "w").write(json.dumps([logger.state(), str(logger.directory)]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_crash_at_8_and_resume_at_5(tmp_path: Path) -> None:
    """D5: saved at 5, logged to 8, killed, resumed at 5: 6 to 8 are there twice, under our own step, none
    lost."""
    pytest.importorskip("wandb")
    assert _run_child(KILLED, tmp_path) == -signal.SIGKILL
    (tmp_path / "wandb").joinpath("latest-run").unlink(missing_ok=True)
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["group"], state["segment"], state["last_step"]) == ("mine", 0, 5)
    rows = _history(tmp_path / "at_5.wandb")
    assert [row["global_step"] for row in rows] == list(range(1, 6)), "the state speaks of rows on disk"
    _, first_directory = json.loads((tmp_path / "state8.json").read_text())
    (first,) = Path(first_directory).glob("*.wandb")
    rows = _history(first)
    assert [row["global_step"] for row in rows] == list(range(1, 9)), "a kill loses nothing that was logged"
    assert all(row["segment"] == 0 for row in rows)

    random_states = random.getstate(), torch.get_rng_state()
    arguments: dict[str, Any] = {"project": "p", "directory": tmp_path, "name": "n", "settings": QUICK}
    logger = WandbLogger("offline", resumed=state, resume_step=5, **arguments)
    assert logger.state()["last_step"] == 5  # type: ignore[index]
    for step in range(6, 11):
        logger.log(_metrics(step))
    resumed = logger.state()
    logger.finish()
    assert random.getstate() == random_states[0] and torch.equal(torch.get_rng_state(), random_states[1])
    assert resumed == state | {"run_id": resumed["run_id"], "segment": 1, "last_step": 10}  # type: ignore[index]
    assert resumed["run_id"] != state["run_id"]  # type: ignore[index]
    rows = _history(_run_file(logger))
    assert [row["global_step"] for row in rows] == list(range(6, 11))
    assert all(row["segment"] == 1 for row in rows)
    assert rows[1]["skipped"] == 1 and rows[1]["loss"] == pytest.approx(1 / 7) and rows[1]["scale_epoch"] == 7
    runs = [record.run for record in _records(_run_file(logger)) if record.WhichOneof("record_type") == "run"]
    assert runs[0].run_group == "mine" and runs[0].project == "p"
    defined = [
        record.metric
        for record in _records(_run_file(logger))
        if record.WhichOneof("record_type") == "metric"
    ]
    assert any(metric.glob_name == "*" and metric.step_metric == "global_step" for metric in defined)

    # Resumed from the same checkpoint once more, though a segment 1 exists: the new one is told apart.
    third = WandbLogger("offline", resumed=state, resume_step=5, **arguments)
    third.finish()
    assert third.state()["segment"] == 2  # type: ignore[index]


def test_steps_that_go_back_are_kept_within_one_run(tmp_path: Path) -> None:
    """D5: where one run continues (online), rows whose step goes back are kept too."""
    pytest.importorskip("wandb")
    logger = WandbLogger("offline", project="p", directory=tmp_path, settings=QUICK)
    for step in (5, 6, 7, 8, 6, 7, 8, 9):
        logger.log(_metrics(step))
    logger.finish()
    logger.finish()
    logger.log(_metrics(10))
    assert [row["global_step"] for row in _history(_run_file(logger))] == [5, 6, 7, 8, 6, 7, 8, 9]


NO_NETWORK = """
import socket
def refuse(*arguments, **named):
    open("lookups", "a").write(repr(arguments))
    raise OSError("no network")
socket.getaddrinfo = refuse
url = "http://127.0.0.1:" + sys.argv[2]
logger = WandbLogger("offline", project="p", directory=sys.argv[1], settings={**QUICK, "base_url": url})
logger.log(_metrics(1))
logger.finish()
"""


def test_offline_contacts_nobody(tmp_path: Path) -> None:
    """Neither the Python client nor its service process connects to the server or resolves a name."""
    pytest.importorskip("wandb")
    connections: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connections.append(server.accept())
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        assert _run_child(NO_NETWORK, tmp_path, str(server.getsockname()[1])) == 0
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert not connections and not (tmp_path / "lookups").exists()


def test_online_without_login_or_server(tmp_path: Path) -> None:
    """No login, no server: the run is logged offline and says so once, with what to do."""
    wandb = pytest.importorskip("wandb")
    notices: list[str] = []
    nowhere = QUICK | {
        "base_url": "http://127.0.0.1:9",
        "init_timeout": 1.0,
        "settings_system": str(tmp_path / "none"),
    }
    arguments: dict[str, Any] = {"project": "p", "directory": tmp_path, "notice": notices.append}

    def init(**kwargs: Any) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    real = wandb.init
    for why in ("no login", "no connection"):
        notices.clear()
        settings = nowhere | ({"api_key": "0" * 40} if why == "no connection" else {})
        with pytest.MonkeyPatch.context() as patch:
            if why == "no login":  # as the client has it where no key is found and it may not ask
                patch.setattr(wandb, "init", lambda **named: (real if named["settings"].mode == "offline" else init)(**named))
            logger = WandbLogger("online", settings=settings, **arguments)
        logger.log(_metrics(1))
        logger.finish()
        (line,) = notices
        assert logger.mode == "offline" and f"wandb: {why} (" in line and "offline instead" in line
        assert ("wandb login" in line) == (why == "no login") and "\n" not in line
        assert [row["global_step"] for row in _history(_run_file(logger))] == [1]


class _StubClient:
    """Takes down how the client is started; stands in where a server would be needed."""

    class Settings:
        model_fields = ("mode", "silent")

        def __init__(self, **settings: Any) -> None:
            vars(self).update(settings)

    errors = types.SimpleNamespace(UsageError=UserWarning, CommError=TimeoutError)

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.broken = False

    def setup(self, settings: Any) -> None:
        pass

    def init(self, **kwargs: Any) -> Any:
        self.started.append(kwargs)
        self.file = Path(kwargs["dir"]) / "run.wandb"
        settings = types.SimpleNamespace(sync_dir=kwargs["dir"], sync_file=str(self.file))
        run = types.SimpleNamespace(url="https://server/run", settings=settings)
        run.log, run.define_metric, run.finish = self._log, lambda *a, **k: None, lambda **k: None
        return run

    def _log(self, row: dict[str, Any]) -> None:
        if self.broken:
            raise RuntimeError("the service died\nlong story")
        self.rows.append(row)
        with self.file.open("a") as file:
            file.write(json.dumps(row))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> _StubClient:
    client = _StubClient()
    monkeypatch.setitem(sys.modules, "wandb", client)  # type: ignore[arg-type]
    return client


def test_online_resume_continues_the_run(stub: _StubClient, tmp_path: Path) -> None:
    """D5: the same id, group and config keys; after a change of mode a new run of the same group."""
    arguments: dict[str, Any] = {"project": "p", "directory": tmp_path, "name": "n"}
    first = WandbLogger("online", **arguments)
    first.log(_metrics(5))
    state = first.state()
    assert state is not None and state["last_step"] == 5 and first.url == "https://server/run"
    said: list[str] = []
    second = WandbLogger("online", resumed=state, resume_step=3, notice=said.append, **arguments)
    assert said == [
        f"wandb: goes on with run {state['run_id']}; steps after 3 that it has already are logged once more, as segment 1"
    ]
    for step in (6, 7):
        second.log(_metrics(step))
    one, two = stub.started
    assert one["id"] == two["id"] == state["run_id"] and one["group"] == two["group"]
    assert one["resume"] == two["resume"] == "allow"
    assert two["config"]["resumed_from_step"] == 3 and "resumed_from_step" not in one["config"]
    assert [(row["global_step"], row["segment"]) for row in stub.rows] == [(5, 0), (6, 1), (7, 1)]
    assert not any("step" in row for row in stub.rows)
    offline = WandbLogger("offline", resumed=second.state(), resume_step=7, notice=said.append, **arguments)
    run = offline.state()["run_id"]  # type: ignore[index]
    assert said[1] == f"wandb: a new run {run} of group {one['group']} begins after step 7; {one['id']} keeps its steps"
    online = WandbLogger("online", resumed=offline.state(), resume_step=7, **arguments)
    three, four = stub.started[2:]
    assert len({run["id"] for run in stub.started}) == 3 and {run["group"] for run in stub.started} == {
        one["group"]
    }
    assert three["resume"] is None and four["resume"] == "allow" and online.state()["segment"] == 3  # type: ignore[index]
    assert offline.url is None


def test_a_failing_client_does_not_stop_training(stub: _StubClient, tmp_path: Path) -> None:
    """One notice that says from which step on rows are missing; no further attempts."""
    notices: list[str] = []
    logger = WandbLogger("offline", project="p", directory=tmp_path, notice=notices.append)
    logger.log(_metrics(1))
    stub.broken = True
    for step in (2, 3):
        logger.log(_metrics(step))
    logger.finish()
    assert len(notices) == 1 and "the service died)" in notices[0] and "steps from 2 on" in notices[0]
    assert logger.state()["last_step"] == 1  # type: ignore[index]


def test_a_client_that_cannot_start_at_all(stub: _StubClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither online nor offline: two lines, and training goes on; what the checkpoint recorded is passed on."""

    def init(**kwargs: Any) -> None:
        raise OSError("no space for its service\nlong story")

    monkeypatch.setattr(stub, "init", init)
    notices: list[str] = []
    resumed = {"run_id": "abc-s0-ffff", "group": "g", "segment": 3, "last_step": 40, "mode": "online"}
    logger = WandbLogger("online", project="p", directory=tmp_path, resumed=resumed, notice=notices.append)
    logger.event({"event": "skip", "step": 1})
    logger.picture("plan", "<svg/>", 0)
    logger.log(_metrics(1))
    logger.finish()
    assert logger.mode == "disabled" and logger.state() == resumed
    assert [line.split("(")[0] for line in notices] == ["wandb: no connection ", "wandb cannot start offline "]


EVENTS = [
    {"event": "start", "step": 0},
    {"event": "save_durable", "step": 3, "path": "checkpoints/step_00000003", "bytes": 5},
    {"event": "save_durable", "step": 2, "path": "checkpoints/step_00000002", "bytes": 5},
    {"event": "skip", "step": 7, "reason": "spike of the loss", "loss": 9.0},
    {"event": "warning", "step": 8, "kind": "amax_jump", "text": "it jumped"},
]


def test_checkpoints_the_plan_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real client: a checkpoint that exists is referred to, file by file, not copied; alerts of skips and warnings."""
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints" / "step_00000003"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("12345")
    logger = WandbLogger("offline", project="p", directory=tmp_path, settings=QUICK)
    logger.picture("plan", "<svg/>", 0)
    for event in EVENTS[:3]:
        logger.event(event)
    logger.log(_metrics(4))
    for event in EVENTS[3:]:
        logger.event(event)
    logger.finish()  # the last events go with no row
    deadline, kinds = time.monotonic() + 20, []
    while "exit" not in kinds and time.monotonic() < deadline:  # the client's file is complete a moment later
        records = list(_records(_run_file(logger)))
        kinds = [record.WhichOneof("record_type") for record in records]
    (artifact,) = (record.artifact for record in records if record.WhichOneof("record_type") == "artifact")
    base = logger.state()["run_id"].split("-s")[0]  # type: ignore[index]
    assert (artifact.name, artifact.type, json.loads(artifact.metadata)) == (
        f"checkpoint-{base}", "checkpoint", {"step": 3, "bytes": 5},
    )  # fmt: skip
    assert "step-3" in artifact.aliases
    (entry,) = artifact.manifest.contents
    assert (entry.path, entry.ref) == ("step_00000003/manifest.json", (folder / "manifest.json").as_uri())
    assert entry.digest != base64.b64encode(hashlib.md5(b"12345").digest()).decode(), "the file was read"
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    assert [(alert.title, alert.text, alert.level) for alert in alerts] == [
        ("step skipped", "step 7 was skipped: spike of the loss (loss 9.0)", "WARN"),
        ("warning: amax_jump", "step 8: it jumped", "WARN"),
    ]
    first = _history(_run_file(logger))[0]
    assert first["global_step"] == 0 and logger.directory is not None
    assert (logger.directory / "files" / first["plan.path"]).read_text() == "<svg/>"


@pytest.mark.parametrize("how", ["disabled", "absent", "folder"])
def test_disabled_and_absent(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabled is silent; a missing client, or only its output folder, is one line. The saved state is
    passed on."""
    module = types.ModuleType("wandb") if how == "folder" else None
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    notices: list[str] = []
    resumed = {"run_id": "abc-s0-ffff", "group": "g", "segment": 3, "last_step": 40, "mode": "offline"}
    mode = "disabled" if how == "disabled" else "offline"
    logger = WandbLogger(
        mode, project="p", directory=tmp_path / "new", resumed=resumed, notice=notices.append
    )
    logger.log(_metrics(1))
    logger.finish()
    assert logger.mode == "disabled" and logger.directory is None and logger.state() == resumed
    assert not (tmp_path / "new").exists()
    if how == "disabled":
        assert not notices
    else:
        (line,) = notices
        assert "not installed" in line and "qeffect-lm[wandb]" in line and "\n" not in line
    assert WandbLogger(mode, project="p", directory=tmp_path, notice=notices.append).state() is None


def test_unknown_mode(tmp_path: Path) -> None:
    """A usage error that names the key and the choices."""
    with pytest.raises(UsageError, match="logging.wandb.*disabled, offline, online"):
        WandbLogger("on", project="p", directory=tmp_path)
