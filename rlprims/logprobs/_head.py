"""The LM head a tile of tokens at a time: hidden states to logits in computing precision, and their gradient back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims import products, softmax

_SLICE_ELEMENTS = 2**20
"""Elements of the head's weight that are cast at a time."""


def check_head(
    hidden: Tensor, head_weight: Tensor, token_ids: Tensor, temperature: float, soft_cap: float | None
) -> None:
    """Raise ``ValueError`` unless a head (V, H) fits hidden states (..., H) and one token for each of them."""
    softmax.check_temperature(temperature)
    if hidden.dim() < 1 or not hidden.is_floating_point():
        raise ValueError(f"hidden has shape {tuple(hidden.shape)} and dtype {hidden.dtype}, needs floats (..., H)")
    if head_weight.dim() != 2 or head_weight.shape[1] != hidden.shape[-1] or head_weight.dtype is not hidden.dtype:
        raise ValueError(
            f"head_weight has shape {tuple(head_weight.shape)} and dtype {head_weight.dtype}, needs {hidden.dtype} "
            f"(V, {hidden.shape[-1]}) like hidden: the weight of the head's nn.Linear"
        )
    if token_ids.shape != hidden.shape[:-1] or token_ids.dtype is not torch.int64:
        raise ValueError(
            f"token_ids has shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}, "
            f"needs int64 {tuple(hidden.shape[:-1])}: one token for each hidden state"
        )
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap} must be above 0, or None for logits as they are")


def tiles(tokens: int, head_weight: Tensor, *, with_slopes: bool = False) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices that cover the tokens, and room for their logits and the slopes of these: the same memory for all.

    The logits are in computing precision; slopes, which only a product reads, in the head's dtype. Where that is one
    dtype they share their memory, as they do without slopes.

    The vocabulary is whole in each, so that a gradient of hidden is rounded once.
    """
    # 64 MiB of float32 are enough for a full-speed product on a CPU; a GPU needs a thousand rows and more.
    elements = 2**24 if head_weight.device.type == "cpu" else 2**28
    rows = max(1, min(tokens, elements // max(1, len(head_weight))))
    room = head_weight.new_empty(rows, len(head_weight), dtype=torch.promote_types(head_weight.dtype, torch.float32))
    slopes = (
        torch.empty_like(room, dtype=head_weight.dtype) if with_slopes and room.dtype is not head_weight.dtype else room
    )
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        yield slice(start, end), room[: end - start], slopes[: end - start]


def write_logits_(tile: Tensor, hidden: Tensor, head_weight: Tensor) -> None:
    """hidden (n, H) @ head_weightᵀ in computing precision, into the tile (n, V)."""
    if hidden.is_cuda and tile.dtype is not hidden.dtype and "dtype_out" in torch.ops.aten.mm.overloads():  # torch 2.8
        torch.mm(hidden, head_weight.T, out_dtype=torch.float32, out=tile)
        return
    wide = hidden.to(tile.dtype)
    if products.suit(wide, tile.T):
        for columns in _vocabulary_slices(head_weight):
            tile[:, columns] = products.product(wide, head_weight[columns].to(tile.dtype))
    elif tile.dtype is head_weight.dtype:
        torch.mm(wide, head_weight.T, out=tile)
    else:
        for columns in _vocabulary_slices(head_weight):
            torch.mm(wide, head_weight[columns].to(tile.dtype).T, out=tile[:, columns])


def capped_parts(tile: Tensor, soft_cap: float | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Of rows of raw logits: where, the logits under the cap in their place, and d capped / d raw (None: 1)."""
    if soft_cap is None:
        yield slice(None), tile, None
        return
    for rows in softmax.row_blocks(tile):
        bent = tile[rows].div_(soft_cap).tanh_()
        slope = 1 - bent.square()
        yield rows, bent.mul_(soft_cap), slope


def surprise_slopes(
    tile: Tensor,
    token_ids: Tensor,
    temperature: float,
    soft_cap: float | None,
    slopes: Tensor,
    entropies: Tensor | None = None,
) -> Tensor:
    """Log-probs (n,) of a tile of raw logits; temperature · d(−log_probs) / d(logits) is written into ``slopes``.

    These may be the tile. The tokens' entropies (n,) are written, too, unless None.
    """
    log_probs = tile.new_empty(len(tile))
    for rows, part, bend in capped_parts(tile, soft_cap):
        spread = None if entropies is None else entropies[rows]
        of_part = slopes[rows] if bend is None else part
        log_probs[rows] = softmax.surprise_slopes(part, token_ids[rows], temperature, of_part, spread)
        if bend is not None:
            slopes[rows] = part.mul_(bend)
    return log_probs


def to_hidden(slopes: Tensor, head_weight: Tensor) -> Tensor:
    """slopes @ head_weight: what a gradient of the logits is for the hidden states."""
    if products.suit(slopes, head_weight.T):
        return products.product(slopes, head_weight.T)
    return slopes.to(head_weight.dtype) @ head_weight


def add_to_weight_(grad_weight: Tensor, slopes: Tensor, hidden: Tensor) -> None:
    """grad_weight += slopesᵀ @ hidden; grad_weight is in computing precision whatever the dtype of hidden."""
    if products.suit(slopes, hidden.T):
        for columns in _vocabulary_slices(grad_weight):
            grad_weight[columns] += products.product(slopes[:, columns].T, hidden.T)
    elif grad_weight.dtype is hidden.dtype:
        grad_weight.addmm_(slopes.T, hidden)
    else:
        for columns in _vocabulary_slices(grad_weight):
            grad_weight[columns] += slopes[:, columns].to(hidden.dtype).T @ hidden


def _vocabulary_slices(head_weight: Tensor) -> Iterator[slice]:
    """Slices of the rows of (V, H), so that a cast of all of it is never made."""
    rows = max(1, _SLICE_ELEMENTS // max(1, head_weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(head_weight), rows))
