"""Whole runs on placements with several chunks: resume on another schedule, generate, dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint import compare, step_name
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import resident_bytes
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.sampling import Sampling
from qeffect_lm.parallel.mesh import Mesh
from tests.runs import CONFIG, checkpoint_of, metrics_of, run_here, write_config
from tests.tiny import config
from tests.unit.in_process import Ranks

PLAIN = ("pipeline.w_delay=0", "graphs.backend=eager", "train.steps=6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("schedules")
    write_config(path, CONFIG.replace("{steps: 12}", "{steps: 6}"))
    assert run_here(path, "whole", *PLAIN, "pipeline.schedule=gpipe")[0] == 0
    return path


def rows(folder: Path, name: str, after: int = 0) -> list[tuple[int, float | None, float | None]]:
    return [(m.step, m.loss, m.grad_norm) for m in metrics_of(folder, name) if m.step > after]


def test_resumed_on_other_schedules(folder):
    """Both arms of a V on one rank, then three chunks, then auto: each from the other's checkpoint, to the bits of one run."""
    before = None
    for name, start, schedule in (("v", 0, "zb-v"), ("three", 2, "interleaved-1f1b"), ("made", 4, "auto")):
        more = ["pipeline.chunks=3"] if schedule == "interleaved-1f1b" else []
        if before is not None:
            more.append(f"checkpoint.resume={folder / before / 'checkpoints' / step_name(start)}")
        code, said = run_here(folder, name, *PLAIN, f"pipeline.schedule={schedule}", "checkpoint.every=2", *more)
        assert code == 0 and (start == 0 or any("graphs captured anew" in line for line in said)), said
        assert checkpoint_of(folder, name).meta["schedule"] == schedule
        assert rows(folder, name) == rows(folder, "whole", start)
        before = name
    last = compare(checkpoint_of(folder, "whole"), checkpoint_of(folder, "made"), meta_keys=["tokens", "data", "step"])
    assert not last.different and not last.meta and len(last.equal) > 100


def test_text_from_a_checkpoint_of_a_v(folder):
    """Generation runs the whole model on one process, whatever its chunks were."""
    assert run_here(folder, "text", *PLAIN, "pipeline.schedule=zb-v")[0] == 0
    loaded = [load_for_inference(folder / name) for name in ("text", "whole")]
    assert loaded[0].checkpoint.step == 6 and len(loaded[0].model.blocks) == loaded[0].config.model.num_layers + 3
    made = [list(Generator(one.model, Sampling(temperature=0)).run([[1, 2, 3]], 6)) for one in loaded]
    assert made[0] == made[1] and len(made[0]) == 6


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-1f1b", "auto"])
def test_dry_run(schedule):
    """Layers per chunk, the plan's picture and memory per rank, where a rank holds several chunks; auto says what it chose."""
    text = describe(config(parallel__pp=2, pipeline={"schedule": schedule, "microbatches": 3}))
    if schedule == "auto":
        assert "auto: chose " in text and "auto: training measures again" in text and "predicted bubble" in text
    else:
        assert "decoder layers per chunk [1, 1, 1, 1]" in text and f"{schedule}: 4 chunks on 2 ranks" in text
    table = text[text.index("memory per pipeline rank") :].splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["0", "1"] and all(float(line.split()[-1]) > 0 for line in table[2:4])


def test_dry_run_shows_who_owns_what():
    """With shared optimizer state: the buckets of the run itself, and the memory of the replica that owns most."""
    shared = {"parallel__dp": 2, "optim__zero": 1, "parallel__bucket_mib": 0.02, "precision__dtype": "bfloat16"}
    settings = config(**shared)
    text = describe(settings)
    assembly = assemble(settings, Mesh({"dp": 2}, 0))
    assert assembly.flat.buckets.table() in text and "buckets of pipeline rank 0" in text
    assert "buckets of" not in describe(config(parallel__dp=2))

    def optimizer(page: str) -> float:
        return float(page[page.index("memory per pipeline rank") :].splitlines()[2].split()[3])

    assert optimizer(text) < 0.7 * optimizer(describe(config(precision__dtype="bfloat16")))


@pytest.mark.parametrize(
    "layout",
    [
        {"parallel__dp": 2, "optim__zero": 1, "parallel__bucket_mib": 0.02},
        {"parallel__pp": 2, "model__tie_word_embeddings": True, "precision__main_grads": "bfloat16"},
    ],
    ids=["shared out", "tied"],
)
def test_dry_run_counts_what_a_run_allocates(layout, monkeypatch):
    """Caches to the byte, without layers kept out of FP8; gradients with what they are received in, but for the padding: less
    than 128 elements (256 bytes in bfloat16) for each parameter."""
    settings = config(**layout, precision__dtype="bfloat16", precision__fp8__high_precision_first=1)
    ranks = Ranks(settings, monkeypatch)
    told = [resident_bytes(Layout(settings), part.plan, part.mesh.coord("pp"), "cpu") for part in ranks.parts]
    received = []
    for part, numbers in zip(ranks.parts, told, strict=True):
        assert numbers["FP8 weight caches"] == sum(t.nbytes for _, t in part.cache.tensors() if t.dim()) > 0
        exchange, tied = part.engine.end._exchange, part.engine.end.tied
        received.append(sum(t.nbytes for t in ([exchange.received] if exchange else tied.received.values())))
    assert max(received) > 0
    shared = settings.optim.zero  # every replica is told of the one with the largest buffer
    for part, numbers, mine in zip(ranks.parts, told, received, strict=True):
        flat = part.flat
        grads = flat.grad_buffer.nbytes + sum(t.nbytes for t in flat.tied_grad_buffers.values())
        padding = grads + (max(received) if shared else mine) - numbers["main gradients"]
        assert 0 <= padding < 512 * len(flat.names)
