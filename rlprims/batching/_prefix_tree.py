"""A tree of rows with common prefixes, in which each shared token is stored once."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
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
    is_token = attention_mask.cpu().numpy()
    rows = [ids[mask] for ids, mask in zip(token_ids.cpu().numpy(), is_token, strict=True)]
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())  # these bytes sort as the numbers
    before = (np.zeros(0, np.int64), *(rows[i] for i in order))
    # The tokens that each has in common with the row before it: the first difference, at the latest the end of a row.
    shared = [int(np.append(x[: len(y)] != y[: len(x)], True).argmax()) for x, y in pairwise(before)]
    nodes, path = np.full(is_token.shape, -1), np.full(is_token.shape[1] + 1, -1)  # the root, and the nodes of a row
    own, count = [np.zeros((3, 0), np.int64)], 0
    for i, begin in zip(order, shared, strict=True):
        place = np.arange(begin, len(rows[i]))
        path[place + 1] = place + (count - begin)
        nodes[i, is_token[i]] = path[1 : len(rows[i]) + 1]
        own.append(np.stack([rows[i][begin:], place, path[place]]))
        count += len(place)
    ends, end_of, end, next_begin = np.zeros(count, np.int64), np.zeros_like(path), count, 0
    for i, begin in zip(reversed(order), reversed(shared), strict=True):
        end_of[next_begin : len(rows[i])] = end
        first = end - (len(rows[i]) - begin)
        ends[first:end] = end_of[begin : len(rows[i])]
        end, next_begin = first, begin
    tokens, *others = (torch.from_numpy(x).to(token_ids.device) for x in (*np.concatenate(own, 1), ends, nodes))
    return PrefixTree(tokens.to(token_ids.dtype), *others)
