"""Loss terms with tokens, means and denominators of their own: by hand, and independent of the split."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import algorithms, corrections, filters, losses
from rlprims.algorithms import (
    Algorithm,
    LossTerm,
    check,
    objective_parts,
    policy_objective,
    step_counts,
    token_weights,
    use,
)
from rlprims.grouping import dense_ids
from rlprims.testing._cases import LARGE, make_batch
from rlprims.types import Totals

REINFORCE = algorithms.reinforce()
MASK = torch.tensor([[True, False, True, False], [True, True, False, False]])
SEEN = torch.tensor([[False, True, False, True], [False, False, False, False]])
LOG_PROBS = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, torch.nan, torch.nan]])
DATA = {
    "log_probs": LOG_PROBS,
    "advantages": torch.tensor([[1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 0.0, 0.0]]),
    "response_mask": MASK,
    "observation_mask": SEEN,
    "group_ids": torch.tensor([0, 0]),
}
POLICY = (1 + 3 + 2 * 5 + 2 * 6) / 4
"""The token mean of −A log π."""


def term(**fields: Any) -> LossTerm:
    return LossTerm(**{"coefficient": 0.5, "loss": use(losses.nll), **fields})


def objective(*terms: LossTerm, data: dict[str, Any] | None = None, **changes: Any) -> float:
    return float(policy_objective(REINFORCE.replace(loss_terms=terms, **changes), data or DATA))


class TestByHand:
    def test_tool_output_over_its_own_count(self) -> None:
        added = objective(term(mask="observation_mask", over="term")) - POLICY
        assert added == pytest.approx(0.5 * (2 + 4) / 2)

    def test_tool_output_over_the_policys_count(self) -> None:
        assert objective(term(mask="observation_mask")) - POLICY == pytest.approx(0.5 * (2 + 4) / 4)

    def test_the_policys_tokens_again(self) -> None:
        for over in ("policy", "term"):
            assert objective(term(over=over)) - POLICY == pytest.approx(0.5 * (1 + 3 + 5 + 6) / 4)

    def test_a_mean_of_its_own(self) -> None:
        own = use(losses.seq_mean_token_sum)
        assert objective(term(aggregation=own)) - POLICY == pytest.approx(0.5 * (4 + 11) / 2)
        # One row has tool output, and two have the policy's tokens.
        seen = [objective(term(mask="observation_mask", aggregation=own, over=over)) for over in ("term", "policy")]
        assert seen[0] - POLICY == pytest.approx(0.5 * 6)
        assert seen[1] - POLICY == pytest.approx(0.5 * 6 / 2)

    @pytest.mark.parametrize(
        ("mean", "policy", "own"),
        [
            # Rows of the policy have 2 tokens each, and those of the term 2 and 0.
            (use(losses.seq_mean_token_mean), 6 / 2 / 2, 6 / 2),
            (use(losses.prompt_token_mean), 6 / 4, 6 / 2),
            (use(losses.seq_mean_token_sum_norm, length=10), 6 / 10 / 2, 6 / 10),
        ],
    )
    def test_every_mean_over_either_count(self, mean: Any, policy: float, own: float) -> None:
        for over, expected in (("policy", policy), ("term", own)):
            seen = term(coefficient=1.0, mask="observation_mask", aggregation=mean, over=over)
            assert objective(seen) - POLICY == pytest.approx(expected)

    def test_chosen_tokens_over_their_own_count(self) -> None:
        solved = term(tokens=use(algorithms.is_correct), over="term")
        algorithm = REINFORCE.replace(loss_terms=[solved])
        data = {**DATA, "scores": torch.tensor([1.0, 0.0])}
        data |= token_weights(algorithm, data)
        assert float(policy_objective(algorithm, data)) - POLICY == pytest.approx(0.5 * (1 + 3) / 2)

    def test_tokens_are_chosen_among_those_of_the_mask(self) -> None:
        algorithm = REINFORCE.replace(loss_terms=[term(tokens=use(algorithms.is_correct), mask="observation_mask")])
        chosen = token_weights(algorithm, {**DATA, "scores": torch.ones(2)})
        assert torch.equal(chosen["loss_terms.0.tokens"], SEEN)

    def test_terms_add_up(self) -> None:
        one, two = term(mask="observation_mask", over="term"), term(over="term")
        assert objective(one, two) - POLICY == pytest.approx(objective(one) + objective(two) - 2 * POLICY)

    def test_the_policys_coefficient_is_of_its_loss_alone(self) -> None:
        beside = term()
        assert objective(beside, policy_coefficient=0.25) == pytest.approx(0.25 * POLICY + 0.5 * 15 / 4)

    def test_a_weight_for_each_row(self) -> None:
        data = {**DATA, "row_weights": torch.tensor([3.0, 0.0])}
        algorithm = REINFORCE.replace(loss_terms=[term(over="term")])
        weights = token_weights(algorithm, data)
        assert weights["loss_weights"].tolist() == [[3, 0, 3, 0], [0, 0, 0, 0]]
        expected = 3 * (1 + 3) / 4 + 0.5 * 15 / 4
        assert float(policy_objective(algorithm, data | weights)) == pytest.approx(expected)
        with pytest.raises(ValueError, match="the batch has no loss_weights"):
            policy_objective(algorithm, data)

    def test_a_weight_for_each_row_and_a_correction(self) -> None:
        algorithm = REINFORCE.replace(corrections=[corrections.tis])
        data = {**DATA, "row_weights": torch.tensor([3.0, 1.0])}
        data |= {"old_log_probs": LOG_PROBS, "rollout_log_probs": LOG_PROBS - torch.tensor(1.5).log()}
        weights = token_weights(algorithm, data)["loss_weights"]
        torch.testing.assert_close(weights, torch.tensor([[4.5, 0, 4.5, 0], [1.5, 1.5, 0, 0]]))


class TestOtherTokensSeeNothing:
    """More tokens in one term, and the gradient of every other token is the same to the bit."""

    TERMS = (
        term(coefficient=0.3, mask="observation_mask", over="term"),
        term(coefficient=0.7, mask="expert_mask", over="term", aggregation=use(losses.seq_mean_token_mean)),
    )

    @pytest.mark.parametrize("aggregation", [losses.token_mean, losses.seq_mean_token_mean, losses.prompt_token_mean])
    @pytest.mark.parametrize("grown", ["observation_mask", "expert_mask"])
    def test_to_the_bit(self, aggregation: Any, grown: str) -> None:
        batch = make_batch(3, torch.float32)
        algorithm = algorithms.dapo().replace(score_shaping=[], aggregation=aggregation, loss_terms=self.TERMS)
        apart = {"observation_mask": ~batch.mask, "expert_mask": torch.zeros_like(batch.mask)}
        apart["observation_mask"][:, :3] = False
        apart["expert_mask"] = ~batch.mask & ~apart["observation_mask"]
        found = []
        for keep in (1, 3):
            data = {**batch.data, **apart}
            data[grown] = apart[grown] & (torch.arange(len(batch.mask))[:, None] % 4 < keep)
            log_probs = data["log_probs"].clone().requires_grad_()
            policy_objective(algorithm, {**data, "log_probs": log_probs}).backward()
            found.append((log_probs.grad, data[grown]))
        (few, before), (many, after) = found
        assert int(before.sum()) < int(after.sum())
        assert torch.equal(few[~after], many[~after])
        assert not torch.equal(few[before], many[before])  # its own count grew

    def test_with_the_policys_count_its_own_tokens_see_nothing_either(self) -> None:
        batch = make_batch(3)
        algorithm = REINFORCE.replace(loss_terms=[term(mask="observation_mask")])
        gradients = []
        for rows in (4, 8):
            seen = ~batch.mask & (torch.arange(8)[:, None] < rows)
            x = batch.data["log_probs"].clone().requires_grad_()
            policy_objective(algorithm, {**batch.data, "observation_mask": seen, "log_probs": x}).backward()
            gradients.append(x.grad)
        assert torch.equal(gradients[0][:4], gradients[1][:4])


def split(algorithm: Algorithm, data: dict[str, Tensor], part_of: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the parts' objectives and the gradient, each part with the counts of the whole step."""
    counts = step_counts(algorithm, data)
    rows = {**data, **counts.columns}
    value, gradient = torch.zeros((), dtype=torch.float64), torch.zeros_like(data["log_probs"])
    for part in range(int(part_of.max()) + 1):
        chosen = part_of == part
        micro: dict[str, Any] = {name: x[chosen] for name, x in rows.items()}
        for name in ("group_ids", "trajectory_ids"):
            if name in micro:
                micro[name] = dense_ids(micro[name])
        micro["log_probs"] = micro["log_probs"].clone().requires_grad_()
        loss = policy_objective(algorithm, {**micro, **counts.totals})
        loss.backward()
        value, gradient[chosen] = value + loss.detach(), micro["log_probs"].grad
    return value, gradient


