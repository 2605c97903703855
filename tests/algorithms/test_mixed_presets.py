"""Presets that learn from tool output, experts and demonstrations, by numbers worked out by hand."""

from typing import Any

import pytest
import torch

from rlprims import algorithms, losses
from rlprims.algorithms import check, estimate_advantages, policy_objective, shape_scores, token_weights, use
from rlprims.turns import Turn, merge, to_batch

P = torch.tensor([[0.5, 0.25, 0.5], [0.125, 0.5, 0.5]], dtype=torch.float64)
NLL = -P.log()


def objective(algorithm: algorithms.Algorithm, **data: Any) -> float:
    data = {"log_probs": P.log(), "old_log_probs": P.log(), "group_ids": torch.zeros(2, dtype=torch.int64), **data}
    data["advantages"] = data["advantages"].double() * data["response_mask"]
    return float(policy_objective(algorithm, data | token_weights(algorithm, data)))


def rows(*marks: str) -> torch.Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in marks])


@pytest.mark.parametrize("preset", [algorithms.echo, algorithms.luffy, algorithms.chord, algorithms.sft])
def test_check_finds_no_fault_with_mixed_presets(preset: Any) -> None:
    assert check(preset()) == []


def test_echo() -> None:
    """arXiv:2605.24517: the policy's tokens by their count, and 0.1 of the mean NLL of the tool's by theirs."""
    got = objective(
        algorithms.echo(),
        advantages=torch.tensor([[1.0], [-2.0]]),
        response_mask=rows("101", "110"),
        observation_mask=rows("010", "000"),
    )
    assert got == pytest.approx((-1 - 1 + 2 + 2) / 4 + 0.1 * float(NLL[0, 1]) / 1)


def test_echo_of_turns() -> None:
    """From turns to a loss: what the tool answered is learnt, and nothing else but what was sampled."""
    turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 8, 9], [4], [-0.2], reward=1.0)]
    data = to_batch([merge(turns), merge([Turn([1, 2], [5], [-0.1])])], ["q", "q"], pad_id=0)
    columns = {**data.batch, "scores": data["rewards"].sum(-1)}
    echo = algorithms.echo()
    columns |= shape_scores(echo, columns)
    columns |= estimate_advantages(echo, columns)
    x = data["rollout_log_probs"].clone().requires_grad_()
    policy_objective(echo, {**columns, "log_probs": x, "old_log_probs": data["rollout_log_probs"]}).backward()
    a = 0.5**0.5
    expected = torch.tensor([[-a / 3, -0.1 / 2, -0.1 / 2, -a / 3], [a / 3, 0, 0, 0]])
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


def test_luffy() -> None:
    """arXiv:2504.14945: −A π/(π + 0.1) on the expert's row, PPO on the other, one constant for both."""
    got = objective(
        algorithms.luffy(max_length=10),
        advantages=torch.tensor([[1.0], [-2.0]]),
        response_mask=rows("111", "110"),
        expert_mask=rows("111", "000"),
    )
    expert = -(0.5 / 0.6 + 0.25 / 0.35 + 0.5 / 0.6)
    assert got == pytest.approx((expert + 2 + 2) / 10 / 2)


def test_the_experts_score_is_in_the_groups_baseline() -> None:
    """Seven wrong answers and an expert's: without it the group would teach nothing."""
    luffy = algorithms.luffy()
    data = {
        "scores": torch.tensor([1.0, *[0.0] * 7]),
        "group_ids": torch.zeros(8, dtype=torch.int64),
        "response_mask": torch.ones(8, 1, dtype=torch.bool),
    }
    advantages = estimate_advantages(luffy, data | shape_scores(luffy, data))["advantages"][:, 0]
    torch.testing.assert_close(advantages, torch.tensor([7 / 8, *[-1 / 8] * 7]))


@pytest.mark.parametrize("mu", [0.1, 0.9])
def test_chord(mu: float) -> None:
    """arXiv:2508.11408: (1 − μ) of the first row's mean and μ of the second's, each by its own count."""
    got = objective(
        algorithms.chord(mu=mu),
        advantages=torch.tensor([[1.0], [0.0]]),
        response_mask=rows("110", "000"),
        expert_mask=rows("000", "011"),
    )
    phi = 0.25 * float(NLL[1, 1])
    assert got == pytest.approx((1 - mu) * (-1 - 1) / 2 + mu * (phi + phi) / 2)


def test_sft_and_dft() -> None:
    mask = rows("110", "001")
    advantages = torch.tensor([[7.0], [9.0]])
    sft = algorithms.sft()
    assert objective(sft, advantages=advantages, response_mask=mask) == pytest.approx(float(NLL[mask].mean()))
    dft = sft.replace(policy_loss=losses.dft)
    assert objective(dft, advantages=advantages, response_mask=mask) == pytest.approx(float((P * NLL)[mask].mean()))


def test_rejection_sampling_is_sft_of_what_was_solved() -> None:
    kept = algorithms.sft().replace(token_selection=algorithms.is_correct)
    mask, scores = rows("110", "011"), torch.tensor([1.0, 0.0])
    got = objective(kept, advantages=torch.zeros(2, 1), response_mask=mask, scores=scores)
    assert got == pytest.approx(float(NLL[0, :2].sum()) / 4)


def test_vapo_imitates_what_is_right_by_its_own_count() -> None:
    """arXiv:2504.05118: the NLL of the right answers is a mean over their tokens, and its weight 0.1."""
    vapo = algorithms.vapo()
    mask, advantages = rows("110", "111"), torch.tensor([[1.0], [-1.0]])
    policy = (-1 - 1 + 1 + 1 + 1) / 5
    for scores, imitated in ((torch.tensor([1.0, 0.0]), NLL[0, :2].mean()), (torch.zeros(2), torch.zeros(()))):
        got = objective(vapo, advantages=advantages, response_mask=mask, scores=scores)
        assert got == pytest.approx(policy + 0.1 * float(imitated))


def test_terms_round_trip_and_differ() -> None:
    echo = algorithms.echo()
    (seen,) = echo.loss_terms
    assert (seen.mask, seen.over, seen.aggregation) == ("observation_mask", "term", use(losses.token_mean))
    assert algorithms.Algorithm.from_yaml(echo.to_yaml()) == echo
    assert algorithms.diff(echo, algorithms.echo(observation_coef=0.2)) == {"loss_terms.0.coefficient": (0.1, 0.2)}
    assert "observation_mask" in echo.needs
    assert "expert_mask" in algorithms.chord().needs & algorithms.luffy().needs
