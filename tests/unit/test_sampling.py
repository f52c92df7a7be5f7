"""Choosing tokens: the cuts against a plain reference, the draws against the probabilities, each row by itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from qeffect_lm.errors import UsageError
from qeffect_lm.inference.sampling import Sampling, choose


def keys(count: int, start: int = 0) -> torch.Tensor:
    return torch.tensor([Sampling(seed=7).key([start + i]) for i in range(count)])


def draws(logits: list[float], sampling: Sampling, count: int) -> list[int]:
    """One row for each draw, all with the same logits."""
    row = torch.tensor(logits, dtype=torch.float64).expand(count, -1)
    return choose(row, sampling, keys(count), torch.zeros(count, dtype=torch.int64)).tolist()


def kept(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Token → probability by the definitions, in plain Python; an example too close to a border is thrown away."""
    scores = {token: value / sampling.temperature for token, value in enumerate(logits)}
    if 0 < sampling.top_k < len(scores):
        least = sorted(scores.values(), reverse=True)[sampling.top_k - 1]
        scores = {token: value for token, value in scores.items() if value >= least}
    top = max(scores.values())
    weights = {token: math.exp(value - top) for token, value in scores.items()}
    total = math.fsum(weights.values())
    chosen: dict[int, float] = {}
    for token in sorted(weights, key=lambda token: (-weights[token], token)):
        mass = math.fsum(chosen.values()) / total
        if sampling.top_p < 1:
            assume(abs(mass - sampling.top_p) > 1e-9)
            if mass > sampling.top_p:
                break
        chosen[token] = weights[token]
    total = math.fsum(chosen.values())
    return {token: weight / total for token, weight in chosen.items()}


LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=9)  # equal ones among them


@settings(max_examples=60)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.3, 0.6, 0.9, 1.0]),
)
def test_cuts_and_draws_are_those_of_a_plain_reference(logits, temperature, top_k, top_p):
    """No token beyond the cut is drawn, and the others as often as their probability says (five standard deviations)."""
    sampling = Sampling(temperature, top_k, top_p)
    wanted, count = kept(logits, sampling), 2000
    found = draws(logits, sampling, count)
    assert set(found) <= set(wanted)
    for token, p in wanted.items():
        assert abs(found.count(token) - count * p) <= 5 * math.sqrt(count * p * (1 - p)) + 1e-6


def test_greedy_takes_the_first_of_the_largest():
    assert draws([0.0, 3.0, 3.0, 1.0], Sampling(temperature=0), 2) == [1, 1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5, 0, 0.7), Sampling(0), Sampling(2.0, 5, 1.0, 1.3)], ids=str)
def test_rows_do_not_know_each_other(sampling):
    """A row's token does not change with the rows beside it or its place among them."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 40, generator=generator) * 3
    held = torch.rand(6, 40, generator=generator) < 0.3
    count = torch.arange(6)
    whole = choose(logits, sampling, keys(6), count, held)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    assert torch.equal(choose(logits[order], sampling, keys(6)[order], count[order], held[order]), whole[order])
    alone = [choose(logits[i : i + 1], sampling, keys(6)[i : i + 1], count[i : i + 1], held[i : i + 1]) for i in range(6)]
    assert torch.equal(torch.cat(alone), whole)


def test_draws_follow_seed_prompt_copy_and_number():
    keyed = {Sampling(seed=seed).key(prompt, copy) for seed in (0, 1) for prompt in ([1, 2], [12]) for copy in (0, 1)}
    assert len(keyed) == 8 and Sampling(seed=1).key([1, 2], 1) in keyed
    logits = torch.zeros(1, 1000)
    flat = Sampling(1.0, 0)
    tokens = [int(choose(logits, flat, keys(1), torch.tensor([number]))) for number in range(50)]
    assert len(set(tokens)) > 40, "each new token draws anew"
    assert tokens == [int(choose(logits, flat, keys(1), torch.tensor([number]))) for number in range(50)]


def test_a_cut_that_cuts_nothing_changes_no_draw():
    """The noise is a token's, not a place's in some order."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(2)).expand(200, -1)
    count = torch.zeros(200, dtype=torch.int64)
    plain = choose(logits, Sampling(1.0, 0), keys(200), count)
    for cut in (Sampling(1.0, 50), Sampling(1.0, 0, 1 - 1e-12), Sampling(1.0, 49)):
        assert torch.equal(choose(logits, cut, keys(200), count), plain)


def test_noise_of_neighbouring_draws_is_independent():
    """Two tokens of equal weight, drawn for neighbouring keys and numbers: as many changes as coin throws have."""
    sampling, n = Sampling(1.0, 0), 4000
    by_key = torch.tensor(draws([0.0, 0.0], sampling, n))
    number = torch.arange(n)
    by_number = choose(torch.zeros(n, 2), sampling, keys(1).expand(n), number)
    for found in (by_key, by_number):
        changes = int((found[1:] != found[:-1]).sum())
        assert abs(changes - n / 2) < 5 * math.sqrt(n / 4)


@settings(max_examples=40)
@given(logits=LOGITS, penalty=st.sampled_from([0.5, 1.2, 2.0]), data=st.data())
def test_repetition_penalty(logits, penalty, data):
    held = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    changed = [(x / penalty if x > 0 else x * penalty) if seen else x for x, seen in zip(logits, held, strict=True)]
    row = torch.tensor([logits], dtype=torch.float64)
    sampling = Sampling(0, repetition_penalty=penalty)
    found = int(choose(row, sampling, keys(1), torch.zeros(1, dtype=torch.int64), torch.tensor([held])))
    assert found == changed.index(max(changed))


def test_bfloat16_logits_are_widened_first():
    """Divided in bfloat16 the two would be equal, and the first would win."""
    logits = torch.tensor([[508.0, 510.0]], dtype=torch.bfloat16)
    sampling = Sampling(temperature=1.9e-3, top_k=0)
    assert len((logits / sampling.temperature).unique()) == 1
    assert int(choose(logits, sampling, keys(1), torch.zeros(1, dtype=torch.int64))) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(wrong):
    name = "--" + next(iter(wrong)).replace("_", "-")
    with pytest.raises(UsageError, match=name):
        Sampling(**wrong)
