"""Group statistics: groups that agree, groups of one, and scores that nobody knows."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlprims import advantage
from rlprims.advantage import grpo, rloo
from rlprims.grouping import group_std
from rlprims.trainer.data import Example
from rlprims.trainer.sources.responses import prompt_rows

GROUP_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    name: f
    for name in advantage.__all__
    if inspect.isfunction(f := getattr(advantage, name))
    and [p.name for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    == ["rewards", "group_ids", "response_mask"]
}


def per_row(scores: Tensor) -> tuple[Tensor, Tensor]:
    return scores[:, None], torch.ones(len(scores), 1, dtype=torch.bool)


def one_group(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int64)


@pytest.mark.parametrize(
    ("score", "n", "eps", "wrong"),
    [(1000.1, 3, 1e-6, 0.80), (1000.1, 7, 1e-6, 0.91), (0.1, 9, 1e-9, 0.83), (0.3, 6, 1e-9, 0.88)],
)
def test_g1_g2_b1_equal_rewards_give_zero(score: float, n: int, eps: float, wrong: float) -> None:
    """verl#4597 with its eps of 1e-6, OpenRLHF with 1e-9: the mean is off by one rounding, and so is the deviation."""
    scores = torch.full((n,), score)
    rewards, mask = per_row(scores)
    assert torch.equal(grpo(rewards, one_group(n), mask, eps=eps), torch.zeros(n, 1))
    assert ((scores - scores.mean()) / (scores.std() + eps)).abs().max() > wrong


def test_g3_a_batch_of_equal_rewards_gives_zero() -> None:
    """TRL's scale_rewards="batch"."""
    scores = torch.full((9,), 0.1)
    rewards, mask = per_row(scores)
    assert torch.equal(grpo(rewards, torch.arange(9) // 3, mask, std_over="batch", eps=1e-9), torch.zeros(9, 1))
    assert ((scores - scores.mean()) / (scores.std() + 1e-9)).abs().max() > 0.5


def test_g4_one_sample_among_many_is_not_its_own_rounding_over_eps() -> None:
    """NeMo-RL#4161: the others' mean of a group of one, from a float32 sum, then divided by eps."""
    rewards, mask = per_row(torch.tensor([0.7, 1.0, 0.0, 0.3]))
    ids = torch.tensor([0, 1, 1, 1])
    assert grpo(rewards, ids, mask, baseline="leave_one_out", eps=1e-9)[0] == 0
    assert rloo(rewards, ids, mask)[0] == 0


def test_g5_a_large_offset_leaves_the_deviation() -> None:
    """NeMo-RL: mean of squares less square of mean, in float32."""
    x = 1e5 + torch.tensor([0.0, 1.0, 2.0, 3.0])
    torch.testing.assert_close(group_std(x, one_group(4), ddof=0), torch.full((4,), 1.25**0.5))
    assert ((x.square().mean() - x.mean().square()) - 1.25).abs() > 1


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_g6_b3_a_group_of_one_has_no_baseline(name: str) -> None:
    """verl has three answers: the raw reward (grpo), 0 (rloo_vectorized), an error (passk). Here 0, unless asked."""
    rewards, mask = per_row(torch.tensor([5.0, -3.0, 0.5]))
    assert torch.equal(GROUP_ESTIMATORS[name](rewards, torch.arange(3), mask), torch.zeros(3, 1))


def test_g7_a_group_of_two_is_scaled_as_any_other() -> None:
    """NeMo-RL: without oneself one number is left, whose deviation has no divisor, so rewards of 100 stay 100."""
    rewards, mask = per_row(torch.tensor([0.0, 100.0, 0.0, 1.0]))
    got = grpo(rewards, torch.tensor([0, 0, 1, 1]), mask, baseline="leave_one_out")[:, 0]
    torch.testing.assert_close(got, torch.tensor([-(2**0.5), 2**0.5] * 2), rtol=0, atol=1e-5)


def test_g10_equal_prompts_are_two_groups() -> None:
    """verl 98676e8ad, prime-rl daedc1dbc: grouped by the text, two prompts with other images or environments merged."""
    examples = [Example(prompt="1+1=", prompt_ids=[1], answer="2", data_source="sums")] * 2
    rows = prompt_rows(examples, range(7, 9), copies=3, first_sample=0)
    assert rows["group"].tolist() == [7] * 3 + [8] * 3
    assert len(set(rows["prompt"])) == 1


def test_g13_a_missing_score_affects_only_its_own_row() -> None:
    """ms-swift#8123, trl#5775: one None made the mean of the group, its loss and the gradient NaN, or silently 0."""
    scores = torch.tensor([1.0, 0.0, torch.nan, 1.0])
    rewards, mask = per_row(scores)
    got = grpo(rewards, one_group(4), mask, valid_rows=scores.isfinite())
    known = per_row(scores[[0, 1, 3]])
    torch.testing.assert_close(got[[0, 1, 3]], grpo(known[0], one_group(3), known[1]))
    assert got[2] == 0
    assert scores.mean().isnan()
