"""Wrong primitives are caught by name: each makes a mistake that a peer has made, or that one law exists to find."""

import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.autograd.function import once_differentiable

from rlprims import advantage, losses
from rlprims.layout import sequence_lengths, sequence_sum, to_tokens
from rlprims.testing import (
    check,
    check_advantage,
    check_aggregation,
    check_filter,
    check_logits,
    check_loss,
    check_reward,
    check_selector,
    check_transforms,
)
from rlprims.types import token_wise


def group_mean_over_padding(rewards, group_ids, response_mask, cu_seqlens=None):
    """The group's mean over all positions, padding included."""
    same = (group_ids[:, None] == group_ids[None, :]).to(rewards.dtype)
    s = sequence_sum(rewards, response_mask, cu_seqlens)
    per_row = rewards.sum(-1) if cu_seqlens is None else s
    return to_tokens(s - same @ per_row / same.sum(-1), response_mask, cu_seqlens)


def standard_score(rewards, group_ids, response_mask, cu_seqlens=None):
    """Divides a constant group's rounding residue by its own size."""
    same = (group_ids[:, None] == group_ids[None, :]).to(rewards.dtype)
    s = sequence_sum(rewards, response_mask, cu_seqlens)
    mean = same @ s / same.sum(-1)
    deviation = (same @ (s - mean).square() / same.sum(-1)).sqrt()
    return to_tokens((s - mean) / (deviation + 1e-9), response_mask, cu_seqlens)


def discounted_through_tools(rewards, response_mask, cu_seqlens=None, *, gamma=0.9):
    """Masked tokens discount."""
    weights = gamma ** torch.arange(rewards.shape[-1], dtype=rewards.dtype)
    return torch.where(response_mask, rewards * response_mask * weights, 0.0)


def mask_after_exp(log_probs, old_log_probs, advantages, response_mask, cu_seqlens=None):
    """exp first, mask by multiplication after."""
    return -(log_probs - old_log_probs).exp() * advantages * response_mask


def output_cap(log_probs, ref_log_probs, response_mask, cu_seqlens=None):
    """A cap on the value and none on the input of exp."""
    x = torch.where(response_mask, ref_log_probs - log_probs, 0.0)
    return (x.exp() - 1 - x).clamp(max=10.0)


def old_policy_in_the_graph(log_probs, old_log_probs, advantages, response_mask, cu_seqlens=None):
    """No stop-gradient."""
    x = torch.where(response_mask, log_probs - old_log_probs, 0.0).clamp(-20, 20)
    return -x.exp() * torch.where(response_mask, advantages, 0.0)


def dead_option(log_probs, advantages, response_mask, cu_seqlens=None, *, clip=0.2):
    """An option that is never read."""
    return losses.reinforce(log_probs, advantages, response_mask, cu_seqlens)


def local_token_mean(losses, response_mask, cu_seqlens=None, totals=None):
    """Counts its own tokens although it is told the step's."""
    kept = torch.where(response_mask, losses, 0.0)
    return kept.sum() / response_mask.sum().clamp(min=1)


def mean_of_all_rows(losses, response_mask, cu_seqlens=None, totals=None):
    """A row without tokens counts as a sequence."""
    lengths = sequence_lengths(response_mask, cu_seqlens)
    means = sequence_sum(losses, response_mask, cu_seqlens) / lengths.clamp(min=1)
    return means.sum() / max(len(means), 1)


def detached_zero(losses, response_mask, cu_seqlens=None):
    """Returns early, off the graph, when nothing is valid."""
    if not response_mask.any():
        return torch.zeros(())
    return torch.where(response_mask, losses, 0.0).sum()


def at_last_column(scores, response_mask, cu_seqlens=None):
    """The reward at column −1, on padding."""
    placed = torch.zeros(response_mask.shape, dtype=scores.dtype)
    if cu_seqlens is None:
        placed[:, -1] = scores
    else:
        placed[cu_seqlens[1:] - 1] = scores
    return placed


def penalty_in_place(rewards, response_mask, cu_seqlens=None, *, penalty=0.5):
    """Writes to the caller's rewards."""
    rewards -= penalty
    return rewards * response_mask


def flipped(rewards, group_ids, response_mask, cu_seqlens=None):
    """The group's mean minus the score: nothing but the sign is wrong."""
    return -advantage.grpo(rewards, group_ids, response_mask, cu_seqlens)


