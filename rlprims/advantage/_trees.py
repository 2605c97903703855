"""Estimators for samples with a common prefix or common states: inside their tree, by states and by actions."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import response_scores, z_scores
from rlprims.advantage._returns import check_ids, first_of_each, pair_ids, turn_returns, turn_sums
from rlprims.grouping import group_count, group_mean
from rlprims.layout import expand_to_tokens, last_of_turn, to_tokens
from rlprims.masking import check_at_least, check_finite, check_sequences
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask, TreeIds, TurnIds


@described
def tree_grpo(
    rewards: PerToken,
    group_ids: GroupIds,
    tree_ids: TreeIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> PerToken:
    """Tree-GRPO, Ji et al. 2025 (arXiv:2509.21240): z-scores over the samples of a prompt plus z-scores over a tree.

    A prompt has several trees. The leaves of a tree, one row each, have a common prefix and branch at the end of a
    turn. With z = (s − μ) / (σ + ε) and s_i = Σ_t r_it of each leaf, A_i = z of s_i over the prompt + z of s_i over the
    tree, on each token of the leaf. The tree's z sum to 0 over its leaves, so the second term compares the branches
    and has no effect on the common prefix; the first term compares the prefixes. With M trees of N leaves and no
    division by σ, prefixes get (M−1)/M of the policy gradient and branches (MN−1)/(MN) + (N−1)/N.

    Where sources disagree: both terms use the raw scores, as in the paper. The authors' code replaces the scores by
    their z-scores over the prompt before it compares them inside the tree, and keeps the raw score in a tree of one
    leaf, which gets 0 here. A token that is common to several leaves is trained in each of them, unless it is masked.

    Args:
        tree_ids: the tree that a leaf belongs to. Any numbers. Equal numbers of different prompts are different trees.

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> scores, trees = torch.tensor([[4.0], [2.0], [0.0], [0.0]]), torch.tensor([0, 0, 1, 1])
    >>> tree_grpo(scores, torch.zeros(4, dtype=torch.int64), trees, m, normalize_std=False).T
    tensor([[ 3.5000, -0.5000, -1.5000, -1.5000]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_sequences(mask, cu_seqlens, tree_ids=tree_ids)
    if tree_ids.is_floating_point() or tree_ids.dtype is torch.bool:
        raise ValueError(f"tree_ids has dtype {tree_ids.dtype}, expected integers: a number for each tree")
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "tolerance": tolerance}
    in_tree = z_scores(s, pair_ids(group_ids, tree_ids), valid_rows, **options)
    a = z_scores(s, group_ids, valid_rows, **options) + in_tree
    return to_tokens(a, mask, cu_seqlens)


@described
def rtmc(
    rewards: PerToken,
    group_ids: GroupIds,
    turn_ids: TurnIds,
    state_ids: Tensor,
    action_ids: Tensor,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    gamma: float = 0.99,
    prior: float = 2.0,
) -> PerToken:
    """Rollout-tree Monte Carlo, Wang et al. 2026 (arXiv:2604.11037): A = Q̂(s, a) − V̂(s) from the visits of a group.

    A step is a turn; R_k = Σ_{l≥k} γ^{l−k} r_l is its return, discounted by turn. Q̂(s, a) is the mean return of action
    a in state s over the samples of one prompt; each sample counts once, with its first visit. V̂(s) is the mean over
    the same visits of all actions, moved towards the prompt's mean score μ, because few visits are inaccurate:

        A = Q̂(s, a) − (N V̂(s) + n μ) / (N + n), with N visits of s and n = ``prior``, in visits, at least 0.

    The formula was checked against another paper and an implementation that cite it (as eq. 11), not against the paper
    itself. That implementation gives γ = 0.99 and n = 2 as the paper's values. μ is not discounted, so with γ < 1 early
    steps with few visits get a small negative bias. The paper's optional division by the deviation is left out.

    Args:
        rewards: per token: the reward of a turn on any of its tokens.
        action_ids: int (B, T) or (N,), the action of the turn, such as its tool and target, on each of its tokens.
        gamma: discount per turn, in [0, 1].

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> steps = torch.zeros(3, 1, dtype=torch.int64)
    >>> actions = torch.tensor([[7], [7], [8]])  # the mean return of action 7 is 1/2
    >>> rtmc(torch.tensor([[1.0], [0.0], [1.0]]), steps[:, 0], steps, steps, actions, m, prior=0.0).T
    tensor([[-0.1667, -0.1667,  0.3333]])
    """
    check_at_least(0, ": the weight of the mean score, in visits", prior=prior)
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_ids(mask, cu_seqlens, state_ids=state_ids, action_ids=action_ids)
    returns = turn_returns(rewards, turn_ids, mask, cu_seqlens, gamma=gamma).flatten()
    states = pair_ids(expand_to_tokens(group_ids, mask, cu_seqlens), state_ids).flatten()
    actions = pair_ids(states, action_ids.flatten())

    # A sample counts once for each state and action: on the last token of its first turn with this state and action.
    samples = expand_to_tokens(torch.arange(s.shape[0], device=s.device), mask, cu_seqlens).flatten()
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    visits = first_of_each(pair_ids(samples, actions), last.flatten())
    q, v = group_mean(returns, actions, visits), group_mean(returns, states, visits)
    mean_score = expand_to_tokens(group_mean(s, group_ids, valid_rows), mask, cu_seqlens).flatten()
    share = prior / (group_count(states, visits).clamp(min=1).to(v.dtype) + prior)
    a = (q - v - share * (mean_score - v)).reshape(mask.shape)
    return turn_sums(torch.where(last, a, 0.0), turn_ids, mask, cu_seqlens)


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

    A = A^E + ``omega`` A^S. A^E is :func:`grpo` of the episode's total reward. A step is a turn with the discounted
    return R_k = Σ_{l≥k} γ^{l−k} r_l, and A^S = (R_k − μ) / (σ + ε) over all steps that the samples of one prompt took
    from the same (anchor) state. Both are equal on all tokens of the step. A state that was visited once has A^S = 0.

    Where sources disagree: μ and σ of A^E are over episodes, as in the paper. The authors' code has one entry per step
    there, so long episodes have more weight. ``normalize_std=False`` is the paper's variant without the deviations.

    Args:
        rewards: per token: the reward of a turn on any of its tokens.
        gamma: discount per turn, in [0, 1].

    >>> m, turns = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0, 1], [0, 1]])
    >>> states = torch.tensor([[5, 7], [5, 8]])  # the same first state, different second states
    >>> gigpo(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0, 0]), turns, states, m)
    tensor([[ 1.4142,  0.7071],
            [-1.4142, -0.7071]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_ids(mask, cu_seqlens, state_ids=state_ids)
    check_finite(omega=omega)
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "tolerance": tolerance}
    episode_advantages = to_tokens(z_scores(s, group_ids, valid_rows, **options), mask, cu_seqlens)

    # Every token has its turn's return. The statistics count it once, on the last token of the turn.
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    returns = turn_returns(rewards, turn_ids, mask, cu_seqlens, gamma=gamma)
    visits = pair_ids(expand_to_tokens(group_ids, mask, cu_seqlens), state_ids)
    step_advantages = z_scores(returns.flatten(), visits.flatten(), last.flatten(), **options).reshape(mask.shape)
    return episode_advantages + omega * turn_sums(step_advantages, turn_ids, mask, cu_seqlens)