MEANS = {
    "token_mean": use(losses.token_mean),
    "seq_mean_token_mean": use(losses.seq_mean_token_mean),
    "seq_mean_token_sum": use(losses.seq_mean_token_sum),
    "seq_mean_token_sum_norm": use(losses.seq_mean_token_sum_norm, length=7.0),
    "prompt_token_mean": use(losses.prompt_token_mean),
    "trajectory_mean": use(losses.trajectory_mean),
}


@pytest.mark.parametrize("over", ["policy", "term"])
@pytest.mark.parametrize(
    ("mean", "rollouts"),
    [(mean, rollouts) for mean in MEANS for rollouts in (True, False) if rollouts or mean != "trajectory_mean"],
)
def test_any_split_of_the_step_gives_the_step(mean: str, over: str, rollouts: bool) -> None:
    """Values and gradients, 1e-12 in float64; rows of one group, and of one rollout, in different micro-batches."""
    terms = [
        term(mask="observation_mask", over=over),
        term(loss=use(losses.kl), tokens=use(algorithms.is_correct), over=over, coefficient=-0.2),
        term(mask="expert_mask", over=over, aggregation=use(losses.seq_mean_token_mean), coefficient=2.0),
        term(tokens=use(filters.high_entropy, fraction=0.4), over=over),
    ]
    algorithm = algorithms.dapo().replace(score_shaping=[], aggregation=MEANS[mean], loss_terms=terms)
    for seed, size in ((0, ()), (1, ()), (2, LARGE)):
        generator = torch.Generator().manual_seed(seed)
        data = dict(make_batch(seed, torch.float64, *size).data)
        data["scores"] = data["scores"][data["trajectory_ids"]]
        if not rollouts:
            data = {name: x for name, x in data.items() if not name.startswith("trajectory_")}
        data = {name: x for name, x in data.items() if name not in ("row_tokens", "group_tokens", "trajectory_tokens")}
        data |= token_weights(algorithm, data)
        whole = {**data, "log_probs": data["log_probs"].clone().requires_grad_()}
        expected = policy_objective(algorithm, whole)
        expected.backward()
        for parts in (1, 2, 5):
            value, gradient = split(algorithm, data, torch.randint(parts, (len(data["scores"]),), generator=generator))
            torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, whole["log_probs"].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("over", ["policy", "term"])
