"""Filters: which groups have a signal, and what happens if none has."""

import numpy as np
import pytest
import torch

from rlprims.filters import DynamicSampling, SamplingExhausted, varied_scores


def test_f1_b2_equal_floats_are_a_constant_group() -> None:
    """verl and the DAPO recipe ask for np.std > 0; slime dd6888d5a."""
    scores = [0.1] * 3
    assert np.std(scores) > 0
    assert not varied_scores(torch.tensor(scores, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)).any()


def test_f2_a_group_with_an_unknown_score_is_dropped() -> None:
    """verl keeps it, and its advantages are NaN: NaN is not equal to 0."""
    scores = [1.0, float("nan"), 0.0]
    assert np.std(scores) != 0
    assert not varied_scores(torch.tensor(scores), torch.zeros(3, dtype=torch.int64)).any()


def test_o10_the_filter_looks_at_what_it_is_given_and_not_at_the_shaped_score() -> None:
    """NeMo-RL#2431, verl-recipe#125: a group that is wrong throughout survives by its lengths."""
    accuracy, penalty = torch.zeros(3), torch.tensor([0.0, -0.2, -1.0])
    ids = torch.zeros(3, dtype=torch.int64)
    assert not varied_scores(accuracy, ids).any()
    assert varied_scores(accuracy + penalty, ids).all()


def test_f3_nothing_to_keep_ends_at_the_limit_with_what_was_seen() -> None:
    """BytedTsinghua-SIA/DAPO#22: an error after ten rounds that says nothing, or no end at all."""
    sampling: DynamicSampling[int] = DynamicSampling(groups=1, max_generation_batches=2)
    for _ in range(2):
        assert not sampling.full
        sampling.add([0, 1], dropped=["acc is 0 throughout"] * 2)
    with pytest.raises(SamplingExhausted, match="4 dropped: acc is 0 throughout"):
        _ = sampling.full


def test_f4_f5_b2_the_surplus_opens_the_next_batch() -> None:
    """verl#3475 throws it away; slime 7e02052ee and NeMo-RL 05967a8e7 lost finished groups."""
    sampling: DynamicSampling[int] = DynamicSampling(groups=2)
    sampling.add([0, 1, 2, 3], dropped=[None, None, "constant", None])
    assert sampling.take() == [0, 1]
    sampling.add([4], dropped=[None])
    assert sampling.take() == [3, 4]
