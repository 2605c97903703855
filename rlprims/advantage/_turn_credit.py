"""Estimators with credit per turn: turn rewards compared with those of other samples, and Monte-Carlo values."""

import torch

from rlprims._described import described
from rlprims.advantage._group import response_scores, z_scores
from rlprims.advantage._returns import check_critic_data, discounted_returns
from rlprims.advantage._turns import check_ids, pair_ids, turn_sums
from rlprims.layout import expand_to_tokens, last_of_turn, to_tokens
from rlprims.masking import check_range, check_tokens, zero_outside
from rlprims.scan import next_values
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask, TurnIds


@described
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
    """MT-GRPO, Zeng et al. 2025 (arXiv:2505.11821): the advantage of the outcome plus the advantages of turn rewards.

    A_t = A^O + w Σ_{k≥κ} γ^{k−κ} A^T_k on the tokens of turn κ. A^O is :func:`grpo` of the outcome, Σ_t r_t. A^T_k is
    (x_k − μ) / (σ + ε) of the turn's reward x_k over the samples of the prompt that have a turn with the same number.
    A^T_k is 0 if only one sample has such a turn, or if all their rewards are equal. A turn's reward gives credit to
    this turn and to earlier turns, not to later ones.

    Where sources disagree: the authors' code has a reward for one turn only, the first tool call. Tokens up to its
    result get A^O + w A^T and later tokens A^O, as in this formula with a reward on that turn only. A sample without a
    tool result gets the z-score of the sum of both rewards there, and A^O here. In the paper λ multiplies the outcome;
    in its code ``turn_advantage_coef`` multiplies the turn, as here; both are 1.

    Args:
        rewards: per token: the outcome, on any token of the response.
        turn_rewards: the reward of a turn on any of its tokens, which must not be in ``rewards`` too.
        turn_ids: the turn of the response that a valid token belongs to. Turns with the same number are compared.
        turn_weight: w.
        gamma: discount per turn, of the advantages of later turns.
        normalize_std: divide by σ + ε, for outcomes and turns.
        eps: ε, in units of the reward; TRL's value, because the authors' code is based on TRL.

    >>> m, turns = torch.ones(2, 3, dtype=torch.bool), torch.tensor([[0, 0, 1], [0, 1, 1]])
    >>> outcomes = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    >>> turn_rewards = torch.tensor([[0.0, 0.0, 0.0], [4.0, 0.0, 0.0]])  # on the first turn of the second sample
    >>> turn_grpo(outcomes, turn_rewards, torch.tensor([0, 0]), turns, m, normalize_std=False)
    tensor([[-1.5000, -1.5000,  0.5000],
            [ 1.5000, -0.5000, -0.5000]])
    """
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    check_tokens(mask, cu_seqlens, turn_rewards=turn_rewards)
    options = {"normalize_std": normalize_std, "ddof": ddof, "eps": eps, "tolerance": tolerance}
    outcome_advantages = to_tokens(z_scores(s, group_ids, valid_rows, **options), mask, cu_seqlens)

    # Every token has its turn's reward. The statistics count it once, on the last token of the turn.
    last = last_of_turn(turn_ids, mask, cu_seqlens)
    x = turn_sums(turn_rewards, turn_ids, mask, cu_seqlens)
    ids = pair_ids(expand_to_tokens(group_ids, mask, cu_seqlens), turn_ids)
    turn_advantages = z_scores(x.flatten(), ids.flatten(), last.flatten(), **options).reshape(mask.shape)
    to_go = discounted_returns(turn_advantages, mask, cu_seqlens, turn_ids=turn_ids, gamma=gamma)
    return outcome_advantages + turn_weight * to_go


@described
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

    A step is a turn, or any part of a response (a line of a solution in the paper); all of its tokens have the same
    advantage. s is the state before the step and s' the state after it. V̂ is the mean score of K continuations that
    the policy samples from that state, K = 9 in the paper; they are not trained on. No critic is needed. V̂ is unbiased
    for any K, and so is the gradient.

    If r has rewards per token, such as a KL penalty, the scores of the continuations must have them too.

    Args:
        rewards: per token: the reward of a step on any of its tokens.
        continuation_values: V̂ of the state before the step, on each of its valid tokens. Use the mean over the
            continuations of that state; K may differ between states.
        turn_ids: the step of the response that a valid token belongs to.
        gamma: discount per step.

    >>> m, steps = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 2]])
    >>> values = torch.tensor([[0.5, 0.5, 0.75, 0.25]])  # 2 of 4 continuations are correct, then 3, then 1
    >>> vine(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), values, steps, m)
    tensor([[ 0.2500,  0.2500, -0.5000,  0.7500]])
    """
    check_range(0, 1, gamma=gamma)
    check_critic_data(
        response_mask, cu_seqlens, bootstrap_values, rewards=rewards, continuation_values=continuation_values
    )
    check_ids(response_mask, cu_seqlens, turn_ids=turn_ids)
    values = zero_outside(continuation_values, response_mask)
    step_rewards = turn_sums(rewards, turn_ids, response_mask, cu_seqlens)
    # On the last token of a step, the next value is that of the next step.
    last = last_of_turn(turn_ids, response_mask, cu_seqlens)
    advantages = step_rewards + gamma * next_values(values, response_mask, bootstrap_values, cu_seqlens) - values
    return turn_sums(torch.where(last, advantages, 0.0), turn_ids, response_mask, cu_seqlens)
