"""PRIME: process rewards of tokens plus the outcome, each with a leave-one-out baseline."""

from rlprims._described import described
from rlprims.advantage._group import rloo, tokens_of_valid_rows
from rlprims.advantage._returns import discounted_returns
from rlprims.grouping import group_count, group_mean_of_others
from rlprims.layout import expand_to_tokens, sequence_lengths, sequence_sum
from rlprims.masking import check_tokens, upcast, zero_outside
from rlprims.types import CuSeqlens, GroupIds, PerToken, RowMask, TokenMask


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
    s_i = Σ_t r_it. The paper whitens the sum over the batch: :func:`whiten`.

    Where sources disagree: the authors' code has n/(n−1) p_it − Σ_j p̄_j / (n−1), with the sum over all j. This adds
    (p_it − p̄_i) / (n−1) to each reward, which sums to 0 over a response. Here a sample is not part of its own baseline,
    as in RLOO. The formula was checked against that code, not against the paper. A group of one has no baseline and
    gets 0.

    The baseline is subtracted from every token, so long responses lose more. With γ = 1 the expected gradient is that
    of E[s + w Σ_t (p_t − b)], where b is the policy's mean p̄, treated as a constant.

    Args:
        rewards: per token: the outcome, on any token of the response.
        process_rewards: p, which must not be in ``rewards`` too.
        gamma: discount per valid token, of the process rewards.
        process_weight: w.

    >>> import torch
    >>> m, outcomes = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    >>> prime(outcomes, torch.tensor([[0.5, 0.1], [0.2, 0.2]]), torch.tensor([0, 0]), m)
    tensor([[ 1.2000,  0.9000],
            [-1.2000, -1.1000]])
    """
    check_tokens(response_mask, cu_seqlens, process_rewards=process_rewards)
    mask = tokens_of_valid_rows(response_mask, group_ids, cu_seqlens, valid_rows)
    p = upcast(process_rewards)
    mean = sequence_sum(p, mask, cu_seqlens) / sequence_lengths(mask, cu_seqlens).clamp(min=1)
    mean_of_others = group_mean_of_others(mean, group_ids, valid_rows)
    has_others = expand_to_tokens(group_count(group_ids, valid_rows) > 1, mask, cu_seqlens)
    centred = zero_outside(p - expand_to_tokens(mean_of_others, mask, cu_seqlens), mask & has_others)
    process = discounted_returns(centred, mask, cu_seqlens, gamma=gamma)
    return process_weight * process + rloo(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
