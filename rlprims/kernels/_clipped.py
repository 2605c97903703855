"""PPO's clipped loss, and where it is its own slope: see ``rlprims.losses._clipped_surrogate``."""

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

_BLOCK = 1024


def clipped(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    dtype: torch.dtype,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Losses in ``dtype``, 0 outside the mask, and where they are their own slopes, like the mask."""
    losses, moves = (torch.empty(mask.shape, dtype=x, device=mask.device) for x in (dtype, torch.bool))
    inputs = (x.contiguous() for x in (log_probs, old_log_probs, advantages, mask))
    with torch.cuda.device_of(mask):
        _clipped[(triton.cdiv(mask.numel(), _BLOCK),)](
            *inputs,
            losses,
            moves.view(torch.int8),
            mask.numel(),
            LOW=1 - clip_low,
            HIGH=1 + clip_high,
            DUAL=dual_clip,
            LIMIT=LOG_RATIO_LIMIT,
            BLOCK=_BLOCK,
        )
    return losses, moves


def probe(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Every side of every bound, none of them near, by either sign; over the edge of a block. By cases."""
    moved = torch.tensor([-25.0, -1.0, -0.1, 0.0, 0.1, 1.0, 1.5, 25.0]).repeat(_BLOCK // 4 + 1)
    old = torch.full_like(moved, -1.0).to(dtype)
    log_probs = (old + moved).to(dtype)
    advantages = torch.tensor([2.0, -2.0, 0.5]).repeat(len(moved))[: len(moved)].to(dtype)
    mask = torch.arange(len(moved)) % 5 > 0
    ratio = (log_probs.double() - old.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    one = torch.ones_like(ratio)
    now, before, gains, here = (x.to(device) for x in (log_probs, old, advantages, mask))
    computing = torch.promote_types(dtype, torch.float32)
    run = partial(clipped, now, before, gains, here, computing, clip_low=0.2, clip_high=0.28)
    for dual_clip in (None, 3.0):
        low = torch.where(advantages > 0, 0.0, 0.8 * one)
        high = torch.where(advantages > 0, 1.28 * one, (dual_clip or torch.inf) * one)
        losses = torch.where(mask, -advantages.double() * ratio.clamp(low, high), 0.0)
        moves = mask & (ratio > low) & (ratio < high) & (moved.abs() < LOG_RATIO_LIMIT)
        got_losses, got_moves = run(dual_clip=dual_clip)
        yield got_losses, losses
        yield got_moves.float(), moves


@triton.jit
def _clipped(
    log_probs,
    old_log_probs,
    advantages,
    mask,
    losses,
    moves,
    n,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    DUAL: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    valid = tl.load(mask + at, mask=there, other=0) != 0
    dtype = losses.dtype.element_ty
    low, high = tl.full([BLOCK], LOW, dtype), tl.full([BLOCK], HIGH, dtype)  # a bare number would be a float32
    now = tl.load(log_probs + at, mask=valid, other=0.0).to(dtype)
    old = tl.load(old_log_probs + at, mask=valid, other=0.0).to(dtype)
    blame = -tl.load(advantages + at, mask=valid, other=0.0).to(dtype)
    moved = now - old
    near = _clamp(moved, -LIMIT, LIMIT)
    ratio = tl.exp(near)
    unclipped = ratio * blame
    loss = _max(unclipped, _clamp(ratio, low, high) * blame)
    if DUAL is not None:
        loss = _min(loss, _max(blame, 0.0) * tl.full([BLOCK], DUAL, dtype))
    tl.store(losses + at, tl.where(valid, loss, 0.0), mask=there)
    tl.store(moves + at, (valid & (loss == unclipped) & (near == moved)).to(tl.int8), mask=there)


@triton.jit
def _clamp(x, low, high):
    return _min(_max(x, low), high)


@triton.jit
def _max(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)  # a NaN inside the mask is the caller's to see


@triton.jit
def _min(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
