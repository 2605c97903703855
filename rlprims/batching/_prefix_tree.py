"""A tree of rows with common prefixes, in which each shared token is stored once."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlprims.masking import check_tensors


class PrefixTree(NamedTuple):
    """N distinct tokens in depth-first order: the descendants of a token are the tokens after it up to its ``end``."""

    token_ids: Tensor  # (N,)
    position_ids: Tensor  # (N,), the number of tokens before it in its rows
    parents: Tensor  # (N,), the token before it; −1 for the first token of a row
    ends: Tensor  # (N,), one more than its last descendant
    nodes: Tensor  # (B, T), the index among the N tokens; −1 outside the mask

    def visible(self) -> Tensor:
        """The attention mask, bool (N, N): token q attends to token k if k is q or an ancestor of q.

        >>> tree = prefix_tree(torch.tensor([[5, 6], [5, 7]]), torch.ones(2, 2, dtype=torch.bool))
        >>> tree.visible().long()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]])
        """
        q = torch.arange(len(self.ends), device=self.ends.device)[:, None]
        return (q >= q.T) & (q < self.ends)

    def per_row(self, x: Tensor) -> Tensor:
        """Values of the N tokens, (N, ...), copied to the rows, (B, T, ...); 0 outside the mask.

        >>> tree = prefix_tree(torch.tensor([[5, 6], [5, 7]]), torch.ones(2, 2, dtype=torch.bool))
        >>> tree.per_row(torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2.],
                [1., 3.]])
        """
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[self.nodes]  # index −1 is the appended 0


def prefix_tree(token_ids: Tensor, attention_mask: Tensor) -> PrefixTree:
    """The tree of B rows: two rows share the tokens of their longest common prefix.

    A causal model computes the same values for tokens with the same history, so a forward pass needs each of the N
    tokens once: give it ``token_ids`` and ``position_ids`` as one row, and ``visible()`` as the mask. ``per_row``
    copies its outputs to the rows; the gradients of rows that share a token add up. The layout is that of TRL's pull
    request 7328; AReaL and verl (issue 7561) have similar ones. The rows are sorted; the longest prefix that a row
    shares with any earlier row is then the one that it shares with the row before it.

    Args:
        token_ids: int (B, T); at least 0 where the mask is True.
        attention_mask: bool (B, T), True on the tokens of a row; padding may be anywhere.

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
        shape = tuple(token_ids.shape)
        raise ValueError(f"token_ids has shape {shape} and dtype {token_ids.dtype}, expected int (B, T)")
    if attention_mask.shape != token_ids.shape or attention_mask.dtype is not torch.bool:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}, expected bool "
            f"{tuple(token_ids.shape)}, like token_ids: use attention_mask.bool()"
        )
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    tokens_first = (~attention_mask).long().argsort(dim=1, stable=True)
    is_token = column < attention_mask.sum(1, keepdim=True)
    left_aligned = torch.where(is_token, token_ids.gather(1, tokens_first), -1)
    rows, row_of = torch.unique(left_aligned, dim=0, return_inverse=True)  # sorted: a prefix of a row comes before it
    lengths = (rows >= 0).sum(1)
    shared = (rows[1:] == rows[:-1]).long().cumprod(1).sum(1)  # the tokens that a row shares with the row before it
    shared = torch.cat([shared.new_zeros(min(len(rows), 1)), shared])
    own = lengths - shared
    first = own.cumsum(0) - own
    # A shared token belongs to the last earlier row that has it among its own tokens.
    row = torch.arange(len(rows), device=token_ids.device)[:, None]
    owner = torch.where(column >= shared[:, None], row, 0)
    owner = owner.cummax(0).values if len(rows) else owner
    nodes = first[owner] + column - shared[owner]
    is_used = column < lengths[:, None]
    is_own = is_used & (column >= shared[:, None])
    before = torch.cat([torch.full_like(nodes[:, :1], -1), nodes[:, :-1]], 1)
    row_end = (first + own)[:, None].expand_as(nodes)
    ends = nodes.new_zeros(int(own.sum())).scatter_reduce(0, nodes[is_used], row_end[is_used], "amax")
    aligned_column = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    return PrefixTree(
        token_ids=rows[is_own],
        position_ids=column.expand_as(nodes)[is_own],
        parents=before[is_own],
        ends=ends,
        nodes=torch.where(attention_mask, nodes[row_of].gather(1, aligned_column), -1),
    )
