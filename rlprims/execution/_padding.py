"""Lists of token ids as padded tensors, with the masks of the tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor


def left_padded(ids: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """int64 and bool (B, width): the tokens at the right end of each row, and their mask.

    >>> left_padded([[5, 6], [7]], 3, 0)[0].tolist()
    [[0, 5, 6], [0, 0, 7]]
    """
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    return _padded(ids, torch.arange(width) >= width - lengths[:, None], pad_token_id)


def right_padded(ids: Sequence[Sequence[int]], width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """int64 and bool (B, width): the tokens at the left end of each row, and their mask."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    return _padded(ids, torch.arange(width) < lengths[:, None], pad_token_id)


def _padded(ids: Sequence[Sequence[int]], mask: Tensor, pad_token_id: int) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([token for row in ids for token in row], dtype=torch.int64)
    return torch.full(mask.shape, pad_token_id, dtype=torch.int64).masked_scatter(mask, tokens), mask
