"""The trap: an overlong penalty without a filter on the accuracy teaches a policy that is always wrong to be short."""

import torch

from rlprims import advantage, filters, rewards

LENGTHS = torch.tensor([3, 6, 9, 10])
MASK = torch.arange(10) < LENGTHS[:, None]
GROUP = torch.zeros(4, dtype=torch.int64)
ALL_WRONG = torch.zeros(4)


def shaped() -> torch.Tensor:
    return ALL_WRONG + rewards.overlong_penalty(MASK, max_length=10, buffer_length=5)


def test_in_a_group_that_is_wrong_throughout_only_the_length_is_rewarded() -> None:
    a = advantage.grpo(rewards.at_last_token(shaped(), MASK), GROUP, MASK)[:, 0]
    assert torch.equal(a.argsort(descending=True), LENGTHS.argsort())
    assert a.abs().max() > 0.9, "as large as an advantage for being right"
    small = advantage.grpo(rewards.at_last_token(0.001 * shaped(), MASK), GROUP, MASK)[:, 0]
    torch.testing.assert_close(small, a, atol=5e-3, rtol=0)  # a smaller penalty does not help: the std divides it out


def test_the_filter_must_look_at_the_accuracy() -> None:
    assert not filters.varied_scores(ALL_WRONG, GROUP).any()
    assert filters.varied_scores(shaped(), GROUP).all()
