"""The forward pass without padding: shared tokens are computed once, and outputs are for response tokens only.

The tokens of a micro-batch are one row, the prefix tree of its rows: a prompt occurs once for all its responses, and
the history of an agent once for all rows that continue it. Only attention depends on which tokens are in one sequence:
it gathers them by a :class:`Layout`, and is registered with transformers under a name, which a model's config selects.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlprims.batching import prefix_tree
from rlprims.execution.hf._families import why_padded
from rlprims.execution.hf._routes import ROUTES
from rlprims.grouping import rows_by_label

_NAME = "rlprims_packed"


def use_packing(model: nn.Module) -> None:
    """Select the packed attention for the model, with transformers' own function."""
    if (reason := why_padded(model.config)) is not None:
        raise ValueError(f"model.packing: {reason}. Leave it out, or set model.packing: false")
    model.set_attn_implementation(_NAME)  # type: ignore[operator]


def is_packed(model: nn.Module) -> bool:
    """Whether :func:`use_packing` has been called: the attention of a model says how its batches are laid out."""
    return model.config.get_text_config()._attn_implementation == _NAME  # type: ignore[union-attr,operator,no-any-return]


class Layout(NamedTuple):
    """Where the tokens of B rows are in their prefix tree, without the last token of each response.

    Attention computes blocks of rows with similar lengths, each as wide as its longest row, with S slots in all.
    """

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    blocks: list[tuple[int, int]]  # rows and width of each
    tokens: Tensor  # (S,), which of the N tokens is in each slot, in the order of the row; 0 after its end
    slots: Tensor  # (N,), one slot of each token
    predicting: Tensor  # (M,), the token before each attended response token, row after row
    routes: Tensor | None  # (N, L, K), the recorded experts
    nodes: Tensor  # (B, P+T), which of the N tokens each token of the rows is, or -1


def packed_layout(batch: dict[str, Tensor]) -> Layout:
    """The layout of rows, on the CPU: a token is shared only if it has the same ``tree_ids``, if the batch has them."""
    prompts, responses, attention = batch["prompts"], batch["responses"], batch["attention_mask"].bool()
    width = prompts.shape[1]
    in_prompt, attended = attention[:, :width], attention[:, width:]
    prompt_lengths, response_lengths = in_prompt.sum(-1), (attended.sum(-1) - 1).clamp(min=0)
    is_read = torch.cat([in_prompt, torch.arange(responses.shape[1]) < response_lengths[:, None]], 1)
    tokens = torch.cat([prompts, responses], 1)
    tree = prefix_tree(batch.get("tree_ids", tokens), is_read)

    def of_nodes(x: Tensor) -> Tensor:
        nodes = x.new_zeros(len(tree.token_ids), *x.shape[2:])
        nodes[tree.nodes[is_read]] = x[is_read]
        return nodes

    row_lengths, nodes = prompt_lengths + response_lengths, tree.nodes.numpy()
    order = row_lengths.argsort(descending=True).tolist()
    widths = _block_widths(row_lengths[order].tolist())
    in_slots, slots = np.zeros(sum(widths), np.int64), np.zeros(len(tree.token_ids), np.int64)
    for row, begin in zip(order, accumulate(widths, initial=0), strict=False):
        first, length = width - int(prompt_lengths[row]), int(row_lengths[row])
        path = nodes[row, first : first + length]
        in_slots[begin : begin + length] = path
        slots[path] = np.arange(begin, begin + length)  # a shared token has several, and any of them can be used
    return Layout(
        input_ids=(of_nodes(tokens) if "tree_ids" in batch else tree.token_ids)[None],
        position_ids=tree.position_ids[None],
        blocks=[(len(list(rows)), block_width) for block_width, rows in groupby(widths)],
        tokens=torch.from_numpy(in_slots),
        slots=torch.from_numpy(slots),
        predicting=torch.from_numpy(nodes[:, width - 1 : -1][attended.numpy()]),
        routes=of_nodes(batch[ROUTES]) if ROUTES in batch else None,
        nodes=tree.nodes,
    )


def _block_widths(lengths: Sequence[int]) -> list[int]:
    """For each row, longest first, the width of its block. A row with 3/4 of the width or more is in the same block."""
    widths: list[int] = []
    for length in lengths:
        widths.append(widths[-1] if widths and 4 * length >= 3 * widths[-1] else max(length, 1))
    return widths


def packed_inputs(layout: Layout) -> dict[str, Any]:
    """The arguments of a packed forward pass."""
    return {
        "input_ids": layout.input_ids,
        "position_ids": layout.position_ids,
        "layout": layout,
        # transformers passes on a mask of four dimensions unchanged, and the packed attention does not use it.
        # Without one transformers would make a mask of (N, N).
        "attention_mask": layout.input_ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
    }


