"""V-trace: advantages and critic targets with importance weights per token, for samples of another policy."""

from rlprims import scan
from rlprims._described import described
from rlprims.advantage._returns import check_critic_data
from rlprims.masking import check_at_least, check_range, check_tokens, upcast, zero_outside
from rlprims.ratios import log_ratio
from rlprims.types import CuSeqlens, PerSequence, PerToken, SequenceShard, TokenMask


@described
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
    shard: SequenceShard | None = None,
) -> PerToken:
    """V-trace, Espeholt et al. 2018 (arXiv:1802.01561), section 4.2: advantages for samples of another policy.

    A_t = min(ρ̄_pg, ρ_t) (r_t + γ (V_{t+1} + λ E_{t+1}) − V_t) with ρ_t = exp(old_log_probs − rollout_log_probs) and
    E_t the errors of :func:`vtrace_returns`; ρ̄_pg is ``clip_pg_rho``. For λ = 1 the bracket is the paper's r_t + γ
    v_{t+1} − V_t. λ < 1 mixes the target with the critic's values, as in rlax (torchrl has no λ). On policy with λ = 1
    and all bounds >= 1 it is ``gae(lam=1)``. Do not use a loss that multiplies by the same ratio again.

    Returns:
        0 outside the mask. The critic's target is :func:`vtrace_returns`, not advantages + values.

    >>> import torch
    >>> r, v, mu = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[-1.0, -1.0]])
    >>> vtrace(r, v, mu + torch.tensor([[0.5, 4.0]]).log(), mu, torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.2500, 0.5000]])
    """
    check_at_least(0, inf=True, clip_pg_rho=clip_pg_rho)
    data = (rewards, values, old_log_probs, rollout_log_probs, response_mask, cu_seqlens, bootstrap_values)
    rho, td_errors, errors = _errors(*data, gamma=gamma, lam=lam, clip_rho=clip_rho, clip_c=clip_c, shard=shard)
    next_errors = scan.next_values(errors, response_mask, None, cu_seqlens, shard)
    return zero_outside(rho.clamp(max=clip_pg_rho) * (td_errors + gamma * lam * next_errors), response_mask)


@described
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
    shard: SequenceShard | None = None,
) -> PerToken:
    """The critic's target under V-trace, Espeholt et al. 2018 (arXiv:1802.01561), eq. 1.

    v_t = V_t + E_t with E_t = δ_t + γ λ min(c̄, ρ_t) E_{t+1} and δ_t = min(ρ̄, ρ_t) (r_t + γ V_{t+1} − V_t), over the
    valid tokens of each sequence. After the last token V is ``bootstrap_values`` (0 by default) and E is 0. rlax
    returns E_t and calls it errors; torchrl returns V_t + E_t as the value target.

    >>> import torch
    >>> r, v, mu = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), torch.tensor([[-1.0, -1.0]])
    >>> vtrace_returns(r, v, mu + torch.tensor([[0.5, 4.0]]).log(), mu, torch.ones(1, 2, dtype=torch.bool))
    tensor([[0.7500, 1.0000]])
    """
    data = (rewards, values, old_log_probs, rollout_log_probs, response_mask, cu_seqlens, bootstrap_values)
    _, _, errors = _errors(*data, gamma=gamma, lam=lam, clip_rho=clip_rho, clip_c=clip_c, shard=shard)
    return zero_outside(values, response_mask) + zero_outside(errors, response_mask)


def _errors(
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
    shard: SequenceShard | None,
) -> tuple[PerToken, PerToken, PerToken]:
    """ρ_t, the TD errors r_t + γ V_{t+1} − V_t without the ratio, and the errors E_t."""
    check_range(0, 1, gamma=gamma, lam=lam)
    check_at_least(0, inf=True, clip_rho=clip_rho, clip_c=clip_c)
    check_critic_data(mask, cu_seqlens, bootstrap_values, rewards=rewards, values=values)
    check_tokens(mask, cu_seqlens, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    rewards, values = upcast(rewards), upcast(values)
    rho = log_ratio(old_log_probs, rollout_log_probs, mask).detach().exp()
    c = rho.clamp(max=clip_c)
    next_values = scan.next_values(values, mask, bootstrap_values, cu_seqlens, shard)
    td_errors = rewards + gamma * next_values - values
    errors = scan.discounted_sum(rho.clamp(max=clip_rho) * td_errors, gamma * lam * c.double(), mask, cu_seqlens, shard)
    return rho, td_errors, errors
