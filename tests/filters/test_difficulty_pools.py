"""Prompts by difficulty: pools, draws, and a state that can be resumed."""

import json
from typing import Any

import pytest
import torch

from rlprims.filters import DifficultyPools

POOLS = {"easy": (0.8, 0.5), "hard": (0.0, 1.0), "normal": (0.2, 2.0)}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_pool_begins_at_its_least_rate() -> None:
    pools = DifficultyPools(POOLS)
    rates = {"a": 0.0, "b": 0.19, "c": 0.2, "d": 0.79, "e": 0.8, "f": 1.0, "g": -1.0}
    pools.observe(rates)
    assert [pools.pool(p) for p in rates] == ["hard", "hard", "normal", "normal", "easy", "easy", "hard"]
    assert pools.pool("unseen") is None
    assert [pools.weight(p) for p in ("a", "c", "e", "unseen")] == [1.0, 2.0, 0.5, 1.0]


def test_the_last_rate_counts() -> None:
    pools = DifficultyPools(POOLS)
    pools.observe({"a": 1.0, "b": 0.5})
    pools.observe({"a": 0.0})
    assert (pools.pool("a"), pools.pool("b")) == ("hard", "normal")


def test_difficulty_pools_draw_no_mastered_prompt() -> None:
    pools = DifficultyPools({"open": (0.0, 1.0), "mastered": (1.0, 0.0)})
    pools.observe({"a": 1.0, "b": 0.99, "c": 1.0})
    for seed in range(20):
        assert sorted(pools.draw(["a", "b", "c", "d"], 2, generator=seeded(seed))) == ["b", "d"]


def test_too_few_are_an_error_that_says_what_there_is() -> None:
    pools = DifficultyPools({"open": (0.0, 1.0), "mastered": (1.0, 0.0)})
    pools.observe({"a": 1.0, "b": 0.5})
    with pytest.raises(ValueError, match=r"at most 2.*of 3 there are \{'mastered': 1, 'open': 1, 'unseen': 1\}"):
        pools.draw(["a", "b", "c"], 3, generator=seeded())
    with pytest.raises(ValueError, match="count=0"):
        pools.draw(["a", "b", "c"], 0, generator=seeded())


def test_draws_are_distinct_repeatable_and_as_likely_as_the_weights() -> None:
    pools = DifficultyPools(POOLS)
    pools.observe({"a": 0.0, "b": 0.5, "c": 1.0})
    prompts = ["a", "b", "c", "d"]  # of weight 1, 2, ½ and 1
    assert pools.draw(prompts, 4, generator=seeded(3)) == pools.draw(prompts, 4, generator=seeded(3))
    assert sorted(pools.draw(prompts, 4, generator=seeded())) == prompts
    generator = seeded()
    first = [pools.draw(prompts, 1, generator=generator)[0] for _ in range(4500)]
    for prompt, share in zip(prompts, (1 / 4.5, 2 / 4.5, 0.5 / 4.5, 1 / 4.5), strict=True):
        assert first.count(prompt) == pytest.approx(4500 * share, abs=150)  # 4.5 standard deviations and more


def test_no_global_randomness() -> None:
    before = torch.get_rng_state()
    DifficultyPools(POOLS).draw(["a", "b"], 1, generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


def test_the_state_goes_through_json() -> None:
    pools = DifficultyPools(POOLS)
    pools.observe({"a": 1.0, "b": 0.25})
    resumed = DifficultyPools(POOLS)
    resumed.load_state_dict(json.loads(json.dumps(pools.state_dict())))
    assert resumed.solve_rates == {"a": 1.0, "b": 0.25}
    prompts = list("abcdef")
    assert resumed.draw(prompts, 4, generator=seeded(1)) == pools.draw(prompts, 4, generator=seeded(1))


def test_the_state_is_a_copy() -> None:
    pools = DifficultyPools(POOLS)
    pools.observe({"a": 1.0})
    state = pools.state_dict()
    pools.observe({"a": 0.0, "b": 0.0})
    assert state == {"solve_rates": {"a": 1.0}}


@pytest.mark.parametrize(
    "state",
    [{}, {"solve_rates": [1.0]}, {"solve_rates": {}, "more": 1}]
    + [{"solve_rates": {"a": x}} for x in (None, "1", True, float("nan"))]
    + [{"solve_rates": {1: 0.5}}],
)
def test_another_state_is_refused_and_nothing_changes(state: dict[str, Any]) -> None:
    pools = DifficultyPools(POOLS)
    pools.observe({"a": 1.0})
    with pytest.raises(ValueError, match="solve_rates"):
        pools.load_state_dict(state)
    assert pools.solve_rates == {"a": 1.0}


def test_an_unknown_rate_is_refused() -> None:
    pools = DifficultyPools(POOLS)
    with pytest.raises(ValueError, match="the solve rate of 'b' is nan"):
        pools.observe({"a": 0.5, "b": float("nan"), "c": float("inf")})
    assert pools.solve_rates == {}


@pytest.mark.parametrize("pools", [{}, {"a": (0.0, -1.0)}, {"a": (float("nan"), 1.0)}, {"a": (0.0, float("inf"))}])
def test_pools_that_make_no_sense_are_refused(pools: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="pools="):
        DifficultyPools(pools)


def test_a_whole_number_is_a_rate() -> None:
    observed, resumed = DifficultyPools(POOLS), DifficultyPools(POOLS)
    observed.observe({"a": 1})
    resumed.load_state_dict({"solve_rates": {"a": 1}})
    assert json.dumps(observed.state_dict()) == json.dumps(resumed.state_dict()) == '{"solve_rates": {"a": 1.0}}'
