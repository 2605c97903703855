"""Estimators for samples with a common prefix: compared inside their tree, or by common states and actions."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import response_scores, z_scores
from rlprims.advantage._turns import check_ids, first_of_each, pair_ids, turn_returns, turn_sums
from rlprims.grouping import group_count, group_mean
from rlprims.layout import expand_to_tokens, last_of_turn, to_tokens
from rlprims.masking import check_sequences
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask, TreeIds, TurnIds


@described
def tree(
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

    A prompt has several trees. The leaves of a tree have a common prefix and branch at the end of a turn. With
    s_i = Σ_t r_it of each leaf, A_i = z of s_i over the prompt + z of s_i over the tree, with z = (s − μ) / (σ + ε), on
    each token of the leaf. The tree's z sum to 0 over its leaves, so the second term compares the branches and has no
    effect on the common prefix; the first term compares the prefixes. With M trees of N leaves and no division by σ,
    prefixes get (M−1)/M of the policy gradient and branches (MN−1)/(MN) + (N−1)/N.

    Where sources disagree: both terms use the raw scores, as in the paper. The authors' code replaces the scores by
    their z-scores over the prompt before it compares them inside the tree, and keeps the raw score in a tree of one
    leaf, which gets 0 here. A token that is common to several leaves is trained in each of them, unless it is masked in
    all but one.

    Args:
        rewards: per token; one row for each leaf.
        tree_ids: the tree that a leaf belongs to. Any numbers. Equal numbers of different prompts are different trees.
        normalize_std: divide by σ + ε, in both terms.
        tolerance: scores are constant, and get 0, if max − min <= tolerance · max(1, |max|, |min|).

    >>> m = torch.ones(4, 1, dtype=torch.bool)
    >>> scores, trees = torch.tensor([[4.0], [2.0], [0.0], [0.0]]), torch.tensor([0, 0, 1, 1])
    >>> tree(scores, torch.zeros(4, dtype=torch.int64), trees, m, normalize_std=False).T
    tensor([[ 3.5000, -0.5000, -1.5000, -1.5000]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_sequences(mask, cu_seqlens, tree_ids=tree_ids)
    if tree_ids.is_floating_point() or tree_ids.dtype is torch.bool:
        raise ValueError(f"tree_ids has dtype {tree_ids.dtype}, expected integers: a number for each tree")
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "tolerance": tolerance}
    a = z_scores(s, group_ids, valid_rows, **options) + z_scores(
        s, pair_ids(group_ids, tree_ids), valid_rows, **options
    )
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
    the same visits of all actions. If there are few visits, V̂ is inaccurate, so it is moved towards the prompt's mean
    score μ:

        A = Q̂(s, a) − (N V̂(s) + n μ) / (N + n), with N visits of s and the prior's weight n.

    :func:`gigpo` compares the return of each visit; here all visits with the same action have their mean return.

    The formula was checked against another paper and an implementation that cite it (as eq. 11), not against the paper
    itself. That implementation gives γ = 0.99 and n = 2 as the paper's values. It does not discount μ, nor does this
    function, so with γ < 1 early steps with few visits get a small negative bias. The paper's optional division by the
    group's deviation is not implemented.

    Args:
        rewards: per token: the reward of a turn on any of its tokens.
        action_ids: int (B, T) or (N,), the action of the turn, such as its tool and target, on each of its tokens.
        gamma: discount per turn, in [0, 1].
        prior: n, the weight of the prompt's mean score, in visits; at least 0.

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> steps = torch.zeros(3, 1, dtype=torch.int64)
    >>> actions = torch.tensor([[7], [7], [8]])  # the mean return of action 7 is 1/2
    >>> rtmc(torch.tensor([[1.0], [0.0], [1.0]]), steps[:, 0], steps, steps, actions, m, prior=0.0).T
    tensor([[-0.1667, -0.1667,  0.3333]])
    """
    if not prior >= 0:
        raise ValueError(f"prior={prior}, expected a number of at least 0: the weight of the mean score, in visits")
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
