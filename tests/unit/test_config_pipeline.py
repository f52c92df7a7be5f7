"""The pipeline section: every schedule, chunks, layers per chunk, auto's limit and costs; one clear error each, exit code 2."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from pipeline.schedules import SCHEDULES
from qeffect_lm.config import Config
from qeffect_lm.config_check import CHUNKS, OWN_LAG, memory_limit
from qeffect_lm.config_sections import PipelineConfig
from qeffect_lm.errors import UsageError
from qeffect_lm.units import format_bytes, parse_bytes
from tests.tiny import config


def pipeline(pp: int = 2, layers: int = 4, **keys: Any) -> Config:
    return config(parallel__pp=pp, model__num_layers=layers, pipeline={"microbatches": 4, **keys})


def error_of(**keys: Any) -> str:
    with pytest.raises(UsageError) as caught:
        pipeline(**keys)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_configuration_knows_the_schedules():
    """The configuration does not import the schedules; what it says of them is what they say."""
    names = typing.get_args(PipelineConfig.model_fields["schedule"].annotation)
    assert set(names) == {*SCHEDULES, "auto"} == set(CHUNKS)
    assert set(OWN_LAG) == {name for name, schedule in SCHEDULES.items() if schedule.own_lag} | {"auto"}
    for name, schedule in SCHEDULES.items():
        for number in range(1, 5):
            try:
                possible = schedule.chunks(number) == number
            except UsageError:
                possible = False
            assert possible == (not CHUNKS[name] or number in CHUNKS[name]), (name, number)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_by_configuration(schedule):
    """P5 too: interleaved on two ranks has four stages; layers per chunk, even and uneven."""
    from qeffect_lm.app.assemble import make_plan

    settings = pipeline(schedule=schedule)
    plan = make_plan(settings)
    chunks = {"linear": 1}.get(SCHEDULES[schedule].shape, 2)
    assert plan.placement.num_chunks == 2 * chunks and sum(settings.chunk_layers(2 * chunks)) == 4
    layers = [3, 1] if chunks == 1 else [2, 0, 1, 1]
    assert pipeline(schedule=schedule, stage_layers=layers).chunk_layers(2 * chunks) == layers
    with pytest.raises(UsageError, match=r"has .* entries, the plan has 7 chunks"):
        pipeline(schedule=schedule, stage_layers=layers).chunk_layers(7)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"schedule": "zb-x"}, ["'zb-x' (text) given, expected 1f1b | gpipe | interleaved-1f1b", "auto"]),
        ({"schedule": "zb-h1", "chunks": 2}, ["pipeline.chunks 2: schedule zb-h1 has 1 per rank", "leave it null"]),
        ({"schedule": "zb-v", "chunks": 3}, ["schedule zb-v has 2 per rank"]),
        ({"schedule": "auto", "chunks": 3}, ["schedule auto has 1 or 2 per rank"]),
        ({"schedule": "interleaved-1f1b", "chunks": 0}, ["expected integer >= 1"]),
        ({"schedule": "dualpipev", "w_delay": 1}, ["schedule dualpipev itself sets when W runs: set pipeline.w_delay=0"]),
        ({"schedule": "auto", "w_delay": 2}, ["set pipeline.w_delay=0"]),
        ({"schedule": "zb-v", "layers": 3}, ["parallel.pp 2 x 2 chunks per rank = 4 is more than model.num_layers 3"]),
        ({"schedule": "interleaved-1f1b", "chunks": 3}, ["parallel.pp 2 x 3 chunks per rank = 6 is more than"]),
        ({"schedule": "auto", "pp": 5}, ["parallel.pp 5 is more than model.num_layers 4"]),
        ({"schedule": "zb-v", "stage_layers": [2, 2]}, ["has 2 entries, parallel.pp is 2: 4 are needed, one per chunk"]),
        ({"schedule": "auto", "stage_layers": [2, 1, 1]}, ["has 3 entries, parallel.pp is 2: 2 or 4 are needed"]),
        ({"schedule": "zb-h1", "stage_layers": [2, 1, 1, 0]}, ["has 4 entries, parallel.pp is 2: one per stage"]),
        ({"schedule": "zb-v", "stage_layers": [2, 1, 1, 1]}, ["adds up to 5, model.num_layers is 4"]),
        ({"schedule": "gpipe", "memory_limit": "2"}, ["memory_limit has no meaning with pipeline.schedule gpipe", "auto"]),
        ({"costs": {"t_f": [1.0]}}, ["pipeline.costs.t_f has no meaning with pipeline.schedule 1f1b"]),
        ({"schedule": "auto", "memory_limit": "lots"}, ["'lots': a number of M_B such as '2.5', or bytes"]),
        ({"schedule": "auto", "memory_limit": "0.9"}, ["0.9 is below one microbatch (1 M_B)", "raise it"]),
        (
            {"schedule": "auto", "memory_limit": "1GiB", "costs": {"m_b": [2.0**31]}},
            ["1GiB is below one microbatch, which holds pipeline.costs.m_b = 2 GiB", "raise it"],
        ),
        ({"schedule": "auto", "costs": {"t_f": [1.0], "t_w": [1.0]}}, ["t_f and t_w alone", "give t_f, t_i and t_w"]),
        (
            {"schedule": "auto", "costs": {"t_f": [1.0, 1, 1]}},
            ["t_f [1.0, 1.0, 1.0]: one number from 0 on is needed, or one for each of 2 ranks"],
        ),
        ({"schedule": "auto", "costs": {"t_f": [0.0], "t_i": [0.0], "t_w": [0.0]}}, ["all zero"]),
        ({"schedule": "auto", "costs": {"t_comm": 1.0}}, ["t_comm needs t_f, t_i and t_w"]),
        ({"schedule": "auto", "costs": {"m_w": [1.0]}}, ["m_w needs pipeline.costs.m_b"]),
        ({"schedule": "auto", "costs": {"m_b": [2.0, 2.0], "m_w": [1.0, 3.0]}}, ["m_w <= m_b are needed"]),
        ({"schedule": "auto", "costs": {"t_g": [1.0]}}, ["unknown key pipeline.costs.t_g"]),
    ],
)  # fmt: skip
def test_what_a_schedule_cannot_have(keys, parts):
    message = error_of(**keys)
    assert "\n" not in message, "one problem, one line"
    for part in parts:
        assert part in message


def test_what_auto_takes():
    costs = {"t_f": [1.0, 2.0], "t_i": [1.0], "t_w": [1.0], "t_comm": 0.5, "m_b": [2e9, 1e9], "m_w": [1e9]}
    settings = pipeline(schedule="auto", memory_limit="2.5GB", costs=costs)
    assert settings.pipeline.costs.t_f == (1.0, 2.0)
    assert Config.from_dict(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("2.5", (2.5, False)), ("40GiB", (40 * 2.0**30, True)), ("1.5e3 kB", (1.5e6, True)), ("2 M_B", None), ("nan", None),
     ("-1", None), ("inf", None), ("", None), ("7B", (7.0, True)), (".5TiB", (2.0**39, True))],
)  # fmt: skip
def test_memory_limits(text, wanted):
    assert memory_limit(text) == wanted


def test_sizes_read_back():
    for size in (0.0, 1.0, 1023.0, 1536.0, 2.0**31, 2.0**43):
        assert parse_bytes(format_bytes(size)) == size
