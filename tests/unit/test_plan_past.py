"""Planning past one machine: links, rates, a device's file, exchanges, sweeps over five axes, and what they refuse."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.ceilings import ceilings
from qeffect_lm.app.clock import CP, EP, GRADIENTS, PARAMETERS, PP, TP, Clock
from qeffect_lm.app.forecast import timed
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.links import Line, Links
from qeffect_lm.app.rates import Products
from qeffect_lm.app.rehearsal import rehearse
from qeffect_lm.app.sweep import Limits, batch_sequences, choices, impossible
from qeffect_lm.config import Config, load_config
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.parallel.tensor import Exchange

CONFIGS = Path(__file__).resolve().parents[2] / "models/configs"
DENSE, MOE = CONFIGS / "llama3.1-8b.yaml", CONFIGS / "moe-16x4b.yaml"
LINKS = Links(link_gb_s=400, network_gb_s=50, gpus_per_node=8, launch_us=10, link_hop_us=1, network_hop_us=5)


def sizes(**axes: int) -> dict[str, int]:
    return {axis: axes.get(axis, 1) for axis in ("pp", "dp", "ep", "cp", "tp")}


def test_which_ranks_share_a_node() -> None:
    """By the mesh's order: tp beside each other, then cp, ep, dp and stages."""
    layout = sizes(pp=2, dp=4, ep=4, cp=2, tp=4)
    assert LINKS.line(layout, "tp") == Line(4, 1, 4) and LINKS.line(layout, "tokens") == Line(8, 1, 8)
    assert LINKS.line(layout, "cp") == Line(2, 1, 2) and LINKS.line(layout, "ep") == Line(4, 4, 1)
    assert LINKS.line(layout, "experts") == Line(16, 4, 4) and LINKS.line(layout, "replicas") == Line(8, 4, 2)


def test_seconds_of_exchanges() -> None:
    """By hand: a ring's share over the slower link, where each of a node's ranks has an adapter; twice for a sum on all."""
    inside, across, mixed = Line(4, 1, 4), Line(4, 4, 1), Line(16, 4, 4)
    assert LINKS.gather(inside, 8e9) == pytest.approx(13e-6 + 6e9 / 400e9)
    assert LINKS.gather(across, 8e9) == pytest.approx(20e-6 + 6e9 / 50e9)
    assert LINKS.gather(mixed, 8e9) == pytest.approx(23e-6 + 7.5e9 / 200e9)
    assert LINKS.all_reduce(inside, 8e9) == pytest.approx(16e-6 + 2 * 6e9 / 400e9)
    assert LINKS.all_to_all(mixed, 8e9) == pytest.approx(15e-6 + 6e9 / 50e9)
    assert LINKS.all_to_all(inside, 8e9) == pytest.approx(11e-6 + 6e9 / 400e9)
    assert LINKS.gather(Line(1), 8e9) == LINKS.all_reduce(Line(1), 8e9) == LINKS.all_to_all(Line(1), 8e9) == 0
    assert LINKS.message(4e9, True) == pytest.approx(10e-6 + 0.01) and LINKS.message(4e9, False) == pytest.approx(10e-6 + 0.08)


def test_products_between_measured_ones() -> None:
    """Linear between points of the grid, the edge's rate outside; narrow products of the H200 are slower than wide ones."""
    grid = {"tokens": [10, 20], "out": [100], "in": [1000], **dict.fromkeys("FIW", [[[2.0]], [[6.0]]])}
    table = Products.of(grid)
    assert [table.seconds("F", tokens, 100, 1000) for tokens in (10, 15, 20, 40, 5)] == pytest.approx(
        [2e-6, 4e-6, 6e-6, 12e-6, 1e-6]
    )
    assert table.seconds("W", 20, 50, 3000) == pytest.approx(6e-6 * 0.5 * 3)
    fp8 = ceilings("h200").products["fp8"]
    whole, eighth = (fp8.seconds("F", 512, width, 8192) for width in (8192, 1024))
    assert 1.5 * whole / 8 < eighth < whole / 2


