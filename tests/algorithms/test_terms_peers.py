"""What went wrong elsewhere with terms of a loss and with rollouts of several rows, and the right numbers."""

import pytest
import torch

from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, estimate_advantages, policy_objective, step_counts, use
from rlprims.grouping import dense_ids

NOBODY = torch.zeros(4, 3, dtype=torch.bool)
MASK = torch.tensor([[True, False, False], [True, True, True], [True, True, False], [True, False, False]])
TOOL = torch.tensor([[False, True, True], [False, False, False], [False, False, True], [False, True, True]])
LOG_PROBS = -torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
DATA = {
    "log_probs": LOG_PROBS,
    "old_log_probs": LOG_PROBS,
    "advantages": torch.ones(4, 3, dtype=torch.float64),
    "response_mask": MASK,
    "observation_mask": TOOL,
    "group_ids": torch.tensor([0, 0, 1, 1]),
}


def in_halves(algorithm: algorithms.Algorithm) -> float:
    counts = step_counts(algorithm, DATA)
    total = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: x[rows] for name, x in {**DATA, **counts.columns}.items()}
        part["group_ids"] = dense_ids(part["group_ids"])
        total += float(policy_objective(algorithm, {**part, **counts.totals}))
    return total


def test_verl_7225_a_distillation_term_is_normalized_by_the_step_and_not_by_the_micro_batch() -> None:
    """verl divided the distillation loss by the tokens of the micro-batch, and the policy's by those of the step."""
    distilled = LossTerm(coefficient=1.0, loss=use(losses.nll), mask="observation_mask", over="term")
    algorithm = algorithms.sft().replace(policy_coefficient=0.0, loss_terms=[distilled])
    nll = -LOG_PROBS[TOOL]
    assert in_halves(algorithm) == pytest.approx(float(nll.mean()))
    peer = sum(float(-LOG_PROBS[rows][TOOL[rows]].mean()) for rows in (slice(0, 2), slice(2, 4))) / 2
    assert peer != pytest.approx(float(nll.mean()))


def test_prime_rl_2034_every_component_has_the_count_of_the_whole_step() -> None:
    """A loss of components in micro-batches: each is divided by what the step has of it, so that they add up."""
    seen = LossTerm(coefficient=0.1, loss=use(losses.nll), mask="observation_mask", over="term")
    algorithm = algorithms.echo().replace(loss_terms=[seen, seen.model_copy(update={"over": "policy"})])
    expected = -1 - 0.1 * float(LOG_PROBS[TOOL].mean()) - 0.1 * float(LOG_PROBS[TOOL].sum()) / 7
    assert float(policy_objective(algorithm, DATA)) == pytest.approx(expected)
    assert in_halves(algorithm) == pytest.approx(expected)


def test_prime_rl_more_tool_output_leaves_the_rate_of_the_policys_tokens() -> None:
    found = []
    for tool in (NOBODY, TOOL):
        x = LOG_PROBS.clone().requires_grad_()
        policy_objective(algorithms.echo(), {**DATA, "log_probs": x, "observation_mask": tool}).backward()
        found.append(x.grad)
    assert torch.equal(found[0][MASK], found[1][MASK])
    assert found[1][TOOL].all()


ROLLOUTS = torch.tensor([0, 0, 0, 1])
SCORES = torch.tensor([1.0, 1.0, 1.0, 0.0])


def advantages(algorithm: algorithms.Algorithm, **columns: torch.Tensor) -> list[float]:
    data = {"response_mask": MASK, "group_ids": torch.zeros(4, dtype=torch.int64), "scores": SCORES, **columns}
    estimated = estimate_advantages(algorithm, data | algorithms.shape_scores(algorithm, data))
    return estimated["advantages"][:, 0].tolist()


def test_miles_2378_a_rollout_of_three_rows_is_one_sample_of_its_groups_statistics() -> None:
    """miles mended the loss of split rollouts and not the baseline: by rows the mean is 3/4, by rollouts 1/2."""
    algorithm = algorithms.grpo(kl_coef=0)
    assert advantages(algorithm, trajectory_ids=ROLLOUTS) == pytest.approx([0.7071] * 3 + [-0.7071], abs=1e-4)
    assert advantages(algorithm) == pytest.approx([0.5] * 3 + [-1.5], abs=1e-4)


def test_agent_lightning_445_a_rollout_counts_once_however_many_rows_it_has() -> None:
    """(data_id, rollout_id) is counted once, in the group's mean and in the step's number of rollouts."""
    centred = algorithms.dr_grpo(max_length=8)
    assert advantages(centred, trajectory_ids=ROLLOUTS) == pytest.approx([0.5] * 3 + [-0.5])
    totals = losses.count_totals(MASK, trajectory_ids=ROLLOUTS)
    assert (int(totals.sequences), int(totals.trajectories)) == (4, 2)


def test_rllm_605_the_group_is_the_prompts_and_not_the_rollouts() -> None:
    """Grouped by the rollout's own id every group has one member, and nothing is learnt."""
    algorithm = algorithms.grpo(kl_coef=0)
    assert advantages(algorithm, trajectory_ids=ROLLOUTS)[3] == pytest.approx(-0.7071, abs=1e-4)
    assert advantages(algorithm, trajectory_ids=ROLLOUTS, group_ids=ROLLOUTS) == [0.0] * 4
