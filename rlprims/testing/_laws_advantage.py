"""Laws of baselines from a group: only differences of rewards matter, and equal rewards give 0."""

import torch
from torch import Tensor

from rlprims.testing._cases import Batch, make_batch, make_batches
from rlprims.testing._compare import assert_close, assert_zero
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2)
SHIFT = 1e-9
EPS = 1e-4
LARGE = 1e4  # rewards of this size, so that the eps of a divisor does not matter


def _last(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))


def _with_rewards(batch: Batch, totals: Tensor) -> Batch:
    """The batch with these total rewards, each on the row's last valid token, and 0 elsewhere."""
    return batch.replace(rewards=torch.where(_last(batch.mask), totals[:, None], 0.0))


def _in_a_group_of_several(batch: Batch) -> Tensor:
    ids = batch.data["group_ids"]
    return (ids == ids[:, None]).sum(-1) > 1


def equal_rewards_give_zero(p: Primitive) -> None:
    """A group with equal rewards has advantage exactly 0, for every number, group size and dtype."""
    for reward in (0.1, 1000.1, -1e6 / 3, 0.0):
        for size in (2, 3, 7, 9, 130):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                rows = torch.arange(size) % 2 + 6
                batch = make_batch(0, dtype).without_empty_rows()
                batch = batch.rows(rows % len(batch.mask))
                batch = batch.replace(group_ids=torch.zeros(size, dtype=torch.int64))
                constant = _with_rewards(batch, torch.full((size,), reward, dtype=dtype))
                got = p.run(constant, p.required)
                assert_zero(f"the advantage of {size} rewards of {reward} in {dtype}", got.value)


def a_shift_of_a_group_cancels(p: Primitive) -> None:
    """A constant added to every reward of a group does not change its advantages, if it has two rows or more."""
    for batch in map(Batch.without_empty_rows, make_batches(SEEDS)):
        several = _in_a_group_of_several(batch)
        total = batch.data["scores"]
        want = p.run(_with_rewards(batch, total), p.required).value
        for constant in (1.0, -1e3):
            offset = constant * (1 + batch.data["group_ids"])
            got = p.run(_with_rewards(batch, total + offset), p.required).value
            assert_close(f"the advantage of rewards shifted by {constant}", got[several], want[several], SHIFT)


def a_scale_passes_or_cancels(p: Primitive) -> None:
    """Rewards times a give advantages times a; or the same advantages up to eps, if they are divided by a deviation."""
    for batch in map(Batch.without_empty_rows, make_batches(SEEDS)):
        total = LARGE * batch.data["scores"]
        want = p.run(_with_rewards(batch, total), p.required).value
        for scale in (2.0, 0.5):
            got = p.run(_with_rewards(batch, scale * total), p.required).value
            if not torch.allclose(got, want * scale, rtol=EPS, atol=EPS):
                assert_close(f"the advantage of rewards times {scale}", got, want, EPS)


def one_advantage_per_response(p: Primitive) -> None:
    """Every valid token of a response has the same advantage, wherever the reward is in it."""
    for batch in make_batches(SEEDS):
        got = p.run(batch, p.required).value
        first = batch.mask & (batch.mask.cumsum(-1) == 1)
        spread = torch.where(batch.mask, (got * first).sum(-1, keepdim=True), 0.0)
        assert_close("the advantage along a response", got, spread, 0)
