"""The sampler's policy against the trainer's: which way round, and what a bound bounds."""

from typing import Any

import pytest
import torch

from rlprims.corrections import importance_weights, rejection, veto

M = torch.ones(2, 2, dtype=torch.bool)
TRAINER = torch.tensor([[0.8, 0.4], [0.2, 0.4]]).log()
SAMPLER = torch.tensor([[0.2, 0.4], [0.8, 0.4]]).log()


@pytest.mark.parametrize(
    "options",
    [{"level": "token"}, {"level": "sequence"}, {"level": "sequence", "mean": "geometric"}],
    ids=["token", "product", "geometric"],
)
def test_r13_a_truncated_weight_is_not_above_its_cap(options: dict[str, Any]) -> None:
    """OpenRLHF: seq-mask-tis was documented as truncated, and was not."""
    weights = importance_weights(TRAINER, SAMPLER, M, high=1.5, **options).values
    assert weights.max() == 1.5
    assert (TRAINER - SAMPLER).exp().max() > 1.5


def test_r14_b14_bounds_of_the_ratio_are_of_trainer_over_sampler() -> None:
    """verl#6377: token_k1 of "0.5_5.0" keeps ratios from 0.2 to 2."""
    kept = rejection(TRAINER, SAMPLER, M, estimator="k1", level="token", low=0.5, high=5.0).values > 0
    assert kept.tolist() == [[True, True], [False, True]]  # ratios of 4 and of 1/4
    peer = ((SAMPLER - TRAINER).exp() >= 0.5) & ((SAMPLER - TRAINER).exp() <= 5.0)
    assert peer.tolist() == [[False, True], [True, True]]


def test_r7_one_absurd_token_takes_its_response_and_no_other() -> None:
    """NeMo-RL b59165262: such a response stayed, with a ratio that swamped the batch."""
    trainer = torch.tensor([[-20.0, -1.0], [-1.0, -1.0]])
    sampler = torch.full((2, 2), -1.0)
    assert (veto(trainer, sampler, M).values > 0).tolist() == [[False, False], [True, True]]