def positive_std(scores, group_ids):
    """std > 0 keeps [0.1] * 7."""
    same = group_ids[:, None] == group_ids[None, :]
    keep = [scores[rows].double().std(correction=0) > 0 for rows in same]
    return torch.stack(keep) if keep else torch.zeros(0, dtype=torch.bool)


def quantile_over_padding(entropies, response_mask, cu_seqlens=None):
    """The quantile of all positions, padding included."""
    return response_mask & (entropies >= entropies.flatten().quantile(0.8))


def best_rows(scores, group_ids):
    """Keeps rows, not groups."""
    return scores.float() > 0


def bf16_entropy(logits, *, temperature=1.0):
    """Reduced in the dtype of the logits, and 0 · log 0 is NaN."""
    p = (logits / temperature).softmax(-1)
    return -(p * p.log()).sum(-1)


class Exp(torch.autograd.Function):
    """exp by hand, once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class ExpWithConstantSlope(torch.autograd.Function):
    """exp whose gradient is a constant to further derivatives, and whose jvp has the wrong sign."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].detach().exp()

    @staticmethod
    def jvp(ctx, tangent):
        return -tangent * ctx.saved_tensors[0].exp()


def gradient_by_hand(log_probs, response_mask, cu_seqlens=None):
    """An autograd.Function that only the first derivative of autograd takes."""
    return torch.where(response_mask, Exp.apply(torch.where(response_mask, log_probs, 0.0)), 0.0)


def constant_slope(log_probs, response_mask, cu_seqlens=None):
    """An autograd.Function whose other derivatives are wrong."""
    return torch.where(response_mask, ExpWithConstantSlope.apply(torch.where(response_mask, log_probs, 0.0)), 0.0)


def only_valid_tokens(log_probs, response_mask, cu_seqlens=None):
    """Its shapes depend on values."""
    return torch.zeros_like(log_probs).masked_scatter(response_mask, log_probs[response_mask])


def another_way_for_large_batches(log_probs, response_mask, cu_seqlens=None):
    """A constant of the library decides which formula runs."""
    x = torch.where(response_mask, log_probs, 0.0)
    return x.square() if x.shape[0] < 50 else x * x


def through_numpy(rewards, response_mask, cu_seqlens=None):
    """Reads the memory of its arguments."""
    return torch.from_numpy(np.where(response_mask.numpy(), rewards.detach().numpy(), 0.0))


def floats_of_no_dtype(log_probs, response_mask, cu_seqlens=None):
    """A tensor made of Python's floats, in whatever dtype is the default."""
    return torch.where(response_mask, log_probs, torch.zeros(response_mask.shape))


def matrix_product(log_probs, advantages, response_mask, cu_seqlens=None):
    """Autocast computes it in bfloat16."""
    x, y = (torch.where(response_mask, t.float(), 0.0).flatten() for t in (log_probs, advantages))
    return (x @ y).expand(response_mask.shape) * response_mask


def bytes_of_the_mask(log_probs, response_mask, cu_seqlens=None):
    """A True is any byte but 0."""
    return torch.where(response_mask, log_probs, 0.0) * response_mask.view(torch.uint8)


def any_other_level(log_probs, response_mask, cu_seqlens=None, *, level: Literal["token", "sequence"] = "token"):
    """What is not the one is the other."""
    x = torch.where(response_mask, log_probs, 0.0)
    return x if level == "token" else to_tokens(sequence_sum(x, response_mask, cu_seqlens), response_mask, cu_seqlens)


@token_wise
def mean_of_the_sequence(log_probs, response_mask, cu_seqlens=None):
    """Depends on the whole sequence, and declares that it does not."""
    lengths = sequence_lengths(response_mask, cu_seqlens).clamp(min=1)
    return to_tokens(sequence_sum(log_probs, response_mask, cu_seqlens) / lengths, response_mask, cu_seqlens)


def loop_over_sequences(log_probs, response_mask, cu_seqlens=None):
    """Packed, a loop over lengths that it reads."""
    x = torch.where(response_mask, log_probs, 0.0)
    if cu_seqlens is None:
        return x.cumsum(-1) * response_mask
    rows = torch.cat([part.cumsum(-1) for part in x.split(cu_seqlens.diff().tolist())])
    return rows * response_mask


def branch_on_a_value(log_probs, response_mask, cu_seqlens=None):
    """Packed, another way if the first sequence has two tokens or more."""
    x = torch.where(response_mask, log_probs, 0.0)
    return x + 0.0 if cu_seqlens is not None and cu_seqlens[1] > 1 else x


