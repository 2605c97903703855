"""The ids that each token could have been, from what vLLM returns of a response: sampling masks, or log-probs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rows_of_masks(csr: Any) -> list[Any]:
    """``SamplingMaskLists.to_nested_list`` without a Python number for each id; without offsets it is one token's."""
    return np.split(csr.token_ids, [] if csr.offsets is None else csr.offsets[1:-1])


def rows_of_log_probs(flat: Any) -> list[Any]:
    """The same of a response's ``FlatLogprobs``: the drawn token, then the likeliest; those left out have -inf."""
    ids, is_left = np.array(flat.token_ids, np.int32), np.array(flat.logprobs) > -np.inf
    return [np.unique(ids[i:j][is_left[i:j]]) for i, j in zip(flat.start_indices, flat.end_indices, strict=True)]


def sets_of(rows: Sequence[Any], size: int) -> tuple[Tensor, Tensor]:
    """int32 (K,) and (T,): the ids of T tokens one after another, and their numbers; no ids if all ``size`` are left.

    >>> sets_of([[1, 4], [0, 1, 2, 3, 4], [2]], 5)
    (tensor([1, 4, 2], dtype=torch.int32), tensor([2, 0, 1], dtype=torch.int32))
    """
    some = [np.zeros(0, np.int32), *(row for row in rows if len(row) < size)]
    return torch.from_numpy(np.concatenate(some, dtype=np.int32)), torch.tensor([len(row) % size for row in rows]).int()
