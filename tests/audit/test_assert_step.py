"""``rlprims.testing.assert_step``: a right step passes; a wrong sign, token or mean fails, with its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlprims import algorithms
from rlprims.algorithms import KLInReward, use
from rlprims.testing import assert_step
from tests.audit.test_identify import centred, clipped, gradients_of, rollouts

SPEC = algorithms.dapo(dialect="trl-1.16").replace(score_shaping=())
Step = dict[str, Any]


def mean_over_tokens(batch: Step) -> Any:
    return clipped(batch).sum() / batch["response_mask"].sum()


def right() -> Step:
    """A step of a stranger's trainer in plain torch: GRPO with eps 1e-4, the clip of DAPO, a mean over the tokens."""
    batch: Step = rollouts()
    batch |= {name: batch[name].clamp(max=-0.01) for name in ("log_probs", "ref_log_probs")}
    batch["advantages"] = centred(batch)
    batch = gradients_of(batch, mean_over_tokens)
    batch["log_probs"] = batch["log_probs"].detach()
    batch["losses"] = clipped(batch)
    return {**batch, "loss": mean_over_tokens(batch)}


@pytest.mark.parametrize("algorithm", [SPEC, SPEC.to_yaml()])
def test_a_right_step_passes_and_says_what_was_compared(algorithm: Any) -> None:
    assert assert_step(right(), algorithm) == ("advantages", "losses", "loss", "gradients")


def test_the_name_of_a_preset_and_the_columns_of_verl() -> None:
    """GRPO's own eps is 1e-6; verl has the score on the last token, and no column of scores."""
    batch = rollouts()
    mask = batch["response_mask"]
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    columns = {"response_mask": mask, "uid": batch["group_ids"], "advantages": centred(batch, eps=1e-6)}
    assert assert_step({**columns, "token_level_rewards": batch["scores"][:, None] * last}, "grpo") == ("advantages",)


def sign(name: str) -> Callable[[Step], Step]:
    return lambda batch: batch | {name: -batch[name]}


def one_token(batch: Step) -> Step:
    losses = batch["losses"].clone()
    losses[8, 1] += 0.3
    return batch | {"losses": losses}


WRONG: dict[str, tuple[Callable[[Step], Step], str]] = {
    "advantage": (sign("advantages"), r"advantages, expected advantage.grpo\(eps=0.0001\), differ by 200.00% at row"),
    "loss": (sign("losses"), r"losses, expected losses.clipped_surrogate.* differ by 200.00% at .* loss -1 x losses"),
    "mean": (sign("loss"), r"loss, expected losses.token_mean, differ by 200.00%: got -?[\d.]+, expected"),
    "gradient": (sign("gradients"), r"gradients, expected losses.token_mean, differ by 200.00% at row"),
    "one token": (one_token, r"losses, .* at row 8, token 1: got "),
    "another mean": (
        lambda batch: batch | {"loss": batch["losses"].sum() / 16},
        r"loss, expected losses.token_mean, .* mean losses.seq_mean_token_sum$",
    ),
    "a mask beyond the end": (
        lambda batch: batch | {"attention_mask": batch["response_mask"] & (torch.arange(5) < 4)},
        "M4 error: ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_fails_with_its_stage_and_place(name: str) -> None:
    spoil, message = WRONG[name]
    batch = {name: x for name, x in right().items() if name != "gradients" or spoil is WRONG["gradient"][0]}
    with pytest.raises(AssertionError, match=message):
        assert_step(spoil(batch), SPEC)


def test_a_kl_in_the_reward_is_computed_from_the_scores() -> None:
    """By hand for one token per row: the reward is score - 0.1 (old - ref); RLOO subtracts the mean of the others."""
    generator = torch.Generator().manual_seed(0)
    old, ref = -torch.rand(2, 4, 1, generator=generator).double() - 0.1
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    rewards = scores - 0.1 * (old - ref)[:, 0]
    advantages = rewards - (rewards.sum() - rewards) / 3
    batch = {"response_mask": torch.ones(4, 1, dtype=torch.bool), "group_ids": torch.zeros(4, dtype=torch.long)}
    batch |= {"scores": scores, "old_log_probs": old, "ref_log_probs": ref, "advantages": advantages[:, None]}
    controller = use("controllers.FixedKL", kl_coef=0.1)
    spec = algorithms.rloo().replace(kl_in_reward=KLInReward(controller=controller), loss_terms=())
    assert assert_step(batch, spec) == ("advantages",)
    with pytest.raises(AssertionError, match=r"advantages, expected advantage.rloo, differ by"):
        assert_step(batch, spec.replace(kl_in_reward=None))


def test_what_cannot_be_compared_is_an_error_and_no_success() -> None:
    with pytest.raises(ValueError, match="expected advantages with scores or rewards, losses, loss or gradients"):
        assert_step(rollouts(), SPEC)
    batch = right()
    del batch["group_ids"]
    with pytest.raises(ValueError, match=r"expected \['group_ids'\] in the batch"):
        assert_step(batch, SPEC)
