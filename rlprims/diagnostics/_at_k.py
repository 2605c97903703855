"""See :func:`best_at_k` and :func:`pass_at_k`."""

import torch

from rlprims.grouping import group_ranks
from rlprims.types import GroupIds, Mean, PerSequence, RowMask


def best_at_k(scores: PerSequence, group_ids: GroupIds, *, k: int) -> Mean:
    """The score to expect of the best of k samples, mean over prompts: unbiased, from n >= k samples of each.

    The mean over all C(n, k) subsets of a group: with its scores ascending, Σ_i x_i C(i − 1, k − 1) / C(n, k). The
    worst of k is ``-best_at_k(-scores)``. verl draws k with replacement, a thousand times, from the global generator:
    one success in 32 is a best@32 of 0.62 there, and 1 here. A group of fewer than k says nothing and is not counted.

    Args:
        scores: float (B,).
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``. Each group is in one part of what is merged.
        k: how many samples.

    Returns:
        Mean, in float64.

    Raises:
        ValueError: k below 1.

    >>> best_at_k(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), k=2).value()  # (3 + 3 + 2) / 3
    tensor(2.6667, dtype=torch.float64)
    """
    if k < 1:
        raise ValueError(f"k={k} must be at least 1: how many samples the best is taken of")
    ranks = group_ranks(scores, group_ids)
    n, below = ranks.sizes, ranks.ranks
    # C(i − 1, k − 1) / C(n, k), factor by factor: no factorial is ever formed
    taken = torch.arange(1, k, device=scores.device)
    weights = ((below[:, None] + 1 - taken).clamp(min=0).double() / (n[:, None] - taken).clamp(min=1)).prod(-1) * k / n
    enough = n >= k
    shares = torch.where(enough, ranks.sort(scores.detach()).double() * weights, 0.0)
    return Mean(shares.sum(), (enough & (below == 0)).sum())


def pass_at_k(correct: RowMask, group_ids: GroupIds, *, k: int) -> Mean:
    """The chance that one of k samples is right, mean over prompts: Chen et al. 2021 (arXiv:2107.03374), eq. 1.

    With c of n right it is 1 − C(n − c, k) / C(n, k), unbiased; 1 − (1 − c/n)^k is too low. See :func:`best_at_k`.

    >>> pass_at_k(torch.tensor([True, False, False, False]), torch.tensor([0, 0, 0, 0]), k=2).value()
    tensor(0.5000, dtype=torch.float64)
    """
    if correct.dtype is not torch.bool:
        raise ValueError(f"correct has dtype {correct.dtype}, needs torch.bool: say from which score on it is right")
    return best_at_k(correct.double(), group_ids, k=k)
