"""PPO's clipped loss, and where it is its own slope: see ``rlprims.losses._clipped_surrogate``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlprims.masking import LOG_RATIO_LIMIT

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
