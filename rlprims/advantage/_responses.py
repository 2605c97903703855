"""One number per response, of the responses that count."""

import torch

from rlprims.blocks import all_valid
from rlprims.layout import sequence_ids, sequence_sum, to_tokens
from rlprims.masking import check_sequences, check_tokens, upcast
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask


def response_scores(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None,
    valid_rows: RowMask | None,
) -> tuple[PerSequence, TokenMask]:
    """s_i = Σ_t r_it, and the mask without the rows that do not count: their score is 0, and nothing is paid to them.

    >>> rewards, mask = torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> response_scores(rewards, torch.tensor([0, 0]), mask, None, torch.tensor([True, False]))
    (tensor([3., 0.]), tensor([[ True,  True],
            [False, False]]))
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    check_sequences(response_mask, cu_seqlens, group_ids=group_ids)
    counted = tokens_of_valid_rows(response_mask, cu_seqlens, valid_rows)
    if _tokens_are_responses(counted, cu_seqlens):
        return upcast(rewards).squeeze(-1), counted
    return sequence_sum(rewards, counted, cu_seqlens), counted


def paid(a: PerSequence, mask: TokenMask, cu_seqlens: CuSeqlens | None) -> PerToken:
    """``to_tokens`` of numbers that were made for it: where each response is one valid token, a view of them.

    >>> paid(torch.tensor([1.0, 2.0]), torch.tensor([[True], [False]]), None).T
    tensor([[1., 0.]])
    """
    return a.unsqueeze(-1) if _tokens_are_responses(mask, cu_seqlens) else to_tokens(a, mask, cu_seqlens)


def _tokens_are_responses(mask: TokenMask, cu_seqlens: CuSeqlens | None) -> bool:
    return cu_seqlens is None and mask.shape[1] == 1 and all_valid(mask)


def tokens_of_valid_rows(
    response_mask: TokenMask, cu_seqlens: CuSeqlens | None, valid_rows: RowMask | None
) -> TokenMask:
    """The mask, False on rows that are not valid.

    >>> tokens_of_valid_rows(torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 3]), torch.tensor([True, False]))
    tensor([ True, False, False])
    """
    if valid_rows is None:
        return response_mask
    check_sequences(response_mask, cu_seqlens, valid_rows=valid_rows)
    if valid_rows.dtype is not torch.bool:
        raise ValueError(f"valid_rows has dtype {valid_rows.dtype}, needs torch.bool: one answer per row")
    if cu_seqlens is None:
        return response_mask & valid_rows[:, None]
    return response_mask & valid_rows[sequence_ids(cu_seqlens, len(response_mask))]
