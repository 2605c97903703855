"""Every preset and dialect makes a step; what ``identify`` says of its numbers computes the same numbers again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import algorithms, audit
from rlprims.algorithms import DIALECTS, PRESETS, Algorithm
from rlprims.testing._cases import make_batch

CASES = [(name, None) for name in PRESETS] + [(name, dialect) for dialect, names in DIALECTS.items() for name in names]
INPUTS = (
    "response_mask old_log_probs log_probs rollout_log_probs ref_log_probs teacher_log_probs group_ids values "
    "new_values baseline_scores sum_pi_squared turn_ids state_ids action_ids tree_ids turn_rewards process_rewards "
    "continuation_values entropies observation_mask expert_mask topk_log_probs teacher_topk_log_probs"
)


def made(name: str, dialect: str | None) -> Algorithm:
    return PRESETS[name](dialect=dialect) if dialect else PRESETS[name]()


def step_of(spec: Algorithm, rows: int, width: int) -> dict[str, Tensor]:
    """Random rollouts under a policy that has moved, and what each stage of the algorithm makes of them."""
    batch = make_batch(0, torch.float64, rows, width).data
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    data = {name: batch[name] for name in INPUTS.split()}
    right = torch.rand(rows, generator=generator) < 0.5
    data["scores"] = right.double() + 0.1 * normal(rows) * (torch.arange(rows) % 2)
    data |= {name: torch.rand(rows, generator=generator).double() for name in spec.components}
    data["log_probs"] = data["old_log_probs"] + 0.3 * normal(rows, width)
    data["rollout_log_probs"] = data["old_log_probs"] + 0.05 * normal(rows, width)
    data["teacher_mask"] = data["response_mask"] & (torch.rand(rows, width, generator=generator) < 0.5)
    data |= algorithms.component_scores(spec, data)
    data["shaped_scores"] = data["scores"]
    data["advantages"] = algorithms.estimate_advantages(spec, data)["advantages"]
    return data | algorithms.token_weights(spec, data, generator=generator)


def gradient(spec: Algorithm, data: dict[str, Tensor]) -> Tensor:
    """Of the step's objective, by the log-probs."""
    log_probs = data["log_probs"].clone().requires_grad_()
    objective = algorithms.policy_objective(spec, {**data, "log_probs": log_probs})
    if not objective.requires_grad:
        return torch.zeros_like(log_probs)
    return torch.autograd.grad(objective, log_probs, materialize_grads=True)[0]


def read(spec: Algorithm, data: dict[str, Tensor], **results: Any) -> dict[str, Any]:
    """The columns that a trainer has; a selection that is drawn cannot be computed again, so its weights are given."""
    selection = spec.token_selection
    drawn = selection is not None and "generator" in selection.hyperparameters
    return {name: x for name, x in data.items() if name != "loss_weights" or drawn} | results


def weighed(again: Algorithm, columns: dict[str, Any]) -> dict[str, Any]:
    weights = algorithms.token_weights(again, columns)
    return {**columns, **weights, **{name: x for name, x in columns.items() if name == "loss_weights"}}


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def check(name: str, dialect: str | None, rows: int, width: int) -> None:
    spec = made(name, dialect)
    data = step_of(spec, rows, width)
    mask = data["response_mask"]
    per_token = algorithms.policy_losses(spec, data).detach()
    loss = spec.aggregation({**data, "losses": per_token})
    results = {"losses": per_token, "loss": loss} if per_token.any() else {}
    again = audit.identify(read(spec, data, **results)).algorithm
    assert_near(algorithms.estimate_advantages(again, data)["advantages"] * mask, data["advantages"] * mask)
    if not results:
        return
    losses_again = algorithms.policy_losses(again, weighed(again, read(spec, data)))
    assert_near(losses_again * mask, per_token * mask)
    assert_near(again.aggregation({**data, "losses": losses_again}), loss)


def check_gradient(name: str, dialect: str | None, rows: int, width: int) -> bool:
    """Whether the step has a gradient by ``log_probs``, which is then named; a loss of several tokens has none."""
    spec = made(name, dialect)
    data = step_of(spec, rows, width)
    wanted = gradient(spec, data)
    if not wanted.any():
        assert "topk_log_probs" in spec.loss_needs
        return False
    columns = read(spec, data, gradients=wanted)
    advantage_inputs = {"scores", "shaped_scores"}
    found = audit.identify(
        {name: x for name, x in columns.items() if name not in advantage_inputs or "is_correct" in str(spec)}
    )
    again = found.algorithm
    assert_near(
        gradient(again, weighed(again, read(spec, data))) * data["response_mask"], wanted * data["response_mask"]
    )
    return True


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "w_reinforce"])
def test_a_step_is_named(name: str) -> None:
    check(name, None, 24, 6)
    check_gradient(name, None, 24, 6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dialect"), CASES)
def test_the_step_of_every_preset_is_named(name: str, dialect: str | None) -> None:
    """The results of a large step, and of a preset the gradient of a small one; ``benchmarks/audit.py`` has all."""
    check(name, dialect, 64, 40)
    if dialect is None:
        check_gradient(name, dialect, 24, 6)
