"""Credit by turn: rewards of turns compared with those of other samples, and values by Monte Carlo between turns."""

from functools import partial

import torch

from rlprims.advantage._group import response_scores, standard_scores
from rlprims.advantage._returns import check_critic_data, discounted_returns
from rlprims.advantage._turns import check_ids, pair_ids, turn_sums
from rlprims.layout import expand_to_tokens, last_of_turn, to_tokens
from rlprims.masking import check_tokens, zero_outside
from rlprims.scan import next_values
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask, TurnIds


def turn_grpo(
    rewards: PerToken,
    turn_rewards: PerToken,
    group_ids: GroupIds,
    turn_ids: TurnIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    turn_weight: float = 1.0,
    gamma: float = 1.0,
    normalize_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-4,
    tolerance: float = 1e-6,
) -> PerToken:
    """MT-GRPO, Zeng et al. 2025 (arXiv:2505.11821): the outcome compared, and each turn's own reward too.

    A_t = A^O + w Σ_{k≥κ} γ^{k−κ} A^T_k on the tokens of turn κ. A^O is :func:`grpo` of the outcome, Σ_t r_t. A^T_k is
    (x_k − μ) / (σ + ε) of the turn's reward x_k over the samples of the prompt that have a turn of the same number; it
    is 0 where one sample has, or where all earned the same. So what a turn earns is the credit of the turns up to it,
    and none of those after it.

    Where sources disagree: the authors' code knows one turn with a reward, the first tool call. Up to its result tokens
    get A^O + w A^T and after it A^O, which is this formula for a reward on that turn alone; a sample without a result
    gets there the z-score of the sum of both rewards, and here A^O alone, as its turn earned nothing to compare. The
    paper's λ weighs the outcome, its code's ``turn_advantage_coef`` the turn, as here; both are 1.

    Args:
        rewards: float (B, T) or (N,), per token: the outcome, anywhere in the response.
        turn_rewards: float, like rewards: each turn's own reward, anywhere in it; not part of ``rewards``.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        turn_ids: int (B, T) or (N,), which turn of the response a valid token belongs to. Turns of one number are
            compared.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.
        turn_weight: w.
        gamma: discount per turn, of the advantages of later turns.
        normalize_std: divide by σ + ε, of outcomes and turns.
        ddof: σ's divisor is n − ddof.
        eps: ε, in units of the reward; TRL's, which the authors' code is built on.
        tolerance: a group is constant, and gets 0, if max − min <= tolerance · max(1, |max|, |min|).

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m, turns = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0, 0, 1], [0, 1, 1]])
    >>> outcomes = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> earned = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]])  # by the first turn of the second sample
    >>> turn_grpo(outcomes, earned, torch.tensor([0, 0]), turns, m, normalize_std=False)
    tensor([[-1.5000, -1.5000,  0.5000],
            [ 1.5000, -0.5000, -0.5000]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_tokens(mask, cu_seqlens, turn_rewards=turn_rewards)
    scored = partial(
        standard_scores, normalize_std=normalize_std, ddof=ddof, eps=eps, singleton="zero", tolerance=tolerance
    )
    outcome_advantages = to_tokens(scored(s, group_ids, valid_rows), mask, cu_seqlens)

    # Every token gets its turn's reward, which the comparison counts once: on the last token of the turn.
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    earned = turn_sums(turn_rewards, turn_ids, mask, cu_seqlens)
    compared = pair_ids(expand_to_tokens(group_ids, mask, cu_seqlens), turn_ids)
    turn_advantages = scored(earned.flatten(), compared.flatten(), last.flatten()).reshape(mask.shape)
    to_go = discounted_returns(zero_outside(turn_advantages, last), mask, cu_seqlens, turn_ids=turn_ids, gamma=gamma)
    return outcome_advantages + turn_weight * to_go


def vine(
    rewards: PerToken,
    continuation_values: PerToken,
    turn_ids: TurnIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    bootstrap_values: PerSequence | None = None,
    *,
    gamma: float = 1.0,
) -> PerToken:
    """VinePPO, Kazemnejad et al. 2024 (arXiv:2410.01679): A = r + γ V̂(s') − V̂(s), with V̂ by Monte Carlo.

    A step is a turn, or any piece of a response (the paper's are the lines of a solution); its tokens share one
    advantage. s is the state before the step and s' the one after it. V̂ is the mean score of K continuations that the
    policy samples from that state, K = 9 in the paper; they are for the estimate only and are not trained on. No critic
    is needed, and V̂ is unbiased for any K, so the gradient is too.

    The policy's own rewards, such as a KL penalty, are in r and must then be in the scores of the continuations too.

    Args:
        rewards: float (B, T) or (N,), per token: each step's reward anywhere in it.
        continuation_values: float, like rewards: V̂ of the state before the step, on each of its valid tokens. Take the
            mean over the continuations of that state; K may differ from state to state.
        turn_ids: int, like rewards: which step of the response a valid token belongs to.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        bootstrap_values: float (B,), V̂ of what would have followed the last token: for truncated responses, 0 for those
            that ended. None: every response ended.
        gamma: discount per step.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> m, steps = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 2]])
    >>> values = torch.tensor([[0.5, 0.5, 0.75, 0.25]])  # 2 of 4 continuations right, then 3, then 1
    >>> vine(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), values, steps, m)
    tensor([[ 0.2500,  0.2500, -0.5000,  0.7500]])
    """
    check_critic_data(
        response_mask, cu_seqlens, bootstrap_values, rewards=rewards, continuation_values=continuation_values
    )
    check_ids(response_mask, cu_seqlens, turn_ids=turn_ids)
    values = zero_outside(continuation_values, response_mask)
    step_rewards = turn_sums(rewards, turn_ids, response_mask, cu_seqlens)
    # What follows the last token of a step is the first token of the next one.
    last = last_of_turn(turn_ids, response_mask, cu_seqlens)
    advantages = step_rewards + gamma * next_values(values, response_mask, bootstrap_values, cu_seqlens) - values
    return turn_sums(torch.where(last, advantages, 0.0), turn_ids, response_mask, cu_seqlens)
