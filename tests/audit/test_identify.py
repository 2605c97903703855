"""Numbers that plain torch code computed, as a stranger's trainer would, get the names of their formulas."""

import pytest
import torch
from torch import Tensor

from rlprims import audit

T = Tensor


def rollouts(groups: int = 4, size: int = 4, width: int = 5, seed: int = 0) -> dict[str, T]:
    """Scores of 0 and 1, ragged responses, and a policy that has moved."""
    generator = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    old = -torch.rand(rows, width, generator=generator) - 0.1
    return {
        "scores": (torch.arange(rows) % size > torch.arange(rows) // size % (size - 1)).float(),
        "group_ids": torch.arange(rows) // size,
        "response_mask": torch.arange(width) < lengths,
        "old_log_probs": old,
        "log_probs": old + 0.4 * torch.randn(rows, width, generator=generator),
        "ref_log_probs": old + 0.4 * torch.randn(rows, width, generator=generator),
    }


def centred(batch: dict[str, T], *, eps: float = 1e-4, correction: int = 1) -> T:
    """GRPO's advantages by TRL's line: (r - mean) / (std + eps), one number per row."""
    grouped = batch["scores"].view(-1, 4)
    std = grouped.std(1, keepdim=True, correction=correction)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / (std + eps)
    return advantages.view(-1, 1) * batch["response_mask"]


def clipped(batch: dict[str, T], low: float = 0.2, high: float = 0.28) -> T:
    ratio = (batch["log_probs"] - batch["old_log_probs"]).exp()
    advantages = batch["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages) * batch["response_mask"]


def step(**more: T) -> dict[str, T]:
    batch = rollouts()
    batch["advantages"] = centred(batch)
    return {**batch, **more}


def gradients_of(batch: dict[str, T], loss: object) -> dict[str, T]:
    """What a hook reads: the gradient of the step's loss by the log-probs."""
    batch = {**batch, "log_probs": batch["log_probs"].clone().requires_grad_()}
    (gradient,) = torch.autograd.grad(loss(batch), batch["log_probs"])  # type: ignore[operator]
    return {**batch, "gradients": gradient}


def without_scores(batch: dict[str, T]) -> dict[str, T]:
    return {name: x for name, x in batch.items() if name != "scores"}


@pytest.mark.parametrize(
    ("eps", "correction", "said"),
    [(1e-4, 1, "advantage.grpo(eps=0.0001)"), (1e-4, 0, "advantage.grpo(ddof=0, eps=0.0001)")],
)
def test_std_and_eps_of_grpo(eps: float, correction: int, said: str) -> None:
    batch = rollouts()
    batch["advantages"] = centred(batch, eps=eps, correction=correction)
    assert audit.identify(batch)["advantages"].said == said


def test_a_std_over_the_batch_is_said() -> None:
    batch = rollouts(seed=1)
    scores = batch["scores"]
    batch["advantages"] = ((scores - scores.mean()) / (scores.std() + 1e-6))[:, None] * batch["response_mask"]
    assert "over all rows, not the group" in audit.identify(batch)["advantages"].said


def test_what_a_batch_cannot_tell_is_named_with_the_row_that_can() -> None:
    batch = rollouts()
    batch["advantages"] = centred(batch)
    found = audit.identify(batch)["advantages"]
    assert found.undecided["singleton"] == ("raw",)
    assert "a group of one response would decide" in str(found)
    one = {name: torch.cat([x, x[:1]]) for name, x in batch.items()}
    one["group_ids"][-1], one["scores"][-1] = 9, 1.0
    one["advantages"][-1] = 0.0
    assert "singleton" not in audit.identify(one)["advantages"].undecided


def test_a_critic_that_still_gives_zero_is_said() -> None:
    batch = rollouts()
    mask = batch["response_mask"]
    returns = batch["scores"][:, None].expand(mask.shape)[mask]  # of every token, with gamma = 1
    whitened = torch.zeros(mask.shape)
    whitened[mask] = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    found = audit.identify({**batch, "advantages": whitened, "values": torch.zeros(mask.shape)})["advantages"]
    assert found.said == "advantage.reinforce_pp"
    (other,) = found.undecided["the formula"]
    assert other.startswith("advantage.whiten of advantage.gae")
    assert "values are not all 0 would decide" in str(found)
    values = torch.zeros(mask.shape).index_fill_(1, torch.tensor([0]), 0.1)
    assert (
        "the formula" not in audit.identify({**batch, "advantages": whitened, "values": values})["advantages"].undecided
    )


def test_a_wrong_row_is_shown_beside_the_nearest_formula() -> None:
    batch = rollouts()
    batch["advantages"] = centred(batch)
    batch["advantages"][6, 0] += 0.5
    found = audit.identify(batch)["advantages"]
    assert not found.parts
    assert found.said.startswith("none; the nearest is advantage.")
    assert "row 6, group 1, token 0" in found.said


def test_losses_and_their_mean_over_micro_batches() -> None:
    """Two means of 8 rows each, then their mean: by hand the distance to the step's mean."""
    batch = step(micro_batches=torch.arange(16) // 8)
    per_token, mask = clipped(batch), batch["response_mask"]
    means = [per_token[part].sum() / mask[part].sum() for part in (slice(0, 8), slice(8, 16))]
    loss, of_step = sum(means) / 2, per_token.sum() / mask.sum()
    found = audit.identify(without_scores({**batch, "losses": per_token, "loss": torch.as_tensor(loss)}))
    assert found["loss"].said == "losses.clipped_surrogate(clip_high=0.28)"
    apart = abs(float(loss - of_step) / float(of_step))
    assert (
        found["mean"].said
        == f"losses.token_mean of each micro-batch, then the mean of these: {apart:.1%} from the step's"
    )


def test_a_gradient_shows_loss_kl_and_mean_at_once() -> None:
    def loss(batch: dict[str, T]) -> T:
        gap = batch["ref_log_probs"] - batch["log_probs"]
        per_token = clipped(batch) + 0.03 * (gap.exp() - gap - 1)
        lengths = batch["response_mask"].sum(1)
        return ((per_token * batch["response_mask"]).sum(1) / lengths).mean()

    found = audit.identify(without_scores(gradients_of(step(), loss)))
    assert found["loss"].said == "losses.clipped_surrogate(clip_high=0.28) + 0.03 x losses.kl(value='k3')"
    assert found["mean"].said == "losses.seq_mean_token_mean"
    algorithm = found.algorithm
    assert algorithm.policy_loss.hyperparameters["clip_high"] == 0.28
    assert algorithm.loss_terms[0].coefficient == pytest.approx(0.03, rel=1e-5)


def test_a_kl_whose_gradient_is_not_its_own() -> None:
    """k3 as a value, with k2's gradient: the gradient is that of k2, so the value cannot be told from it."""

    def loss(batch: dict[str, T]) -> T:
        gap = batch["log_probs"] - batch["ref_log_probs"]
        per_token = (clipped(batch) + 0.1 * gap.square() / 2) * batch["response_mask"]
        return per_token.sum() / batch["response_mask"].sum()

    found = audit.identify(without_scores(gradients_of(step(), loss)))
    assert "0.1 x losses.kl(value='k2')" in found["loss"].said
    assert found["mean"].said == "losses.token_mean"


def test_a_constant_length_is_found() -> None:
    def loss(batch: dict[str, T]) -> T:
        return clipped(batch).sum() / (len(batch["log_probs"]) * 1500)

    found = audit.identify(without_scores(gradients_of(step(), loss)))
    assert found["mean"].said == "losses.seq_mean_token_sum_norm(length=1500.0)"


def test_a_loss_that_was_divided_twice_has_a_factor() -> None:
    """Gradient accumulation that divides by the number of micro-batches, after a mean that is of the step."""

    def loss(batch: dict[str, T]) -> T:
        return clipped(batch).sum() / batch["response_mask"].sum() / 8

    found = audit.identify(without_scores(gradients_of(step(), loss)))
    assert found["loss"].said.startswith("0.125 x losses.clipped_surrogate")


def test_truncated_importance_weights() -> None:
    batch = step()
    batch["rollout_log_probs"] = batch["old_log_probs"] + 0.8 * torch.randn(
        16, 5, generator=torch.Generator().manual_seed(3)
    )
    truncated = (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=2.0)
    found = audit.identify(without_scores({**batch, "losses": clipped(batch) * truncated}))
    weights = "corrections.importance_weights(action='truncate', high=2.0, level='token')"
    assert found["loss"].said == f"losses.clipped_surrogate(clip_high=0.28) x {weights}"


def test_values_of_a_user_are_tried() -> None:
    batch = without_scores(step())
    batch["losses"] = clipped(batch, high=0.37)
    assert not audit.identify(batch)["loss"].parts
    found = audit.identify(batch, options={"clip_high": [0.37]})
    assert found["loss"].said == "losses.clipped_surrogate(clip_high=0.37)"


def test_the_algorithm_is_yaml_that_computes_the_step_again() -> None:
    batch = step()
    batch["losses"] = clipped(batch)
    batch["loss"] = batch["losses"].sum() / batch["response_mask"].sum()
    algorithm = audit.identify(batch).algorithm
    again = type(algorithm).from_yaml(algorithm.to_yaml())
    assert again == algorithm
    assert again.group_size == 4


def test_what_is_missing_is_named() -> None:
    batch = rollouts()
    with pytest.raises(ValueError, match="expected advantages with scores or rewards, or losses"):
        audit.identify(batch)
    with pytest.raises(ValueError, match=r"expected response_mask \(B, T\), got None"):
        audit.identify({"advantages": torch.zeros(2, 2)})
    batch["advantages"] = torch.zeros(16, 5)
    assert "all advantages are 0" in str(audit.identify(batch))


def test_the_names_and_shapes_of_trl_and_verl_are_read() -> None:
    batch = rollouts()
    trl = {
        "completion_mask": batch["response_mask"].int(),
        "scores": batch["scores"],
        "group_ids": [f"prompt {number}" for number in batch["group_ids"].tolist()],
        "advantages": centred(batch)[:, 0],
    }
    assert audit.identify(trl)["advantages"].said == "advantage.grpo(eps=0.0001)"
    last = batch["response_mask"].cumsum(1) == batch["response_mask"].sum(1, keepdim=True)
    rewards = torch.where(last & batch["response_mask"], batch["scores"][:, None], 0.0)
    verl = {
        "response_mask": batch["response_mask"].long(),
        "token_level_rewards": rewards,
        "uid": batch["group_ids"],
        "advantages": centred(batch, eps=1e-6),
    }
    assert audit.identify(verl)["advantages"].said == "advantage.grpo"


def test_a_wrong_shape_and_a_missing_column_are_named() -> None:
    batch = step()
    with pytest.raises(ValueError, match=r"losses has shape \(16, 4\), expected \(16, 5\), as response_mask"):
        audit.identify({**batch, "losses": torch.zeros(16, 4)})
    del batch["log_probs"], batch["scores"]
    with pytest.raises(ValueError, match=r"expected log_probs \(B, T\) for the losses"):
        audit.identify({**batch, "losses": torch.ones(16, 5)})