def packed_micro_batches(
    nodes: Tensor, labels: Sequence[Hashable] | None = None, *, max_tokens: int
) -> list[list[int]]:
    """Split rows, in their order, into micro-batches of at most ``max_tokens`` tokens; a shared token counts once.

    ``nodes`` (B, T) are the nodes of the rows' prefix tree. Rows with the same label in ``labels`` stay together.
    """
    units = [[row] for row in range(len(nodes))] if labels is None else rows_by_label(labels)
    parts: list[list[int]] = []
    used, numbers = 0, nodes.cpu().numpy()
    last_unit = np.full(numbers.max(initial=-1) + 1, -1)  # with each token
    last_part = last_unit.copy()
    for unit, rows in enumerate(units):
        own = []  # of each row, the tokens that no row of the unit before it has
        for row in rows:
            read = numbers[row][numbers[row] >= 0]
            own.append(read[last_unit[read] != unit])
            last_unit[own[-1]] = unit
        tokens = np.concatenate(own)
        whole, cost = len(tokens), int((last_part[tokens] != len(parts) - 1).sum())
        if whole > max_tokens:
            what = f"row {rows[0]} has" if len(rows) == 1 else f"the group or rollout of row {rows[0]} has"
            raise ValueError(f"{what} {whole} tokens, more than max_tokens={max_tokens}: raise it, or shorten rows")
        if not parts or used + cost > max_tokens:
            parts.append([])
            used, cost = 0, whole
        parts[-1] += rows
        used += cost
        last_part[tokens] = len(parts) - 1
    return parts


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention of (1, heads, N, d) within each row of the layout; without a layout transformers' ``sdpa``."""
    layout: Layout | None = kwargs.pop("layout", None)
    if layout is None:
        special = kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None
        if query.shape[2] == 1 and query.shape[1] > key.shape[1] and not special:
            return _decode_attention(query, key, value, attention_mask, kwargs.get("scaling")), None
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    if unknown := [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"packed attention has no {unknown}: set model.packing: false")
    window = kwargs.pop("sliding_window", None)

    def in_blocks(x: Tensor) -> list[Tensor]:
        # The gradient of index_select is faster than that of x[...]: it adds whole slices.
        tokens = rearrange(x, "1 heads n d -> n heads d").index_select(0, layout.tokens)
        parts = torch.split(tokens, [rows * width for rows, width in layout.blocks])
        return [
            rearrange(part, "(rows width) heads d -> rows heads width d", rows=rows)
            for part, (rows, _) in zip(parts, layout.blocks, strict=True)
        ]

    outputs = []
    for q, k, v in zip(*map(in_blocks, (query, key, value)), strict=True):
        if window is not None and window < q.shape[2]:
            attended = _attend_in_window(module, q, k, v, window, **kwargs)
        else:
            attended = _attend(module, q, k, v, None, **kwargs)
        outputs.append(rearrange(attended, "rows width heads d -> (rows width) heads d"))
    return rearrange(torch.cat(outputs).index_select(0, layout.slots), "n heads d -> 1 n heads d"), None


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Transformers' ``sdpa``; sinks ``s_aux``, one for each head, are the scores of one more key, whose value is 0."""
    sinks: Tensor | None = kwargs.pop("s_aux", None)
    if sinks is not None:
        rows, width = query.shape[2], key.shape[2]
        if mask is None:
            mask = torch.ones(rows, width, dtype=torch.bool, device=query.device).tril(width - rows)[None, None]
        scores = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
        shape = (query.shape[0], query.shape[1], rows)
        sink = rearrange(sinks.to(query.dtype), "heads -> 1 heads 1 1").expand(*shape, 1)
        mask = torch.cat([scores.expand(*shape, width), sink], -1)
        key, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    attended: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return attended


def _attend_in_window(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int, **kwargs: Any
) -> Tensor:
    """Attention to the last W = ``window`` tokens, in bands: W queries need their own keys and the W before.

    So a token costs 2 W keys, in time and in memory. If the row has fewer tokens, a mask of the whole row.
    """
    rows, _, width, _ = query.shape
    at = torch.arange(min(width, 2 * window), device=query.device)
    distance = at[:, None] - at
    mask = ((distance >= 0) & (distance < window))[None, None]
    if width < 2 * window:
        return _attend(module, query, key, value, mask, **kwargs)
    q, k, v = (nn.functional.pad(x, (0, 0, 0, -width % window)) for x in (query, key, value))
    first = _attend(module, q[:, :, :window], k[:, :, :window], v[:, :, :window], None, **kwargs)
    q = rearrange(q[:, :, window:], "rows h (bands w) d -> (rows bands) h w d", w=window)
    k, v = (rearrange(x.unfold(2, 2 * window, window), "rows h bands d w -> (rows bands) h w d") for x in (k, v))
    others = rearrange(
        _attend(module, q, k, v, mask[:, :, window:], **kwargs), "(rows bands) w h d -> rows (bands w) h d", rows=rows
    )
    return torch.cat([first, others], 1)[:, :width]


def _decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of one new token, (batch, 1, heads, d), where query heads share keys: they become positions.

    With a mask, transformers' ``sdpa`` would copy the cache for each head, in every layer for every token.
    """
    sharing = rearrange(query, "batch (keys group) 1 d -> batch keys group d", keys=key.shape[1])
    attended = scaled_dot_product_attention(sharing, key, value, attn_mask=mask, scale=scaling)
    return rearrange(attended, "batch keys group d -> batch 1 (keys group) d")


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