def one_length(log_probs, response_mask, cu_seqlens=None):
    """Packed, a loop over the tokens, unrolled."""
    x = torch.where(response_mask, log_probs, 0.0)
    return x if cu_seqlens is None else torch.stack([x[i] for i in range(x.shape[0])])


THOROUGH = [
    (constant_slope, ["every second derivative is right"]),
    (another_way_for_large_batches, ["exports with a dynamic batch"]),
    (one_length, ["one graph for all packed batches", "exports packed with a dynamic batch"]),
    (through_numpy, ["replicated tensors work", "row sharded tensors work"]),
]

COMPILED = [
    (another_way_for_large_batches, ["one graph for all batch sizes"]),
    (detached_zero, ["one graph for all batch sizes"]),
    (loop_over_sequences, ["fake tensors are enough"]),
    (only_valid_tokens, ["fake tensors are enough"]),
    (through_numpy, ["fake tensors are enough"]),
    (branch_on_a_value, ["packed tokens compile"]),
]

TRANSFORMED = ["func grad is autograd", "jvp is the transpose of grad", "vmap is a loop", "vmap of grad is a loop"]

WRONG = [
    (check_advantage, group_mean_over_padding, ["padding changes nothing", "packed equals padded", "masked is absent"]),
    (check_advantage, standard_score, ["equal rewards give zero"]),
    (check_advantage, flipped, ["a higher score never gets a lower advantage"]),
    (check_advantage, discounted_through_tools, ["packed equals padded", "padding changes nothing"]),
    (check_loss, mask_after_exp, ["masked is absent", "far log ratios are finite"]),
    (check_loss, output_cap, ["far log ratios are finite"]),
    (check_loss, old_policy_in_the_graph, ["constants get no gradient"]),
    (check_aggregation, local_token_mean, ["parts sum to the whole"]),
    (check_aggregation, mean_of_all_rows, ["parts sum to the whole", "rows without tokens do not count"]),
    (check_aggregation, detached_zero, ["nothing valid gives zero", "no value is read by the host"]),
    (check_reward, at_last_column, ["zero outside the mask", "padding changes nothing", "empty batches are legal"]),
    (check_reward, penalty_in_place, ["inputs are untouched"]),
    (check_selector, quantile_over_padding, ["padding changes nothing", "packed equals padded", "masked is absent"]),
    (check_filter, positive_std, ["equal scores are dropped"]),
    (check_filter, best_rows, ["groups are kept whole"]),
    (check_logits, bf16_entropy, ["banned tokens are legal", "float32 whatever comes in"]),
    (check_loss, gradient_by_hand, [*TRANSFORMED, "gradients have gradients", "second derivative is right"]),
    (check_loss, constant_slope, ["jvp is the transpose of grad", "second derivative is right"]),
    (check_loss, only_valid_tokens, ["vmap is a loop", "vmap of grad is a loop"]),
    (check_reward, through_numpy, ["vmap is a loop", "subclasses pass through"]),
    (check_loss, floats_of_no_dtype, ["settings of torch change nothing"]),
    (check_loss, matrix_product, ["settings of torch change nothing"]),
    (check_loss, bytes_of_the_mask, ["any nonzero byte is true"]),
    (check_loss, any_other_level, ["unknown choices are refused"]),
    (check_loss, mean_of_the_sequence, ["tokens are independent"]),
]


@pytest.mark.parametrize(("check", "fn", "laws"), WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_a_wrong_primitive_is_caught(check: Callable[..., None], fn: Callable[..., Any], laws: list[str]) -> None:
    assert_caught(check, fn, laws, "quick")


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "laws"), COMPILED, ids=[fn.__name__ for fn, _ in COMPILED])
def test_laws_catch_functions_that_do_not_compile(fn: Callable[..., Any], laws: list[str]) -> None:
    assert_caught(check_transforms, fn, laws, "usual")


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "laws"), THOROUGH, ids=[fn.__name__ for fn, _ in THOROUGH])
def test_laws_catch_by_the_thorough_ones(fn: Callable[..., Any], laws: list[str]) -> None:
    assert_caught(check_transforms, fn, laws, "thorough")


def assert_caught(check: Callable[..., None], fn: Callable[..., Any], laws: list[str], effort: str) -> None:
    inputs = {"inputs": ("log_probs", "losses")} if check is check_transforms else {}
    with pytest.raises(AssertionError) as caught:
        check(fn, effort=effort, **inputs)
    report = str(caught.value)
    assert report.startswith(f"{fn.__name__} breaks ")
    for law in laws:
        assert re.search(rf"\n  {law}: |for the same cause: .*\b{law}\b", report)


