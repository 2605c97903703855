"""Masked means absent, and what does not fit is named."""

import re
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlprims import advantage, filters, logprobs, losses, rewards
from rlprims.masking import (
    check_choice,
    check_logits,
    check_placements,
    check_sequences,
    check_temperature,
    check_tokens,
    masked_mean,
    zero_outside,
)

MASK = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("shape", [(3, 4), (100, 90)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_outside_the_mask_neither_value_nor_gradient_is_read(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(shape, generator=generator) < 0.5
    x = torch.where(mask, torch.randn(shape, generator=generator), torch.nan).to(dtype).requires_grad_()
    got = zero_outside(x, mask)
    assert got.dtype is torch.promote_types(dtype, torch.float32)
    assert torch.equal(got[mask], x[mask].to(got.dtype))
    assert (got[~mask] == 0).all()
    upstream = torch.where(mask, torch.randn(shape, generator=generator), torch.inf).to(got.dtype)
    (grad,) = torch.autograd.grad(got, x, upstream)
    assert torch.equal(grad[mask], upstream[mask].to(dtype))
    assert (grad[~mask] == 0).all()


def test_the_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.full((2, 2), torch.nan), torch.zeros(2, 2, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("mask", "cu", "data", "message"),
    [
        (MASK.float(), None, {}, r"response_mask has dtype torch\.float32, expected torch\.bool"),
        (MASK[0], None, {}, r"response_mask has shape \(3,\), expected \(B, T\).*cu_seqlens"),
        (MASK, torch.tensor([0, 6]), {}, r"response_mask has shape \(2, 3\).*cu_seqlens is given"),
        (MASK[0], torch.tensor([0.0, 3.0]), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.tensor([[0, 3]]), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.zeros(0, dtype=torch.int64), {}, r"cu_seqlens.*expected integers \(B\+1,\)"),
        (MASK[0], torch.tensor([0, 2]), {}, "cu_seqlens runs from 0 to 2, expected 0 to 3"),
        (MASK[0], torch.tensor([0, 3, 2, 3]), {}, "cu_seqlens decreases"),
        (MASK, None, {"rewards": torch.zeros(2, 1)}, r"rewards has shape \(2, 1\), response_mask has \(2, 3\)"),
    ],
)
def test_check_tokens_names_tensors_that_do_not_fit(
    mask: torch.Tensor, cu: torch.Tensor, data: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_tokens(mask, cu, **data)


def test_one_entry_per_sequence() -> None:
    check_sequences(MASK, None, scores=torch.zeros(2))
    check_sequences(MASK[0], torch.tensor([0, 1, 3]), scores=torch.zeros(2))
    with pytest.raises(ValueError, match=r"scores has shape \(3,\), expected \(2,\)"):
        check_sequences(MASK, None, scores=torch.zeros(3))


def test_an_option_is_one_of_its_choices() -> None:
    choices = Literal["token", "sequence"]
    check_choice("level", "token", choices)
    with pytest.raises(ValueError, match="level='tokens', expected 'token' or 'sequence'"):
        check_choice("level", "tokens", choices)


def test_logits_are_floats_and_a_temperature_is_above_zero() -> None:
    check_logits(torch.zeros(3), 0.5)
    with pytest.raises(ValueError, match="logits has shape"):
        check_logits(torch.zeros(3, dtype=torch.int64), 1.0)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature="):
            check_temperature(temperature)


ZEROS, IDS = torch.zeros(2, 3), torch.tensor([0, 0])


def of_logits(token_ids):
    return logprobs.from_logits(torch.zeros(1, 2, 4), token_ids)


@pytest.mark.parametrize(
    ("call", "got", "use"),
    [
        (lambda: advantage.grpo(ZEROS, ["a", "b"], MASK), "group_ids is a list", "grouping.dense_ids(labels)"),
        (lambda: advantage.rloo(ZEROS, np.array([0, 0]), MASK), "group_ids is a ndarray", "grouping.dense_ids(labels)"),
        (lambda: advantage.rloo(ZEROS, IDS.int(), MASK), "dtype torch.int32", "grouping.dense_ids(labels)"),
        (lambda: advantage.rloo(ZEROS, torch.tensor([3, 40]), MASK), "from 3 to 40", "grouping.dense_ids(labels)"),
        (lambda: filters.varied_scores(ZEROS[:, 0], ["a", "b"]), "group_ids is a list", "grouping.dense_ids(labels)"),
        (lambda: losses.count_totals(MASK, group_ids=["a"]), "group_ids is a list", "grouping.dense_ids(labels)"),
        (lambda: advantage.grpo(ZEROS.numpy(), IDS, MASK), "rewards is a ndarray", "torch.as_tensor(rewards)"),
        (lambda: advantage.grpo(ZEROS, IDS, MASK.tolist()), "response_mask is a list", "as_tensor(response_mask)"),
        (lambda: advantage.gae(ZEROS[0], ZEROS[0], MASK[0], [0, 3]), "cu_seqlens is a list", "layout.cu_seqlens(len"),
        (lambda: advantage.gae(ZEROS[0], ZEROS[0], MASK[0], torch.tensor([3])), "from 3 to 3", "use layout.cu_seqlens"),
        (lambda: rewards.at_last_token([1.0, 0.0], MASK), "scores is a list", "torch.as_tensor(scores)"),
        (lambda: of_logits([[0, 1]]), "token_ids is a list", "torch.as_tensor(token_ids)"),
        (
            lambda: logprobs.from_hidden(ZEROS, torch.zeros(4, 3), [0, 1]),
            "token_ids is a list",
            "torch.as_tensor(token_ids)",
        ),
        (lambda: of_logits(torch.tensor([[1, -100]])), "from -100 to 1", "clamp(min=0)"),
        (lambda: of_logits(torch.tensor([[1]])), "shape (1, 1)", "from_logits(logits[:, :-1], input_ids[:, 1:])"),
    ],
)
def test_checks_say_what_to_write(call: Callable[[], object], got: str, use: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){re.escape(got)}.*{re.escape(use)}"):
        call()


@pytest.mark.parametrize("totals", [17, 17.0, torch.tensor(17), (17, 2, 1), {"tokens": 17}])
@pytest.mark.parametrize(
    "mean",
    [
        losses.token_mean,
        losses.seq_mean_token_mean,
        losses.seq_mean_token_sum,
        partial(losses.seq_mean_token_sum_norm, length=4),
        lambda x, mask, totals: losses.prompt_token_mean(x, IDS, mask, totals=totals),
        lambda x, mask, totals: losses.trajectory_mean(x, IDS, mask, totals=totals),
    ],
)
def test_a_number_is_no_totals(mean: Callable[..., object], totals: object) -> None:
    with pytest.raises(ValueError, match=r"totals is .*, expected types\.Totals, .* use losses\.count_totals"):
        mean(ZEROS, MASK, totals=totals)


LOSSES_OF_TWO_POLICIES = [
    lambda new, old: losses.clipped_surrogate(new, old, ZEROS, MASK),
    lambda new, old: losses.gspo(new, old, ZEROS, MASK),
    lambda new, old: losses.cispo(new, old, ZEROS, MASK),
    lambda new, old: losses.dppo(new, old, ZEROS, MASK),
    lambda new, old: losses.kl(new, old, MASK),
    lambda new, old: losses.value_loss(new, old, ZEROS, MASK),
]


@pytest.mark.parametrize("loss", LOSSES_OF_TWO_POLICIES)
def test_swapped_log_probs_are_found_by_their_gradient(loss: Callable[..., torch.Tensor]) -> None:
    """verl's functions take the old log-probs first. No value is read: on a GPU this costs nothing."""
    new, old = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"requires a gradient and .* does not, .* pass them by name"):
        loss(old, new)
    assert loss(new, old).requires_grad
    assert loss(new, new).requires_grad
    assert not loss(old, old).requires_grad
    with torch.no_grad():
        loss(old, new)


def test_rows_may_be_sharded_and_columns_may_not() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        rows, columns = (distribute_tensor(torch.ones(2, 3), mesh, [Shard(dim)]) for dim in range(2))
        check_placements(0, hidden=rows)
        with pytest.raises(ValueError, match=r"hidden is a DTensor with placement Shard\(dim=1\), expected .* rows"):
            check_placements(0, hidden=columns)
    finally:
        dist.destroy_process_group()
