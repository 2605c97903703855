"""See :func:`optimal_value`."""

import torch

from rlprims.grouping import group_bounds, group_count
from rlprims.masking import upcast
from rlprims.types import GroupIds, PerSequence, RowMask


def optimal_value(
    scores: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, beta: float = 0.5
) -> PerSequence:
    """The baseline of A*-PO (arXiv:2505.20686): the value of the best policy under a KL penalty, from the reference's.

    V* = β log mean_j exp(s_j / β) over the group, whose responses the *reference* policy sampled: the optimum of
    E[s] − β KL(π, π_ref). It is the mean for β → ∞ and the maximum for β → 0. The advantage of a response s is s − V*,
    ``remax(rewards, baseline_scores, response_mask)`` with the prompt's V* as ``baseline_scores``.

    Args:
        scores: float (B,).
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        valid_rows: bool (B,), rows that the reference sampled; the others receive their group's V* too. None: all.
        beta: β, in units of the score; 1/2 in TRL.

    Returns:
        float (B,), each row its group's V*; 0 if no row of the group is valid.

    Raises:
        ValueError: shapes or dtypes that do not fit; β that is not positive.

    >>> optimal_value(torch.tensor([1.0, 0.0, 0.3]), torch.tensor([0, 0, 1]))
    tensor([0.7169, 0.7169, 0.3000])
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}, needs more than 0: the weight of the KL in units of the score")
    if scores.shape != group_ids.shape:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}, group_ids has {tuple(group_ids.shape)}: both are (B,)"
        )
    s = upcast(scores)
    _, best = group_bounds(s, group_ids, valid_rows)
    share = ((s - best) / beta).exp()  # of valid rows at most 1, so nothing overflows
    if valid_rows is not None:
        share = torch.where(valid_rows, share, 0.0)
    n = group_count(group_ids, valid_rows)
    mean = torch.zeros_like(s).index_add(0, group_ids, share)[group_ids] / n.clamp(min=1)
    return best + beta * torch.where(n > 0, mean, 1.0).log()