def test_an_option_without_effect_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"hyperparameters matter: clip=0\.1 changes nothing"):
        check_loss(dead_option, effort="quick", alternatives={"clip": 0.1})


def test_the_report_says_law_argument_and_difference() -> None:
    with pytest.raises(AssertionError) as caught:
        check_advantage(group_mean_over_padding, effort="quick")
    assert "masked is absent: the value with nan outside the mask of rewards (padded) differs by up to inf at [" in str(
        caught.value
    )


def report_on(fn: Callable[..., Any], check: Callable[..., None] = check_loss, effort: str = "quick") -> list[str]:
    with pytest.raises(AssertionError) as caught:
        check(fn, effort=effort)
    return str(caught.value).splitlines()


def mean_of_rows(log_probs, old_log_probs, response_mask):
    """Of whole rows, and without ``cu_seqlens``."""
    x = torch.where(response_mask, log_probs - old_log_probs.detach(), 0.0)
    return torch.where(response_mask, x.sum(-1, keepdim=True), 0.0)


def test_each_cause_is_reported_once() -> None:
    report = report_on(mean_of_rows)
    [line] = [line for line in report if "cu_seqlens" in line]
    assert "packed equals padded" in line
    assert "masked is absent" in line
    assert report[report.index(line) - 1] == "missing layouts and transforms:"


def nan_at_zero(log_probs, response_mask, cu_seqlens=None):
    """0/0 on every token."""
    return losses.nll(log_probs, response_mask, cu_seqlens) * (0 * log_probs.detach() / 0)


def test_nan_beside_nan_is_one_finding() -> None:
    [line] = [line for line in report_on(nan_at_zero) if "a result is NaN for data that are finite" in line]
    assert "rows may be permuted" in line
    assert "subclasses pass through" in line


def test_wrong_numbers_come_first_and_unfriendly_errors_last() -> None:
    report = report_on(old_policy_in_the_graph)
    headings = [line for line in report if line.endswith(":") and not line.startswith(" ")]
    assert headings[1:] == ["wrong numbers:", "gradients with respect to data:", "unfriendly errors:"]
    _, heading, worst, *_ = report_on(flipped, check_advantage)
    assert heading == "wrong numbers:"
    assert worst.startswith("  a higher score never gets a lower advantage: scores of ")


def test_derivatives_by_rewards_have_their_own_heading() -> None:
    def through_a_hand_written_gradient(rewards, response_mask, cu_seqlens=None):
        return torch.where(response_mask, ExpWithConstantSlope.apply(rewards), 0.0)

    report = report_on(through_a_hand_written_gradient, check_reward)
    headings = [i for i, line in enumerate(report) if line.endswith(":") and not line.startswith(" ")]
    at = report.index("gradients with respect to data:")
    last = min([i for i in headings if i > at], default=len(report))
    assert "jvp is the transpose of grad" in "\n".join(report[at:last])


def test_a_loss_of_single_tokens_needs_no_cu_seqlens() -> None:
    def surrogate(log_probs, advantages, response_mask):
        return torch.where(response_mask, -advantages.detach() * log_probs, 0.0).float().to(log_probs.dtype)

    assert not any("cu_seqlens" in line for line in report_on(surrogate))


@pytest.mark.slow
def test_traces_of_the_compiler_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        report_on(mask_after_exp, effort="usual")
    assert not [record for record in caplog.records if record.name == "torch.__trace"]


def test_a_name_outside_the_vocabulary_is_refused() -> None:
    def loss(logp, response_mask, cu_seqlens=None):
        return logp

    with pytest.raises(ValueError, match="'logp' before \\* is not in the vocabulary"):
        check_loss(loss)


@pytest.mark.slow
def test_an_exemption_must_be_of_a_law_that_binds_and_breaks() -> None:
    with pytest.raises(ValueError, match="no such law"):
        check_loss(losses.reinforce, exempt={"no such law": "reason"})
    with pytest.raises(AssertionError, match="masked is absent: the law holds, so it needs no exemption"):
        check_loss(losses.reinforce, effort="quick", exempt={"masked is absent": "reason"})


def test_an_exemption_of_a_law_of_another_effort_is_left_alone() -> None:
    check_transforms(at_rest, effort="quick", exempt={"exports with a dynamic batch": "checked with effort='thorough'"})


def at_rest(log_probs, response_mask):
    return torch.where(response_mask, log_probs, 0.0)


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="kind='losses', expected 'advantage' or 'loss' or "):
        check(mask_after_exp, "losses")  # type: ignore[arg-type]
