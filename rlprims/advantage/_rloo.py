"""See :func:`rloo`."""

from rlprims._groups import Groups, Numbers, moments_of, on_groups
from rlprims.advantage._responses import paid, response_scores
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask


def rloo(
    rewards: PerToken,
    group_ids: GroupIds,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
) -> PerToken:
    """REINFORCE leave-one-out, Kool et al. 2019; Ahmadian et al. 2024 (arXiv:2402.14740), eq. 8.

    A_i = s_i − mean of the other samples' s_j = n/(n−1) · (s_i − μ), with s_i = Σ_t r_it. A group of one has nobody
    to compare with: 0 (as SkyRL, tunix and verl's vectorized form; verl's default form and rllm keep the raw reward).

    Args:
        rewards: float (B, T) or (N,), per token.
        group_ids: int64 (B,), dense: see ``grouping.dense_ids``.
        response_mask: bool, like rewards.
        cu_seqlens: int (B+1,) if packed.
        valid_rows: bool (B,), rows that count; the others are in no statistic and get 0. None: all.

    Returns:
        float, like rewards; 0 outside the mask.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    >>> import torch
    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> rloo(torch.tensor([[1.0], [0.0], [0.0]]), torch.zeros(3, dtype=torch.int64), m).T
    tensor([[ 1.0000, -0.5000, -0.5000]])
    """
    s, response_mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    return paid(leave_one_out(s, group_ids, valid_rows), response_mask, cu_seqlens)


def leave_one_out(s: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None) -> PerSequence:
    """Each valid row's number less the mean of the valid others of its group; 0 if there are none.

    >>> import torch
    >>> leave_one_out(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0, 0, 1]), None)
    tensor([-2.,  2.,  0.])
    """

    def less_the_others(g: Groups, s: Numbers) -> tuple[Numbers]:
        group = moments_of(g, s)
        return (group.centred * g.rows(others(g, group.size)),)

    return on_groups(less_the_others, group_ids, valid_rows, s)[0]


def others(groups: Groups, size: Numbers) -> Numbers:
    """n/(n−1), which makes of a distance to the mean of all one to the mean of the others; of one alone it is 0."""
    return size / groups.larger(size - 1, 1.0)