def test_the_seven_measured_shapes() -> None:
    """Layers by themselves, of the record that launches and touches were fitted to: within 8 %."""
    from tools.benchmarks.layers import SHAPES, Size

    record = json.loads((CONFIGS.parents[1] / "docs/measurements/layers-h200.json").read_text(encoding="utf-8"))
    took = {(row["hidden"], row["tokens"]): row["ms"] for row in record["rows"] if row["row"] == "native graphs"}
    device = ceilings("h200")
    for shape in SHAPES:
        config = Size(*shape).config("native", "cuda_graphs")
        layout = Layout(config)
        clock = Clock(layout, rehearse(config, "cuda"), device, None)
        layer = next(block for block in layout.blocks if block.layer == 0)
        assert 16e3 * sum(clock._layer(layer).times) == pytest.approx(took[shape], rel=0.085), shape


def exposed(path: Path, *overrides: str, **constants: float) -> tuple[Config, dict[str, float], float]:
    """Seconds of a step that are exchanges."""
    config = load_config(path, ["pipeline.microbatches=4", "parallel.pp=1", "parallel.ep=1", *overrides])
    device = replace(ceilings("h200"), **constants)  # type: ignore[arg-type]
    clock = Clock(Layout(config), rehearse(config, "cuda"), device, None)
    seen = timed(config, make_plan(config), (), clock, make_plan(config))
    return config, dict(seen.exposed), seen.seconds or 0.0


def test_exchanges_by_kind() -> None:
    """Each axis has its own, counted by hand where that is short; all of a step's exchanges fit into the step."""
    none = exposed(DENSE)[1]
    assert none == {}
    config, found, _ = exposed(DENSE, "parallel.tp=2")
    whole = 4096 * 4096 * 2
    once, in_fp8 = 11e-6 + whole / 2 / 400e9, 11e-6 + whole / 4 / 400e9
    layers, microbatches = 32, 4
    # A layer gathers and sums twice in F and in I; the embedding sums and gathers, the head gathers (and the loss) and sums.
    assert found == {TP: pytest.approx(microbatches * (layers * 4 * (once + in_fp8) + 4 * once + 11e-6))}
    keys = 2 * 4096 * 8 * 128
    _, found, _ = exposed(DENSE, "parallel.cp=2")
    of_layer = 2 * (11e-6 + keys * 2 / 2 / 400e9) + 11e-6 + keys * 4 / 2 / 400e9
    assert found[CP] == pytest.approx(microbatches * layers * of_layer) and found[GRADIENTS] > 0
    config, found, seconds = exposed(MOE, "parallel.ep=8", "parallel.dp=2", "optim.zero=1")
    assert found.keys() == {EP, GRADIENTS, PARAMETERS} and sum(found.values()) < seconds
    padded = 8 * 4096 * 2 * 4096 * 2  # two experts a rank: every rank could send each of eight all of its tokens, twice
    rows, small = 11e-6 + padded * 7 / 8 / 400e9, 11e-6
    assert found[EP] == pytest.approx(microbatches * layers * (4 * rows + 3 * small))
    exact = exposed(MOE, "parallel.ep=8", "graphs.backend=eager")[1][EP]
    assert exact == pytest.approx(microbatches * layers * (4 * (11e-6 + padded / 8 * 7 / 8 / 400e9) + 3 * small))


