"""Aggregations: they reduce per-token losses to the scalar loss of an optimizer step.

Sequences and groups without a valid token are ignored. If no token is valid, the result and its gradient are 0.
"""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.grouping import check_group_ids
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import check_above, check_sequences, check_tokens, zero_outside
from rlprims.types import AllReduce, CuSeqlens, GroupIds, PerToken, RowCounts, Scalar, TokenMask, Totals, TrajectoryIds


@described
def count_totals(
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    group_ids: GroupIds | None = None,
    trajectory_ids: TrajectoryIds | None = None,
    *,
    all_reduce_rows: AllReduce | None = None,
) -> Totals:
    """The number of valid tokens, and of sequences, groups and rollouts with a valid token: the denominators of a step.

    ``groups`` is 0 without ``group_ids``, ``trajectories`` None without ``trajectory_ids``. If sequences are split over
    ranks, each of these gets the totals of the whole sequences: sum them only over ranks that have other sequences.

    Returns:
        the counts, each int64 ().

    >>> count_totals(torch.tensor([[True, True], [False, False]]), group_ids=torch.tensor([0, 1]))
    Totals(tokens=tensor(2), sequences=tensor(1), groups=tensor(1), trajectories=None)
    """
    check_tokens(response_mask, cu_seqlens)
    lengths = sequence_lengths(response_mask, cu_seqlens, all_reduce_rows=all_reduce_rows)
    sequences = (lengths > 0).sum()
    groups, trajectories = torch.zeros_like(sequences), None
    if group_ids is not None:
        groups = (_tokens_by_id(response_mask, cu_seqlens, lengths, group_ids=group_ids) > 0).sum()
    if trajectory_ids is not None:
        trajectories = (_tokens_by_id(response_mask, cu_seqlens, lengths, trajectory_ids=trajectory_ids) > 0).sum()
    return Totals(lengths.sum(), sequences, groups, trajectories)


def _tokens_by_id(response_mask: TokenMask, cu_seqlens: CuSeqlens | None, lengths: Tensor, **named: GroupIds) -> Tensor:
    """int64 (B,): the number of valid tokens in the rows with each id."""
    ((name, ids),) = named.items()
    check_group_ids(ids, name=name)
    check_sequences(response_mask, cu_seqlens, **named)
    return torch.zeros_like(lengths).index_add(0, ids, lengths)


def _counts(totals: Totals) -> Totals:
    """The totals; raises ``ValueError`` unless they are ``Totals``."""
    if not isinstance(totals, Totals):
        raise ValueError(
            f"totals is {totals!r}, expected types.Totals, the counts of a whole optimizer step: use "
            "losses.count_totals(response_mask), or Totals(tokens=..., sequences=..., groups=...)"
        )
    return totals


def _at_least_one(count: Tensor | int) -> Tensor | int:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


