"""See :func:`vtrace` and :func:`vtrace_returns`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from rlprims.blocks import by_blocks, selected
from rlprims.masking import check_sequences, check_tokens
from rlprims.ratios import log_ratio
from rlprims.recurrence import skipping_recurrence
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask


def vtrace(
    rewards: PerToken,
    values: PerToken,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> PerToken:
    """V-trace, Espeholt et al. 2018 (arXiv:1802.01561), section 4.2: advantages that correct for another sampler.

    A_t = min(ρ̄_pg, ρ_t) (r_t + γ (V_{t+1} + λ E_{t+1}) − V_t) with ρ_t = exp(old_log_probs − rollout_log_probs) and E_t
    the errors of :func:`vtrace_returns`. For λ = 1 the bracket is r_t + γ v_{t+1} − V_t, the paper's; λ < 1 mixes the
    target with the critic, as rlax does (torchrl has no λ). On policy with λ = 1 and all bounds >= 1 it is
    ``gae(lam=1)``.

    The ratio is in the advantage: a loss that weighs by the same ratio again would count it twice.

    Args:
        rewards, values: float (B, T) or (N,), per token.
        old_log_probs: float, like rewards: the policy that learns, a constant here.
        rollout_log_probs: float, like rewards: the policy that sampled.
        response_mask: bool, like rewards. Masked tokens are skipped: t+1 is the next valid token.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V of what would have followed the last token; None: every response ended.
        gamma: discount per valid token.
        lam: λ.
        clip_rho: bound of the ratio in the errors; it decides which policy's value is learned.
        clip_c: bound of the ratio that carries errors back; it decides how far.
        clip_pg_rho: ρ̄_pg, bound of the ratio before the advantage.

    Returns:
        float, like rewards; 0 outside the mask. A critic's target is :func:`vtrace_returns`, not advantages + values.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> r, v, mu = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[-1.0, -1.0]])
    >>> vtrace(r, v, mu + torch.tensor([[0.5, 4.0]]).log(), mu, torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.2500, 0.5000]])
    """
    block = partial(_in_block, gamma=gamma, lam=lam, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho)
    data = (rewards, values, old_log_probs, rollout_log_probs, response_mask)
    return _checked_by_blocks(block, data, cu_seqlens, bootstrap_values)


def vtrace_returns(
    rewards: PerToken,
    values: PerToken,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> PerToken:
    """The critic's target under V-trace, Espeholt et al. 2018 (arXiv:1802.01561), eq. 1.

    v_t = V_t + E_t with E_t = δ_t + γ λ min(c̄, ρ_t) E_{t+1} and δ_t = min(ρ̄, ρ_t) (r_t + γ V_{t+1} − V_t), over the
    valid tokens of each sequence; beyond the last one V is ``bootstrap_values`` (0 by default) and E is 0.

    rlax and torchrl return E_t under the name of errors and V_t + E_t as value target, respectively.

    Args:
        rewards, values, old_log_probs, rollout_log_probs: float (B, T) or (N,), per token: see :func:`vtrace`.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V of what would have followed the last token; None: every response ended.
        gamma, lam, clip_rho, clip_c: see :func:`vtrace`.

    Returns:
        float, like rewards: returns, not advantages; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> r, v, mu = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[-1.0, -1.0]])
    >>> vtrace_returns(r, v, mu + torch.tensor([[0.5, 4.0]]).log(), mu, torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.7500, 1.0000]])
    """
    block = partial(_in_block, gamma=gamma, lam=lam, clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=None)
    data = (rewards, values, old_log_probs, rollout_log_probs, response_mask)
    return _checked_by_blocks(block, data, cu_seqlens, bootstrap_values)


def _checked_by_blocks(
    block: Callable[..., PerToken],
    data: tuple[Tensor, ...],
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
) -> PerToken:
    *floats, mask = data
    names = ("rewards", "values", "old_log_probs", "rollout_log_probs")
    check_tokens(mask, cu_seqlens, **dict(zip(names, floats, strict=True)))
    if bootstrap_values is not None:
        check_sequences(mask, cu_seqlens, bootstrap_values=bootstrap_values)
    return by_blocks(block, data, cu_seqlens, bootstrap_values)


def _in_block(
    rewards: PerToken,
    values: PerToken,
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    bootstrap_values: PerSequence | None,
    *,
    gamma: float,
    lam: float,
    clip_rho: float,
    clip_c: float,
    clip_pg_rho: float | None,
) -> PerToken:
    """The advantages, or without their bound the critic's targets."""
    r, v = selected(rewards, mask), selected(values, mask)
    dtype = torch.promote_types(r.dtype, v.dtype)
    r, v = r.to(dtype), v.to(dtype)
    rho = log_ratio(old_log_probs, rollout_log_probs, mask).detach().exp()
    # A valid token hands on its own value, others what they got: V_{t+1} of the next valid token.
    _, next_value = skipping_recurrence(0.0, v, mask, bootstrap_values, cu_seqlens)
    one_step = r + gamma * next_value - v
    delta = selected(rho.clamp(max=clip_rho) * one_step, mask)
    carry = (gamma * lam * rho.clamp(max=clip_c)).to(delta.dtype)
    error, next_error = skipping_recurrence(carry, delta, mask, None, cu_seqlens)
    if clip_pg_rho is None:
        return selected(v + error, mask)
    return selected(rho.clamp(max=clip_pg_rho) * (one_step + gamma * lam * next_error), mask)