@pytest.mark.parametrize("mean", MEANS)
def test_a_term_without_tokens_is_0_and_has_a_gradient(mean: str, over: str) -> None:
    """FSDP waits for the gradient of every rank."""
    data = {**make_batch(0).data, "observation_mask": torch.zeros(8, 6, dtype=torch.bool)}
    data["log_probs"] = torch.where(data["response_mask"], data["log_probs"], torch.nan).requires_grad_()
    algorithm = REINFORCE.replace(
        aggregation=MEANS[mean], loss_terms=[term(mask="observation_mask", over=over)], policy_coefficient=0.0
    )
    counts = step_counts(algorithm, data)
    for given in ({}, {**counts.columns, **counts.totals}):
        loss = policy_objective(algorithm, {**data, **given})
        (gradient,) = torch.autograd.grad(loss, data["log_probs"])
        assert loss == 0
        assert not gradient.any()


def test_the_counts_of_a_step() -> None:
    solved = term(tokens=use(algorithms.is_correct), over="term")
    algorithm = REINFORCE.replace(loss_terms=[term(), term(mask="observation_mask", over="term"), solved])
    chosen = torch.tensor([[True], [False]]).expand(2, 4)
    counts = step_counts(algorithm, {**DATA, "trajectory_ids": torch.tensor([0, 0]), "loss_terms.2.tokens": chosen})
    assert {name: [int(n) for n in total] for name, total in counts.totals.items()} == {
        "totals": [4, 2, 1, 1],
        "loss_terms.1.totals": [2, 1, 1, 1],
        "loss_terms.2.totals": [2, 1, 1, 1],
    }
    assert counts.columns["group_tokens"].tolist() == [4, 4]
    assert counts.columns["row_tokens"].tolist() == counts.columns["trajectory_tokens"].tolist() == [4, 4]
    assert counts.columns["loss_terms.1.row_tokens"].tolist() == [2, 2]
    alone = step_counts(algorithm, {**DATA, "loss_terms.2.tokens": MASK}).columns
    assert alone["row_tokens"].tolist() == [2, 2]
    assert "trajectory_tokens" not in alone


