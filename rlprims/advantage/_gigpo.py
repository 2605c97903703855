"""GiGPO: the advantage of an episode in its group, plus the advantage of a step among steps from the same state."""

from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import response_scores, z_scores
from rlprims.advantage._turns import check_ids, pair_ids, turn_returns, turn_sums
from rlprims.layout import expand_to_tokens, last_of_turn, to_tokens
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask, TurnIds


@described
def gigpo(
    rewards: PerToken,
    group_ids: GroupIds,
    turn_ids: TurnIds,
    state_ids: Tensor,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """Group-in-group policy optimization, Feng et al. 2025 (arXiv:2505.10978): episode and step advantages.

    A = A^E + ω A^S. A^E is :func:`grpo` of the episode's total reward. A step is a turn; R_k = Σ_{l≥k} γ^{l−k} r_l is
    its return, discounted by turn, and A^S = (R_k − μ) / (σ + ε) over all steps that the samples of one prompt took
    from the same (anchor) state. Both are equal on all tokens of the step. A state that was visited once has A^S = 0.

    Where sources disagree: μ and σ of A^E are over episodes, as in the paper. The authors' code has one entry per step
    there, so long episodes have more weight. ``normalize_std=False`` is the paper's variant without the deviations.

    For more than two levels, such as GRPO per agent inside GRPO per episode, add :func:`grpo` with different ids.

    Args:
        rewards: per token: the reward of a turn on any of its tokens.
        omega: ω, the weight of A^S.
        gamma: discount per turn, in [0, 1].
        normalize_std: divide by σ + ε, on both levels.

    >>> import torch
    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> turns = torch.tensor([[0, 1], [0, 1]])
    >>> states = torch.tensor([[5, 7], [5, 8]])  # the same first state, different second states
    >>> gigpo(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 0]), turns, states, m)
    tensor([[ 1.4142,  0.7071],
            [-1.4142, -0.7071]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_ids(mask, cu_seqlens, state_ids=state_ids)
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "tolerance": tolerance}
    episode_advantages = to_tokens(z_scores(s, group_ids, valid_rows, **options), mask, cu_seqlens)

    # Every token has its turn's return. The statistics count it once, on the last token of the turn.
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    returns = turn_returns(rewards, turn_ids, mask, cu_seqlens, gamma=gamma)
    visits = pair_ids(expand_to_tokens(group_ids, mask, cu_seqlens), state_ids)
    step_advantages = z_scores(returns.flatten(), visits.flatten(), last.flatten(), **options).reshape(mask.shape)
    return episode_advantages + omega * turn_sums(step_advantages, turn_ids, mask, cu_seqlens)