@described
def token_sum(losses: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Scalar:
    """Σ over all valid tokens.

    >>> token_sum(torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]]))
    tensor(3.)
    """
    check_tokens(response_mask, cu_seqlens, losses=losses)
    return zero_outside(losses, response_mask).sum()


@described
def token_mean(
    losses: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, totals: Totals | None = None
) -> Scalar:
    """Mean over all valid tokens of the step: Σ / totals.tokens.

    DAPO's code uses it (verl's ``token-mean``, TRL's ``dapo``); the equation of its paper is :func:`prompt_token_mean`.

    >>> token_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.)
    """
    tokens = response_mask.sum() if totals is None else _counts(totals).tokens
    return token_sum(losses, response_mask, cu_seqlens) / _at_least_one(tokens)


@described
def seq_mean_token_sum(
    losses: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, totals: Totals | None = None
) -> Scalar:
    """Σ over each sequence's tokens, mean over sequences.

    >>> seq_mean_token_sum(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(4.5000)
    """
    sequences = count_totals(response_mask, cu_seqlens).sequences if totals is None else _counts(totals).sequences
    return token_sum(losses, response_mask, cu_seqlens) / _at_least_one(sequences)


@described
def seq_mean_token_sum_norm(
    losses: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    totals: Totals | None = None,
    *,
    length: float,
) -> Scalar:
    """:func:`seq_mean_token_sum` divided by a constant length: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), listing 1.

    Args:
        length: the largest number of response tokens in any batch, above 0; verl's default is each batch's width.

    >>> seq_mean_token_sum_norm(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]), length=8)
    tensor(0.5000)
    """
    check_above(0, ": the maximum number of response tokens", length=length)
    return seq_mean_token_sum(losses, response_mask, cu_seqlens, totals) / length


@described
def seq_mean_token_mean(
    losses: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    totals: Totals | None = None,
    row_tokens: RowCounts | None = None,
) -> Scalar:
    """Mean over each sequence's tokens, mean over sequences: GRPO (arXiv:2402.03300), eq. 3.

    Args:
        row_tokens: for each row, the number of valid tokens of its sequence in the whole step. Give it with ``totals``
            if a row is a part of a sequence: ``layout.sequence_lengths(..., all_reduce_rows=...)``, and
            :func:`count_totals` with the same ``all_reduce_rows``. None: sequences are whole.

    >>> seq_mean_token_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.5000)
    """
    check_tokens(response_mask, cu_seqlens, losses=losses)
    lengths = sequence_lengths(response_mask, cu_seqlens)
    sequences = (lengths > 0).sum() if totals is None else _counts(totals).sequences
    return _mean_of_means(losses, response_mask, cu_seqlens, lengths if row_tokens is None else row_tokens, sequences)


@described
def prompt_token_mean(
    losses: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    totals: Totals | None = None,
    group_tokens: RowCounts | None = None,
) -> Scalar:
    """Mean over the tokens of each prompt's group, mean over prompts: the DAPO paper (arXiv:2503.14476), eq. 8.

    Args:
        group_tokens: for each row, the number of valid tokens of its group in the whole step. Give it with ``totals``
            if groups are split over micro-batches; ``group_ids`` are then not used. None: groups are whole.

    >>> m = torch.tensor([[True, True], [True, False], [True, True]])
    >>> prompt_token_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0], [2.0, 2.0]]), torch.tensor([0, 0, 1]), m)
    tensor(2.5000)
    """
    check_tokens(response_mask, cu_seqlens, losses=losses)
    if group_tokens is None:
        lengths = sequence_lengths(response_mask, cu_seqlens)
        group_tokens = _tokens_by_id(response_mask, cu_seqlens, lengths, group_ids=group_ids)[group_ids]
    groups = count_totals(response_mask, cu_seqlens, group_ids).groups if totals is None else _counts(totals).groups
    return _mean_of_means(losses, response_mask, cu_seqlens, group_tokens, groups)


@described
def trajectory_mean(
    losses: PerToken,
    trajectory_ids: TrajectoryIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    totals: Totals | None = None,
    trajectory_tokens: RowCounts | None = None,
) -> Scalar:
    """Mean over the tokens of each rollout, mean over rollouts; a rollout may be several rows.

    (1/N) Σ_i (Σ_j Σ_t ℓ_ijt) / (Σ_j n_ij) for the rows j of rollout i, which have n_ij valid tokens. slime has the
    inner divisor in its ``sample_denoms``. If each rollout is one row, it equals :func:`seq_mean_token_mean`.

    Args:
        trajectory_tokens: for each row, the number of valid tokens of its rollout in the whole step. Give it with
            ``totals`` that count trajectories if the rows of a rollout are split over micro-batches;
            ``trajectory_ids`` are then not used. None: rollouts are whole.

    >>> m = torch.tensor([[True, True], [True, False], [True, True]])
    >>> trajectory_mean(torch.tensor([[1.0, 3.0], [5.0, 9.0], [2.0, 2.0]]), torch.tensor([0, 0, 1]), m)
    tensor(2.5000)
    """
    check_tokens(response_mask, cu_seqlens, losses=losses)
    if trajectory_tokens is None:
        lengths = sequence_lengths(response_mask, cu_seqlens)
        tokens_by_id = _tokens_by_id(response_mask, cu_seqlens, lengths, trajectory_ids=trajectory_ids)
        trajectory_tokens = tokens_by_id[trajectory_ids]
    if totals is None:
        totals = count_totals(response_mask, cu_seqlens, trajectory_ids=trajectory_ids)
    return _mean_of_means(losses, response_mask, cu_seqlens, trajectory_tokens, _counts(totals).of_rollouts().sequences)


def _mean_of_means(
    losses: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None, tokens: RowCounts, count: Tensor | int
) -> Scalar:
    """(1 / count) Σ_rows Σ_t ℓ_t / tokens, with the tokens of the row's sequence, group or rollout."""
    check_sequences(response_mask, cu_seqlens, tokens=tokens)
    shares = sequence_sum(losses, response_mask, cu_seqlens) / tokens.clamp(min=1)
    return shares.sum() / _at_least_one(count)
