"""Rows that begin alike, as a tree in which each shared token is once."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.masking import check_tensors


class PrefixTree(NamedTuple):
    """N distinct tokens in depth-first order: what follows a token stands behind it, from it to its ``end``."""

    token_ids: Tensor  # (N,)
    position_ids: Tensor  # (N,), the tokens before it in its rows
    parents: Tensor  # (N,), the token before it; −1 for a row's first
    ends: Tensor  # (N,), one more than the last token that follows it
    nodes: Tensor  # (B, T), which of the N tokens is there; −1 outside the mask

    def visible(self) -> Tensor:
        """bool (N, N): token q sees token k, which is itself or comes before it in a row. With ``[None, None]`` a mask.

        >>> tree = prefix_tree(torch.tensor([[5, 6], [5, 7]]), torch.ones(2, 2, dtype=torch.bool))
        >>> tree.visible().long()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]])
        """
        q = torch.arange(len(self.ends), device=self.ends.device)[:, None]
        return (q >= q.T) & (q < self.ends)

    def per_row(self, x: Tensor) -> Tensor:
        """(B, T, ...) of what each of the N tokens has, (N, ...): the same number in every row that shares it; else 0.

        >>> tree = prefix_tree(torch.tensor([[5, 6], [5, 7]]), torch.ones(2, 2, dtype=torch.bool))
        >>> tree.per_row(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2.],
                [1., 3.]])
        """
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.nodes]  # −1 is the last


def prefix_tree(token_ids: Tensor, attention_mask: Tensor) -> PrefixTree:
    """The tree of B rows: two rows share their tokens as far as they are equal from their first token on.

    A causal model computes the same for tokens with the same history, so a forward pass needs each of the N once: give
    it ``token_ids`` and ``position_ids`` as one row, and ``visible()`` as the mask. ``per_row`` takes its outputs back
    to the rows, where the gradients of rows that share a token add up. Rows of an agent share histories at any depth,
    samples of a prompt share the prompt, equal rows share all. The layout is that of TRL's pull request 7328; AReaL and
    verl (issue 7561) have the like. Here no row is compared in Python: rows are sorted, and each shares with the one
    before it what it shares with any before it.

    ``model.packing`` uses it for every micro-batch; see ``docs/execution.md``.

    Args:
        token_ids: int (B, T); none negative where the mask is True.
        attention_mask: bool (B, T), a row's tokens; padding may be anywhere.

    Returns:
        :class:`PrefixTree`; the order of its rows' first tokens is that of their ids.

    Raises:
        ValueError: wrong shapes or dtypes.

    >>> rows = torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5], [1, 2, 3, 0]])
    >>> tree = prefix_tree(rows, rows > 0)
    >>> tree.token_ids, tree.parents
    (tensor([1, 2, 3, 4, 5]), tensor([-1,  0,  1,  1,  3]))
    >>> tree.nodes
    tensor([[ 0,  1,  2, -1],
            [ 0,  1,  3,  4],
            [ 0,  1,  2, -1]])
    """
    check_tensors(token_ids=token_ids, attention_mask=attention_mask)
    if token_ids.dim() != 2 or token_ids.is_floating_point() or token_ids.dtype is torch.bool:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, expected int (B, T)"
        )
    if attention_mask.shape != token_ids.shape or attention_mask.dtype is not torch.bool:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}, expected bool "
            f"{tuple(token_ids.shape)}, like token_ids: use attention_mask.bool()"
        )
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    to_the_left = (~attention_mask).long().argsort(dim=1, stable=True)
    is_token = column < attention_mask.sum(1, keepdim=True)
    aligned = torch.where(is_token, token_ids.gather(1, to_the_left), -1)
    rows, row_of = torch.unique(aligned, dim=0, return_inverse=True)  # sorted; a row before those that go on from it
    lengths = (rows >= 0).sum(1)
    shared = (rows[1:] == rows[:-1]).long().cumprod(1).sum(1)  # with the row before
    shared = torch.cat([shared.new_zeros(min(len(rows), 1)), shared])
    own = lengths - shared
    first = own.cumsum(0) - own
    # A token that a row shares belongs to the last row before it that has it as its own.
    row = torch.arange(len(rows), device=token_ids.device)[:, None]
    owner = torch.where(column >= shared[:, None], row, 0)
    owner = owner.cummax(0).values if len(rows) else owner
    nodes = first[owner] + column - shared[owner]
    is_used = column < lengths[:, None]
    is_own = is_used & (column >= shared[:, None])
    before = torch.cat([torch.full_like(nodes[:, :1], -1), nodes[:, :-1]], 1)
    behind_last = (first + own)[:, None].expand_as(nodes)
    ends = nodes.new_zeros(int(own.sum())).scatter_reduce(0, nodes[is_used], behind_last[is_used], "amax")
    back = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    return PrefixTree(
        token_ids=rows[is_own],
        position_ids=column.expand_as(nodes)[is_own],
        parents=before[is_own],
        ends=ends,
        nodes=torch.where(attention_mask, nodes[row_of].gather(1, back), -1),
    )
