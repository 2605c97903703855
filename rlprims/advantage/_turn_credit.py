"""Estimators with credit inside a response: per turn, by Monte-Carlo values, and by process rewards (PRIME)."""

import torch

from rlprims._described import described
from rlprims.advantage._group import response_scores, rloo, tokens_of_valid_rows, z_scores
from rlprims.advantage._returns import check_critic_data, check_ids, discounted_returns, pair_ids, turn_sums
from rlprims.grouping import group_count, group_mean_of_others
from rlprims.layout import expand_to_tokens, last_of_turn, sequence_lengths, sequence_sum, to_tokens
from rlprims.masking import check_finite, check_range, check_tokens, upcast, zero_outside
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

    A_t = A^O + w Σ_{k≥κ} γ^{k−κ} A^T_k on the tokens of turn κ; w is ``turn_weight``. A^O is :func:`grpo` of the
    outcome, Σ_t r_t. A^T_k is (x_k − μ) / (σ + ε) of the turn's reward x_k over the samples of the prompt that have a
    turn with the same number. A^T_k is 0 if only one sample has such a turn, or if all their rewards are equal.

    Where sources disagree: the authors' code has a reward for one turn only, the first tool call. Tokens up to its
    result get A^O + w A^T and later tokens A^O, as in this formula with a reward on that turn only. A sample without a
    tool result gets the z-score of the sum of both rewards there, and A^O here.

    Args:
        rewards: per token: the outcome, on any token of the response.
        turn_rewards: the reward of a turn on any of its tokens, which must not be in ``rewards`` too.
        turn_ids: the turn of the response that a valid token belongs to. Turns with the same number are compared.
        gamma: discount per turn, of the advantages of later turns.
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
    check_finite(turn_weight=turn_weight)
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
def vineppo(
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
    the policy samples from that state, K = 9 in the paper; they are not trained on. V̂ is unbiased for any K, and so is
    the gradient. If r has a KL penalty, so must the continuations' scores.

    Args:
        rewards: per token: the reward of a step on any of its tokens.
        continuation_values: V̂ of the state before the step, on each of its valid tokens.
        turn_ids: the step of the response that a valid token belongs to.
        gamma: discount per step.

    >>> m, steps = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 2]])
    >>> values = torch.tensor([[0.5, 0.5, 0.75, 0.25]])  # 2 of 4 continuations are correct, then 3, then 1
    >>> vineppo(torch.tensor([[0.0, 0.0, 0.0, 1.0]]), values, steps, m)
    tensor([[ 0.2500,  0.2500, -0.5000,  0.7500]])
    """
    check_range(0, 1, gamma=gamma)
    values = continuation_values
    check_critic_data(response_mask, cu_seqlens, bootstrap_values, rewards=rewards, continuation_values=values)
    check_ids(response_mask, cu_seqlens, turn_ids=turn_ids)
    values = zero_outside(values, response_mask)
    step_rewards = turn_sums(rewards, turn_ids, response_mask, cu_seqlens)
    # On the last token of a step, the next value is that of the next step.
    last = last_of_turn(turn_ids, response_mask, cu_seqlens)
    advantages = step_rewards + gamma * next_values(values, response_mask, bootstrap_values, cu_seqlens) - values
    return turn_sums(torch.where(last, advantages, 0.0), turn_ids, response_mask, cu_seqlens)


@described
def prime(
    rewards: PerToken,
    process_rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    gamma: float = 1.0,
    process_weight: float = 1.0,
) -> PerToken:
    """PRIME, Cui et al. 2025 (arXiv:2502.01456): the return of process rewards and the outcome, leave-one-out.

    With p_it the reward of token t of sample i (:func:`rlprims.rewards.implicit_process`) and p̄_j its mean over the
    tokens of sample j: A_it = w Σ_{u≥t} γ^{u−t} (p_iu − mean of the other samples' p̄_j) + :func:`rloo` of the outcome
    s_i = Σ_t r_it. w is ``process_weight``. The paper whitens the sum over the batch: :func:`whiten`.

    Where sources disagree: the authors' code has n/(n−1) p_it − Σ_j p̄_j / (n−1), with the sum over all j. This adds
    (p_it − p̄_i) / (n−1) to each reward, which sums to 0 over a response. Here a sample is not part of its own
    baseline, as in RLOO. The formula was checked against that code, not against the paper. A group of one gets 0. The
    baseline is subtracted from every token, so long responses lose more.

    Args:
        rewards: per token: the outcome, on any token of the response.
        process_rewards: p, which must not be in ``rewards`` too.

    >>> m, outcomes = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> prime(outcomes, torch.tensor([[0.5, 0.1], [0.2, 0.2]]), torch.tensor([0, 0]), m)
    tensor([[ 1.2000,  0.9000],
            [-1.2000, -1.1000]])
    """
    check_finite(process_weight=process_weight)
    check_tokens(response_mask, cu_seqlens, process_rewards=process_rewards)
    mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    p = upcast(process_rewards)
    mean = sequence_sum(p, mask, cu_seqlens) / sequence_lengths(mask, cu_seqlens).clamp(min=1)
    mean_of_others = group_mean_of_others(mean, group_ids, valid_rows)
    has_others = expand_to_tokens(group_count(group_ids, valid_rows) > 1, mask, cu_seqlens)
    centred = zero_outside(p - expand_to_tokens(mean_of_others, mask, cu_seqlens), mask & has_others)
    process = discounted_returns(centred, mask, cu_seqlens, gamma=gamma)
    return process_weight * process + rloo(rewards, group_ids, response_mask, cu_seqlens, valid_rows)


@described
def draco(
    advantages: PerToken,
    process_rewards: PerToken,
    turn_ids: TurnIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> PerToken:
    """DRACO, Gandhi et al. 2026 (arXiv:2609.04094), eq. 6: an advantage moves to the turns that a rubric names.

    With Q_j in [0, 1] the quality of turn j, of n_j tokens: A N w_j / (n_j Σ_k w_k), where N = Σ_k n_k, and w = Q if
    A >= 0, else 1 − Q. So a turn's share does not depend on its length, Σ_t A_t stays, and no sign changes. Use it
    after an estimator such as :func:`grpo`, in the place of a normalization. If all w of a response are 0, A stays.

    Args:
        process_rewards: Q on the turn's tokens, as their mean: the share of the criteria that passed, of those that the
            judge justified by this turn. For a turn that no criterion cites the paper has the mean of the others.

    >>> m, turns = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 0, 1]])
    >>> quality = torch.tensor([[0.5, 0.5, 0.5, 1.0]])
    >>> draco(torch.ones(1, 4), quality, turns, m)  # weights of 1/3 and 2/3, over 3 tokens and over 1
    tensor([[0.4444, 0.4444, 0.4444, 2.6667]])
    """
    check_tokens(response_mask, cu_seqlens, advantages=advantages, process_rewards=process_rewards)
    check_ids(response_mask, cu_seqlens, turn_ids=turn_ids)
    a, q = zero_outside(advantages, response_mask), zero_outside(process_rewards, response_mask)
    n = turn_sums(torch.ones_like(a), turn_ids, response_mask, cu_seqlens).clamp(min=1)
    q = (turn_sums(q, turn_ids, response_mask, cu_seqlens) / n).clamp(0, 1)
    weight = torch.where(a >= 0, q, 1 - q) / n  # of each token: the sum over a turn's tokens is w
    total = expand_to_tokens(sequence_sum(weight, response_mask, cu_seqlens), response_mask, cu_seqlens)
    tokens = expand_to_tokens(sequence_lengths(response_mask, cu_seqlens), response_mask, cu_seqlens)
    return a * torch.where(total > 0, tokens * weight / total.masked_fill(total == 0, 1.0), 1.0)
