"""A row that does not count is as if it were not there: one rule for every estimator that compares rows."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import advantage
from rlprims.grouping import dense_ids
from rlprims.testing._cases import Batch, make_batch

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("beta_normalized", {}),
    ("gdpo", {}),
    ("gdpo", {"whiten_over": "tokens"}),
    ("gdpo", {"whiten_over": "none", "singleton": "raw"}),
    ("gigpo", {}),
    ("gpg", {}),
    ("gpg", {"informative": "nonzero_reward", "singleton": "raw"}),
    ("grpo", {}),
    ("grpo", {"baseline": "leave_one_out", "singleton": "raw"}),
    ("grpo", {"std_over": "batch"}),
    ("grpo", {"std_over": "batch_centred"}),
    ("maxrl", {}),
    ("opo", {}),
    ("opo", {"singleton": "raw"}),
    ("optimal_token_baseline", {}),
    ("optimal_token_baseline", {"align": "columns", "singleton": "raw"}),
    ("pass_at_k_training", {"normalize_std": True}),
    ("pkpo", {"k": 2}),
    ("pkpo", {"k": 1, "baseline": "leave_one_out"}),
    ("pkpo", {"k": 2, "baseline": "leave_one_out"}),
    ("pkpo", {"k": 2, "baseline": "none"}),
    ("prime", {}),
    ("quantile_baseline", {}),
    ("quantile_baseline", {"level": 0.7, "normalize_std": False}),
    ("reinforce_pp_baseline", {}),
    ("rloo", {}),
    ("rtmc", {}),
    ("rtmc", {"gamma": 1.0, "prior": 0.0}),
    ("tree_grpo", {}),
    ("turn_grpo", {}),
    ("turn_grpo", {"normalize_std": False, "gamma": 0.5}),
]
NAMES = [name for name, _ in CALLS]


def answer(name: str, hyperparameters: dict[str, Any], batch: Batch, **data: Tensor) -> Tensor:
    estimator: Callable[..., Tensor] = getattr(advantage, name)
    asked = [p for p in inspect.signature(estimator).parameters if p in batch.data and p != "valid_rows"]
    return estimator(**{p: batch.data[p] for p in asked}, **data, **hyperparameters)


def batch_of(seed: int, name: str) -> Batch:
    """Eight rows in four groups, of which some five count; rewards of 0 and 1 where others mean nothing."""
    batch = make_batch(seed)
    if name != "beta_normalized":
        return batch
    passed = (batch.data["scores"] > 0).double()
    first = batch.mask & (batch.mask.cumsum(-1) == 1)
    return batch.replace(rewards=first * passed[:, None], group_ids=batch.data["group_ids"] // 2)


def test_every_estimator_that_takes_groups_takes_valid_rows() -> None:
    functions = {name: getattr(advantage, name) for name in advantage.__all__ if name[0].islower()}
    asked = {name: inspect.signature(f).parameters for name, f in functions.items()}
    grouped = {name for name, parameters in asked.items() if "group_ids" in parameters}
    one_group = {"spo"}  # which is the batch
    assert grouped | one_group == {name for name, parameters in asked.items() if "valid_rows" in parameters}
    assert grouped == {*NAMES, "optimal_value"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "hyperparameters"), CALLS, ids=[f"{n}-{h}" for n, h in CALLS])
class TestAbsent:
    def test_the_others_get_what_they_get_without_it(
        self, name: str, hyperparameters: dict[str, Any], seed: int
    ) -> None:
        batch = batch_of(seed, name)
        valid = batch.data["valid_rows"]
        got = answer(name, hyperparameters, batch, valid_rows=valid)
        alone = batch.rows(valid.nonzero()[:, 0])
        alone = alone.replace(group_ids=dense_ids(alone.data["group_ids"]))
        torch.testing.assert_close(got[valid], answer(name, hyperparameters, alone), rtol=0, atol=1e-12)
        assert (got[~valid] == 0).all()

    def test_it_is_not_read(self, name: str, hyperparameters: dict[str, Any], seed: int) -> None:
        batch = batch_of(seed, name)
        valid = batch.data["valid_rows"]
        poisoned = {
            x: torch.where(valid[:, None], batch.data[x], torch.nan)
            for x in ("rewards", "component_scores", "old_log_probs", "sum_pi_squared")
        }
        got = answer(name, hyperparameters, batch.replace(**poisoned), valid_rows=valid)
        torch.testing.assert_close(got, answer(name, hyperparameters, batch, valid_rows=valid), rtol=0, atol=0)

    def test_packed_and_all_of_them(self, name: str, hyperparameters: dict[str, Any], seed: int) -> None:
        batch = batch_of(seed, name)
        valid, lengths = batch.data["valid_rows"], batch.data["lengths"]
        rows = torch.arange(batch.mask.shape[1]) < lengths[:, None]
        padded = answer(name, hyperparameters, batch, valid_rows=valid)
        torch.testing.assert_close(
            answer(name, hyperparameters, batch.pack(), valid_rows=valid), padded[rows], rtol=0, atol=1e-12
        )
        everyone = answer(name, hyperparameters, batch, valid_rows=torch.ones_like(valid))
        torch.testing.assert_close(everyone, answer(name, hyperparameters, batch), rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"pkpo"}))
def test_rows_that_are_not_a_bool_for_each_are_refused(name: str) -> None:
    batch = make_batch(0)
    for wrong in (torch.ones(8), torch.ones(7, dtype=torch.bool)):
        with pytest.raises(ValueError, match="valid_rows"):
            answer(name, {}, batch, valid_rows=wrong)


def test_a_group_of_which_no_row_counts_is_no_error() -> None:
    rewards, mask = torch.tensor([[1.0], [0.0], [5.0]]), torch.ones(3, 1, dtype=torch.bool)
    valid = torch.tensor([True, True, False])
    got = advantage.grpo(rewards, torch.tensor([0, 0, 1]), mask, valid_rows=valid, singleton="error")
    assert got[2] == 0
