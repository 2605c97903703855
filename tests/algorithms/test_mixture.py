"""``examples/mixture.py``: rows of one batch by several algorithms."""

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from examples import mixture, tabular
from examples.mixture import mixture_advantages, mixture_counts, mixture_objective, only_rows
from rlprims import algorithms, corrections, losses
from rlprims.algorithms import (
    PRESETS,
    Algorithm,
    LossTerm,
    estimate_advantages,
    policy_objective,
    shape_scores,
    token_weights,
    use,
)
from rlprims.grouping import dense_ids
from rlprims.testing._cases import make_batch

SEEN = LossTerm(coefficient=0.3, loss=use(losses.nll), mask="observation_mask", over="term")
SPECS = [
    algorithms.grpo(),
    algorithms.gspo().replace(corrections=[corrections.tis]),
    algorithms.reinforce().replace(loss_terms=[SEEN]),
]


def batch(seed: int) -> dict[str, Tensor]:
    """Four groups, by the specs 0, 1, 2 and 0."""
    data = dict(make_batch(seed).data)
    counted = ("_tokens", "trajectory_ids", "valid_rows")
    data = {name: x for name, x in data.items() if not name.endswith(counted)}
    data["spec_ids"] = data["group_ids"] % 3
    return data


def whole(specs: list[Algorithm], data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    counts = mixture_counts(specs, data)
    x = data["log_probs"].clone().requires_grad_()
    value = mixture_objective(specs, {**data, **counts.columns, **counts.totals, "log_probs": x})
    (gradient,) = torch.autograd.grad(value, x)
    return value.detach(), gradient


def test_its_examples() -> None:
    assert doctest.testmod(mixture) == (0, 8)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo", "rloo", "cispo", "kl_cov"])
def test_one_algorithm_for_all_rows_is_the_usual_batch(name: str) -> None:
    algorithm = PRESETS[name]().replace(score_shaping=[])
    algorithm = algorithm.replace(loss_terms=[term for term in algorithm.loss_terms if term.tokens is None])
    data = batch(0)
    value, gradient = whole([algorithm] * 3, data)
    x = data["log_probs"].clone().requires_grad_()
    expected = policy_objective(algorithm, {**data, "log_probs": x})
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x)[0], rtol=1e-12, atol=1e-12)


def test_a_row_learns_as_its_algorithm_says_and_by_no_other() -> None:
    """The gradient of each row is what its algorithm gives it in the whole batch; another's terms are not in it."""
    data = batch(1)
    _, gradient = whole(SPECS, data)
    for number, spec in enumerate(SPECS):
        rows = data["spec_ids"] == number
        x = data["log_probs"].clone().requires_grad_()
        alone = spec.replace(loss_terms=[]) if number == 2 else spec
        update = {**data, "log_probs": x}
        policy_objective(alone, update | token_weights(alone, data)).backward()
        mask = data["response_mask"] & rows[:, None]
        torch.testing.assert_close(gradient[mask], x.grad[mask], rtol=1e-12, atol=1e-12)
    seen = data["observation_mask"] & (data["spec_ids"] == 2)[:, None]
    assert torch.equal(gradient[seen], torch.full_like(gradient[seen], -0.3 / int(seen.sum())))
    assert not gradient[data["observation_mask"] & (data["spec_ids"] != 2)[:, None]].any()


def test_any_split_gives_the_step() -> None:
    for seed in range(4):
        data = batch(seed)
        value, gradient = whole(SPECS, data)
        counts = mixture_counts(SPECS, data)
        part_of = torch.randint(3, (8,), generator=torch.Generator().manual_seed(seed))
        total = torch.zeros((), dtype=torch.float64)
        for part in range(3):
            rows = part_of == part
            micro: dict[str, Any] = {name: x[rows] for name, x in {**data, **counts.columns}.items()}
            micro |= {"group_ids": dense_ids(micro["group_ids"]), **counts.totals}
            x = micro["log_probs"].clone().requires_grad_()
            loss = mixture_objective(SPECS, {**micro, "log_probs": x})
            (found,) = torch.autograd.grad(loss, x)
            total += loss.detach()
            torch.testing.assert_close(found, gradient[rows], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(total, value, rtol=1e-12, atol=1e-12)


ESTIMATED = sorted(set(PRESETS) - {"gdpo"})


@pytest.mark.parametrize("name", ESTIMATED)
def test_advantages_are_those_of_the_rows_alone(name: str) -> None:
    """Statistics of the batch, too, are of the algorithm's own rows."""
    other, spec = algorithms.reinforce(), PRESETS[name]()
    data = batch(2)
    data["spec_ids"] = (data["spec_ids"] == 0).long()
    got = mixture_advantages([other, spec], data)["advantages"]
    for number, by in enumerate((other, spec)):
        rows = data["spec_ids"] == number
        alone = {x_name: x[rows] for x_name, x in data.items()}
        alone["group_ids"] = dense_ids(alone["group_ids"])
        expected = estimate_advantages(by, alone | shape_scores(by, alone))["advantages"]
        torch.testing.assert_close(got[rows], expected, rtol=1e-9, atol=1e-9)


def test_two_prompts_learn_by_two_algorithms() -> None:
    """A bandit with two prompts; the second is trained by what the first's algorithm could not learn from."""
    task = tabular.bandit([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    specs = [algorithms.dr_grpo(), algorithms.sft().replace(token_selection=algorithms.is_correct)]
    generator = torch.Generator().manual_seed(0)
    logits = task.uniform().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.2)
    for _ in range(30):
        data = task.sample(logits.detach(), 16, generator)
        data["spec_ids"] = data["group_ids"]
        data |= mixture_advantages(specs, data)
        counts = mixture_counts(specs, data)
        data["log_probs"] = task.log_probs(logits, data["group_ids"], data["responses"], data["response_mask"])
        optimizer.zero_grad()
        mixture_objective(specs, {**data, **counts.columns, **counts.totals}).backward()
        optimizer.step()
    assert float(task.probabilities(logits.detach())[0, 1]) > 0.7
    assert float(task.probabilities(logits.detach())[1, 2]) > 0.7


def test_rows_that_were_left_out_stay_so() -> None:
    data = {"response_mask": torch.ones(3, 1, dtype=torch.bool), "valid_rows": torch.tensor([True, False, True])}
    assert only_rows(data, torch.tensor([True, True, False]))["valid_rows"].tolist() == [True, False, False]


def test_mixture_objective_asks_for_missing_totals() -> None:
    data = batch(0)
    with pytest.raises(ValueError, match=r"the batch has no totals: add mixture_counts"):
        mixture_objective(SPECS, data)
    with pytest.raises(ValueError, match=r"spec_ids has \[0, 1, 2\], expected numbers in \[0, 2\)"):
        mixture_counts(SPECS[:2], data)
    del data["spec_ids"]
    with pytest.raises(ValueError, match=r"the batch has no spec_ids; it has"):
        mixture_counts(SPECS, data)