LAYERS: dict[str, list[str]] = {
    "FP8": [],
    "BF16": ["precision.fp8.recipe=none"],
    "FP8 float32": ["precision.dtype=float32"],
    "FP8, full": ["model.recompute=full"],
    "FP8, selective": ["model.recompute=selective"],
    "BF16, selective": ["model.recompute=selective", "precision.fp8.recipe=none"],
    "FP8, selective, dropout": ["model.recompute=selective", "model.dropout=0.1"],
    "FP8, all tokens": ["parallel.sequence_parallel=false"],
    "FP8, all tokens, full": ["parallel.sequence_parallel=false", "model.recompute=full"],
    "BF16, full": ["model.recompute=full", "precision.fp8.recipe=none"],
    "FP8, joined": ["pipeline.coalesce_w=2", "model.recompute=full"],
    "FP8, joined, selective": ["pipeline.coalesce_w=2", "model.recompute=selective"],
    "FP8, joined, selective, dropout": ["pipeline.coalesce_w=2", "model.recompute=selective", "model.dropout=0.1"],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_bytes_of_a_layer_are_those_that_it_exchanges(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder layer of 8B between two ranks, run without data, beside the formula on links of one byte a second: of an
    exchange half of the whole crosses, of a sum that all keep twice that."""
    config = load_config(DENSE, ["parallel.pp=1", "parallel.tp=2", "pipeline.microbatches=4", *LAYERS[kind]])
    seen: Counter[tuple[str, str]] = Counter()

    def spied(name: str, factor: int) -> Callable[..., torch.Tensor]:
        original = getattr(Exchange, name)

        def exchange(self: Exchange, x: torch.Tensor, context: LayerContext, who: str) -> torch.Tensor:
            made = original(self, x, context, who)
            if context.scope is not None and who.startswith("layers.0."):
                seen[context.scope.kind, name] += factor * max(x.nbytes, made.nbytes)
            return made

        return exchange

    for name, factor in (("gather", 1), ("scatter_sum", 1), ("sum_", 2)):
        monkeypatch.setattr(Exchange, name, spied(name, factor))
    rehearsed = rehearse(config, "cuda")
    microbatches = 2 * 2 * config.pipeline.coalesce_w  # two steps, with one layer of the kind and with two
    slow = replace(ceilings("h200"), launch_us=0.0, link_hop_us=0.0, link_gb_s=1e-9)
    layout = Layout(config)
    block = next(block for block in layout.blocks if block.layer == 0)
    told = Clock(layout, rehearsed, slow, None)._layer(block).exchanges[TP]
    assert told == pytest.approx(sum(seen.values()) / 2 / microbatches) and {work for work, _ in seen} == {"F", "I"}
    if kind in ("FP8", "BF16"):
        of_gather = sum(size for (_, name), size in seen.items() if name == "gather") / microbatches
        assert of_gather == 4 * 4096 * 4096 * (1 if kind == "FP8" else 2)


def test_slower_links_show() -> None:
    fast, slow = (exposed(DENSE, "parallel.tp=4", link_gb_s=gb)[2] for gb in (400, 40))
    assert slow > 1.2 * fast
    stages = exposed(DENSE, "parallel.pp=2", network_gb_s=1e-3)[1]
    assert PP in stages and stages[PP] < 0.1, "two stages of one node send over NVLink"


def test_a_device_of_ones_own(tmp_path: Path, plan_tool) -> None:
    """A YAML file changes constants, and the page says whose they are."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: h200\nname: ours\nnetwork_gb_s: 90\n")
    device = ceilings(str(mine))
    assert (device.name, device.network_gb_s, device.link_gb_s) == ("ours", 90, 400)
    said = plan_tool(str(DENSE), "--device", str(mine), "--width", "150")
    assert "network_gb_s = 90 (of mine.yaml)" in said and "link_gb_s = 400 (NVLink" in said
    for text, words in (
        ("base: h200\nnvlink: 3\n", "there is no constant 'nvlink'"),
        ("base: h200\nlink_gb_s: fast\n", "link_gb_s is a number above 0"),
        ("link_gb_s: 3\n", "'base: NAME' is needed"),
        ("base: h300\n", "no ceilings of device 'h300'"),
        ("base: [\n", "is no YAML"),
    ):
        mine.write_text(text)
        assert words in plan_tool(str(DENSE), "--device", str(mine), code=2)


def test_candidates() -> None:
    """All and only those that a configuration accepts, and each reason."""
    config = load_config(MOE)
    limits = Limits(gpus=16, memory=1e12, batch=64, schedules=("1f1b",))
    found = [choice for choice, _ in choices(config, limits) if choice is not None]
    assert all(c.pp * c.dp * c.ep * c.cp * c.tp == 16 and c.microbatches * c.microbatch_size * c.dp * c.ep == 64 for c in found)
    assert {(c.ep, c.tp) for c in found} >= {(1, 1), (16, 1), (2, 8), (8, 2)}
    few = replace(limits, node=4, context=2, stages=2, batch=6)
    for axes, words in (
        ((1, 1, 1, 1, 8), "tp over more than a node's 4 GPUs"),
        ((1, 1, 1, 4, 1), "more than 2 ranks of cp"),
        ((4, 1, 1, 1, 1), "more than 2 stages"),
        ((1, 1, 3, 1, 1), "experts do not divide by ep x tp"),
        ((1, 4, 1, 1, 1), "the batch does not divide by the replicas"),
        ((1, 1, 1, 1, 3), "heads do not divide by tp"),
    ):
        assert words in (impossible(config, few, *axes) or ""), axes
    dense = load_config(DENSE, ["model.ffn_size=14344", "precision.fp8.recipe=none"])
    assert impossible(dense, limits, 1, 1, 1, 1, 4) is None
    assert impossible(load_config(DENSE, ["model.ffn_size=14352"]), limits, 1, 1, 1, 1, 2) == (
        "the MLP's width does not divide by tp"
    )
    odd = load_config(DENSE, ["data.seq_len=48"])
    assert impossible(odd, limits, 1, 1, 1, 16, 1) == "the sequence does not divide by 2 cp"
    assert batch_sequences(config, 8192) == 2
    with pytest.raises(UsageError, match=r"--batch-tokens 5,000 is no multiple of data.seq_len 4,096"):
        batch_sequences(config, 5000)


def test_a_sweep_of_all_axes(plan_tool) -> None:
    """Experts on four GPUs: the batch is held, what is left out adds up, and no layout left out by its bound is faster."""
    asked = [str(CONFIGS / "mixtral-tiny.yaml"), "precision.dtype=bfloat16", "data.seq_len=256", "graphs.backend=cuda_graphs"]
    asked += ["--device", "h200", "--sweep", "--gpus", "4", "--memory", "1GB", "--batch-tokens", "4096", "--schedules", "1f1b"]
    report, every = (json.loads(plan_tool(*asked, "--json", "--top", top)) for top in ("2", "10000"))
    rows = report["ranked"]
    assert report["looked_at"] == len(rows) + sum(report["left_out"].values()) and report["batch_tokens"] == 4096
    assert len(rows) >= 2 and all(row["peak_bytes"] <= 1e9 and row["dp"] * row["ep"] <= 16 for row in rows)
    assert len(every["ranked"]) > len(rows) and not any("slower" in reason for reason in every["left_out"])
    assert every["ranked"][:2] == rows[:2], "pruning loses nothing of the first two"
    assert {"ep", "tp", "cp", "pp"} == {axis for axis in ("ep", "tp", "cp", "pp") if any(r[axis] > 1 for r in every["ranked"])}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tp=3"], "model.num_heads 32 is not divisible by parallel.tp 3: change one"),
        (["parallel.cp=3"], "data.seq_len 4096 is not divisible by 2 x parallel.cp = 6.*change one"),
        (["parallel.ep=3"], "num_experts 16 is not divisible by parallel.ep 3.*change one"),
    ],
)
def test_layouts_that_do_not_divide(overrides: list[str], words: str) -> None:
    """The configuration says which number to change; the tool passes it on with exit code 2, as every error of one."""
    with pytest.raises(UsageError, match=words):
        load_config(MOE, ["parallel.ep=1", *overrides])
