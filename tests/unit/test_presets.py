"""Presets: published sizes to the last parameter, names that Hugging Face's mapping knows, dry runs that allocate nothing."""

from __future__ import annotations

import resource
from math import prod
from pathlib import Path

import pytest
import torch

from checkpoint.hf import tensor_groups
from models import build_model
from qeffect_lm.app.counts import active_parameters, flop_per_token
from qeffect_lm.app.dry_run import describe
from qeffect_lm.config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "models/configs"
NO_PRESETS = {"base", "presets", "bench-m", "bench-moe", "bench-s", "demo", "demo-gpu", "tiny"}

# Parameters as released (a tied head counts once); llama-1m, llama-125m, mixtral-tiny and moe-16x4b are our own.
PARAMETERS = {
    "llama-1m": 1_000_576,
    "llama-125m": 124_668_672,
    "gpt2": 124_439_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "llama3.1-70b": 70_553_706_496,
    "mixtral-tiny": 1_543_296,
    "mixtral-8x7b": 46_702_792_704,
    "moe-16x4b": 41_872_527_360,
}
ACTIVE = {"mixtral-tiny": 1_002_624, "mixtral-8x7b": 12_879_925_248, "moe-16x4b": 6_640_373_760}


def test_every_preset_is_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - NO_PRESETS == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    specs = build_model(config, None, torch.bfloat16).parameters()
    assert sum(prod(spec.shape) for spec in specs) == PARAMETERS[name]
    assert active_parameters(specs) == ACTIVE.get(name, PARAMETERS[name])
    groups = tensor_groups(config.to_dict()["model"], config.data.seq_len)
    assert [(group.ours, group.shape) for group in groups] == [(spec.name, spec.shape) for spec in specs]
    assert config.run.dir == f"runs/{name}" and config.run.name == name


def test_operations_of_a_token():
    """Six for each element of a matrix that takes part, and attention's: counted by hand."""
    config = load_config(CONFIGS / "mixtral-8x7b.yaml")
    specs = build_model(config, None, torch.bfloat16).parameters()
    matrices = 32 * (4096 * 6144 + 4096 * 4096 + 8 * 4096 + 2 * 3 * 4096 * 14336) + 32000 * 4096
    attention = 32 * 12 * 4096 * 4097 / 2  # a token sees 2,048.5 on average
    assert flop_per_token(config, specs) == 6 * matrices + attention
    config = load_config(CONFIGS / "mixtral-8x7b.yaml", ["model.sliding_window=1024"])
    assert flop_per_token(config, specs) == 6 * matrices + attention / 2048.5 * (1024 * 1025 / 2 + 3072 * 1024) / 4096
    tied = load_config(CONFIGS / "gpt2.yaml")
    specs = build_model(tied, None, torch.bfloat16).parameters()
    products = 12 * 12 * 768 * 768 + 50257 * 768
    attention = 12 * 12 * 768 * (tied.data.seq_len + 1) / 2
    assert flop_per_token(tied, specs) == 6 * products + attention


@pytest.mark.parametrize("name", ["llama-1m", "gpt2", "llama3.1-70b", "mixtral-8x7b"])
def test_dry_run_sizes_it_without_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = describe(load_config(CONFIGS / f"{name}.yaml"))
    assert f"parameters: {PARAMETERS[name]:,} in " in page and "memory per pipeline rank (MiB)" in page
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB more at the most"
    if name == "llama3.1-70b":
        rows = [cells for line in page.splitlines() if len(cells := line.split()) == 7 and cells[0].isdigit()]
        assert len(rows) == 16 and all(80_000 < float(row[-1]) < 120_000 for row in rows)
        assert "model.recompute full, 80 of 80 layers" in page
    if name == "mixtral-8x7b":
        rows = [cells for line in page.splitlines() if len(cells := line.split()) == 7 and cells[0].isdigit()]
        assert len(rows) == 16 and all(50_000 < float(row[-1]) < 120_000 for row in rows)
        assert "of them 12,879,925,248 take part in a token" in page
