"""See :func:`max_variance`."""

import torch

from rlprims.grouping import check_group_ids, group_centred, group_ranks
from rlprims.types import GroupIds, PerSequence, RowMask


def max_variance(scores: PerSequence, group_ids: GroupIds, *, keep: int) -> RowMask:
    """Of each group the ``keep`` responses whose scores have the largest variance: PODS (arXiv:2504.13818).

    Sampling is cheap beside training: sample many, train on the few that differ most. The best subset is always the i
    lowest and the keep − i highest scores for some i; all of them are compared. Of subsets that are equally good the
    one with more high scores is taken, and of equal scores the first rows. Groups of at most ``keep`` are kept whole.

    This selects rows of a group, and the estimator that follows sees the selected ones only. It answers for the scores
    as they are: filter unknown ones before.

    Args:
        scores: float (B,).
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        keep: at least 2, since one score has no variance.

    Returns:
        bool (B,).

    Raises:
        ValueError: shapes or dtypes that do not fit; keep below 2.

    >>> import torch
    >>> max_variance(torch.tensor([0.0, 0.1, 0.2, 0.9, 1.0]), torch.zeros(5, dtype=torch.int64), keep=3).tolist()
    [True, False, False, True, True]
    """
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    check_group_ids(group_ids)
    if keep < 2:
        raise ValueError(f"keep={keep} needs at least 2: the variance of one score is 0")
    ranks = group_ranks(scores, group_ids)
    owner = ranks.sort(group_ids)
    from_low = ranks.ranks[:, None]
    from_high = ranks.sizes[:, None] - 1 - from_low

    lows = torch.arange(keep + 1, device=scores.device)
    chosen = (from_low < lows) | (from_high < keep - lows)
    s = torch.where(chosen, ranks.sort(group_centred(scores, group_ids))[:, None], 0.0)
    total, squares = (torch.zeros_like(s).index_add(0, owner, x) for x in (s, s.square()))
    variance = squares / keep - (total / keep).square()
    # Rounding must not decide between subsets of equal variance.
    good = variance >= variance.amax(1, keepdim=True) * (1 - 1e-5)
    best = good.long().argmax(1)[owner]
    selected = chosen.gather(1, best[:, None])[:, 0]
    return ranks.unsort(selected)