def test_the_parts_of_an_objective() -> None:
    algorithm = REINFORCE.replace(loss_terms=[term(), term(mask="observation_mask", over="term"), term(over="term")])
    policy, seen, own = parts = objective_parts(algorithm)
    assert [part.number for part in parts] == [None, 1, 2]
    assert torch.equal(policy.mask(DATA), MASK)
    assert torch.equal(seen.mask(DATA), SEEN)
    total = sum(part.mean(DATA, part.losses(DATA)) for part in (policy, seen, own))
    torch.testing.assert_close(total, policy_objective(algorithm, DATA))


class TestErrors:
    def test_a_column_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match="a loss term is on expert_mask; the batch has"):
            objective(term(mask="expert_mask"))
        assert "expert_mask" in REINFORCE.replace(loss_terms=[term(mask="expert_mask")]).needs

    def test_a_column_that_is_no_mask(self) -> None:
        with pytest.raises(
            ValueError, match=r"observation_mask has shape \(2, 4\) and dtype torch.float32, expected bool"
        ):
            objective(term(mask="observation_mask"), data={**DATA, "observation_mask": SEEN.float()})

    @pytest.mark.parametrize(("over", "missing"), [("term", "loss_terms.0.totals"), ("policy", "row_tokens")])
    def test_totals_of_the_policy_alone(self, over: str, missing: str) -> None:
        seen = term(mask="observation_mask", over=over)
        with pytest.raises(ValueError, match=rf"the batch has totals and no {missing}: add step_counts"):
            objective(seen, data={**DATA, "totals": Totals(4, 2, 1)})

    def test_a_mean_without_its_hyperparameter(self) -> None:
        with pytest.raises(ValueError, match=r"loss_terms.0.aggregation: .* has no value for \['length'\]"):
            REINFORCE.replace(loss_terms=[term(aggregation=use(losses.seq_mean_token_sum_norm))])

    def test_an_unknown_denominator(self) -> None:
        with pytest.raises(ValueError, match="over"):
            term(over="batch")


class TestLints:
    def test_advantages_on_tool_output(self) -> None:
        (found,) = check(REINFORCE.replace(loss_terms=[term(loss=use(losses.reinforce), mask="m", over="term")]))
        assert found.severity == "error"
        assert "loss_terms.0 is on m, and losses.reinforce reads advantages" in found.message

    def test_other_tokens_over_the_policys_count(self) -> None:
        (found,) = check(REINFORCE.replace(loss_terms=[term(mask="observation_mask")]))
        assert "divided by the count of response_mask: over='term'" in found.message
        assert check(REINFORCE.replace(loss_terms=[term(mask="observation_mask", over="term")])) == []
