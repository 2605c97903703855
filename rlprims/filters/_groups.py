"""Selection of groups, or of rows of a group: one bool per row, computed from the scores of the group."""

import torch

from rlprims._described import described
from rlprims.ended import CUT_OFF, EndedName
from rlprims.grouping import check_rows, group_bounds, group_centred, group_count, group_ranks, group_sum, is_varied
from rlprims.masking import ended_by, upcast
from rlprims.types import ComponentScores, EndedCodes, GroupIds, PerSequence, RowMask


@described
def varied_scores(scores: PerSequence, group_ids: GroupIds, *, tolerance: float = 1e-6) -> RowMask:
    """Keep the groups whose scores differ: DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476), eq. 11.

    A group is kept if max − min > tolerance · max(1, |max|, |min|). For accuracies this is 0 < correct < G. Give the
    accuracy, not the shaped score. verl and the DAPO recipe test ``np.std > 0``, which keeps seven equal scores of 0.1.
    A group with a NaN is dropped, as is a group of one: neither has a signal.

    >>> varied_scores(torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])).tolist()
    [False, False, False, True, True]
    """
    check_rows(group_ids, scores=scores)
    return is_varied(scores, group_ids, tolerance=tolerance)


@described
def varied_components(component_scores: ComponentScores, group_ids: GroupIds, *, tolerance: float = 1e-6) -> RowMask:
    """Keep the groups in which any reward varies: :func:`varied_scores` for ``advantage.gdpo`` (arXiv:2601.05242).

    GDPO normalizes each reward separately, so a group with equal sums has a signal if the rewards behind the sums
    differ: one response is correct, another is well formatted. A group with an unknown score in any reward is dropped.

    >>> scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    >>> varied_components(scores, torch.tensor([0, 0, 1, 1])).tolist()
    [True, True, False, False]
    """
    if component_scores.dim() != 2 or component_scores.shape[:1] != group_ids.shape or component_scores.shape[1] == 0:
        raise ValueError(
            f"component_scores has shape {tuple(component_scores.shape)}, group_ids has {tuple(group_ids.shape)}: "
            "expected (B, K) with one column for each reward, and (B,)"
        )
    columns = component_scores.unbind(1)
    varied = torch.stack([varied_scores(scores, group_ids, tolerance=tolerance) for scores in columns])
    known = torch.stack([finite_scores(scores, group_ids) for scores in columns])
    return varied.any(0) & known.all(0)


@described
def finite_scores(scores: PerSequence, group_ids: GroupIds) -> RowMask:
    """Keep the groups in which every score is a finite number.

    A verifier returns NaN if it could not score a sample. One unknown score makes the group's mean unknown.

    >>> finite_scores(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([0, 0, 1])).tolist()
    [False, False, True]
    """
    check_rows(group_ids, scores=scores)
    return group_count(group_ids, ~scores.isfinite()) == 0


@described
def solve_rate(scores: PerSequence, group_ids: GroupIds, *, low: float = 0.0, high: float = 1.0) -> RowMask:
    """Keep the groups whose mean score lies in a band: prompts that are neither too hard nor too easy.

    low < mean < high as in OpenRLHF, compared in the precision of the scores, with the bounds excluded: 0 and 1 drop
    the prompts that no response and that every response solves. The mean does not say whether scores differ: seven
    scores of 0.1 pass, see :func:`varied_scores`. A group with an unknown score is dropped.

    >>> solve_rate(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    check_rows(group_ids, scores=scores)
    if not low < high:
        raise ValueError(f"low={low} and high={high}, expected low < high: no group would be kept")
    # The float64 sum of float32 scores is exact, so the mean is rounded once: 9 of 10 is exactly the bound 0.9. The
    # mean of equal scores is exactly their value, because it is between the smallest and the largest.
    mean = group_sum(scores.double(), group_ids) / group_count(group_ids)
    mean = mean.clamp(*group_bounds(scores.double(), group_ids)).to(upcast(scores).dtype)
    return (low < mean) & (mean < high)


@described
def completed_groups(
    ended: EndedCodes, group_ids: GroupIds, *, max_share: float = 0.0, reasons: tuple[EndedName, ...] = CUT_OFF
) -> RowMask:
    """Keep the groups in which at most a share of the responses was cut off: truncated, aborted or failed.

    Args:
        max_share: the largest share of the group's responses that may be cut off, in [0, 1).
        reasons: the reasons that count as cut off. Default: all except ``stop``.

    >>> from rlprims.ended import Ended
    >>> ended = torch.tensor([Ended.STOP, Ended.LENGTH, Ended.STOP, Ended.STOP])
    >>> completed_groups(ended, torch.tensor([0, 0, 1, 1])).tolist()
    [False, False, True, True]
    """
    cut_off = ended_by(ended, reasons)
    check_rows(group_ids, ended=cut_off)
    if not 0 <= max_share < 1:
        raise ValueError(f"max_share={max_share}, expected a number in [0, 1): at 1 every group is kept")
    # The quotient of two integers is the float64 nearest to the fraction, and so is the literal: 29/100 equals 0.29.
    share = group_count(group_ids, cut_off).double() / group_count(group_ids)
    return share <= max_share


@described
def max_variance(scores: PerSequence, group_ids: GroupIds, *, keep: int) -> RowMask:
    """Keep, in each group, the ``keep`` responses whose scores have the largest variance: PODS (arXiv:2504.13818).

    The best subset is always the i lowest and the keep − i highest scores for some i; all i are compared. Of equally
    good subsets the one with more high scores is kept; of equal scores the first rows. Groups of at most ``keep`` (at
    least 2) rows are kept whole. Compute advantages from the kept rows only. Filter unknown scores (NaN) first.

    Returns:
        True on kept rows.

    >>> max_variance(torch.tensor([0.0, 0.1, 0.2, 0.9, 1.0]), torch.zeros(5, dtype=torch.int64), keep=3).tolist()
    [True, False, False, True, True]
    """
    check_rows(group_ids, scores=scores)
    if keep < 2:
        raise ValueError(f"keep={keep}, expected at least 2: the variance of one score is 0")
    ranks = group_ranks(scores, group_ids)
    group = ranks.sort(group_ids)
    from_low = ranks.ranks[:, None]
    from_high = ranks.sizes[:, None] - 1 - from_low

    # Column i is the subset of the i lowest and the keep − i highest scores; all tensors are in the order of the ranks.
    lowest = torch.arange(keep + 1, device=scores.device)
    in_subset = (from_low < lowest) | (from_high < keep - lowest)
    members = torch.where(in_subset, ranks.sort(group_centred(scores, group_ids))[:, None], 0.0)
    totals = torch.zeros_like(members).index_add(0, group, members)
    squares = torch.zeros_like(members).index_add(0, group, members.square())
    variances = squares / keep - (totals / keep).square()
    # The tolerance keeps rounding from deciding between subsets of equal variance.
    is_best = variances >= variances.amax(1, keepdim=True) * (1 - 1e-5)
    best_subset = is_best.long().argmax(1)[group]
    return ranks.unsort(in_subset.gather(1, best_subset[:, None])[:, 0])
