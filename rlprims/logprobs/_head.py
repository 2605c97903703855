"""The LM head a tile of tokens at a time: hidden states to logits in computing precision, and their gradient back."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims import softmax
from rlprims.masking import upcast

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


def tiles(tokens: int, head_weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices that cover the tokens, and room for their logits, which is the same memory for all.

    The vocabulary is whole in each, so that a gradient of hidden is rounded once.
    """
    # 64 MiB of float32 are enough for a full-speed product on a CPU; a GPU needs a thousand rows and more.
    elements = 2**24 if head_weight.device.type == "cpu" else 2**28
    rows = max(1, min(tokens, elements // max(1, len(head_weight))))
    room = head_weight.new_empty(rows, len(head_weight), dtype=torch.promote_types(head_weight.dtype, torch.float32))
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        yield slice(start, end), room[: end - start]


def write_logits_(tile: Tensor, hidden: Tensor, head_weight: Tensor) -> None:
    """hidden @ head_weightᵀ, (n, V), neither accumulated nor rounded below float32: bf16 would cost 0.05 nats."""
    if upcast(hidden) is hidden:
        torch.mm(hidden, head_weight.T, out=tile)
    elif hidden.is_cuda and "dtype_out" in torch.ops.aten.mm.overloads():  # since torch 2.8
        torch.mm(hidden, head_weight.T, out_dtype=torch.float32, out=tile)
    else:
        wide = hidden.float()
        for columns in _vocabulary_slices(head_weight):
            torch.mm(wide, head_weight[columns].float().T, out=tile[:, columns])


def capped_parts(tile: Tensor, soft_cap: float | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Of rows of raw logits: where, the logits under the cap in their place, and d capped / d raw (None: 1)."""
    if soft_cap is None:
        yield slice(None), tile, None
        return
    for rows in softmax.row_blocks(tile):
        bent = tile[rows].div_(soft_cap).tanh_()
        slope = 1 - bent.square()
        yield rows, bent.mul_(soft_cap), slope


def surprise_slopes_(
    tile: Tensor, token_ids: Tensor, temperature: float, soft_cap: float | None, entropies: Tensor | None = None
) -> Tensor:
    """Log-probs (n,) of a tile of raw logits, which becomes temperature · d(−log_probs) / d(logits) in place.

    The tokens' entropies (n,) are written, too, unless None.
    """
    log_probs = tile.new_empty(len(tile))
    for rows, part, bend in capped_parts(tile, soft_cap):
        log_probs[rows] = softmax.surprise_slopes_(
            part, token_ids[rows], temperature, None if entropies is None else entropies[rows]
        )
        if bend is not None:
            part.mul_(bend)
    return log_probs


def to_hidden(slopes: Tensor, head_weight: Tensor) -> Tensor:
    """slopes @ head_weight: what a gradient of the logits is for the hidden states."""
    return slopes.to(head_weight.dtype) @ head_weight


def add_to_weight_(grad_weight: Tensor, slopes: Tensor, hidden: Tensor) -> None:
    """grad_weight += slopesᵀ @ hidden; grad_weight is in computing precision whatever the dtype of hidden."""
    if grad_weight.dtype is hidden.dtype:
        grad_weight.addmm_(slopes.T, hidden)
        return
    for columns in _vocabulary_slices(grad_weight):
        grad_weight[columns] += slopes[:, columns].to(hidden.dtype).T @ hidden


def _vocabulary_slices(head_weight: Tensor) -> Iterator[slice]:
    """Slices of the rows of (V, H), so that a cast of all of it is never made."""
    rows = max(1, _SLICE_ELEMENTS // max(1, head_weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(head_weight), rows))
