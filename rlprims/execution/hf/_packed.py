"""The forward pass without padding: shared tokens are computed once, and outputs are for response tokens only.

The tokens of a micro-batch are one row, the prefix tree of its rows: a prompt occurs once for all its responses, and
the history of an agent once for all rows that continue it. Only attention depends on which tokens are in one sequence:
it gathers them by a :class:`Layout`. The results are those of the padded batch.

The attention is registered with transformers under a name, which a model's config selects when the model is loaded.
Without a layout, as in sampling, it is transformers' ``sdpa``.
"""

from collections.abc import Hashable, Sequence
from itertools import groupby
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
from rlprims.execution.hf._families import NOT_PACKED, PACKED_MODELS
from rlprims.execution.hf._routes import ROUTES
from rlprims.grouping import rows_by_label

_NAME = "rlprims_packed"


def use_packing(model: nn.Module) -> None:
    """Select the packed attention for the model, with transformers' own function."""
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kind = config.model_type
    reason = NOT_PACKED.get(kind)
    if reason is None and getattr(config, "attn_logit_softcapping", None) is not None:
        reason = "its attention has a soft cap"
    if reason is None and kind not in PACKED_MODELS:
        reason = f"tested types are {', '.join(PACKED_MODELS)}"
    if reason is not None:
        raise ValueError(f"model.packing: a {kind} cannot be packed: {reason}. Set model.packing: false")
    model.set_attn_implementation(_NAME)  # type: ignore[operator]


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
    attended: Tensor  # (B, T), the attended response tokens
    routes: Tensor | None  # (N, L, K), the recorded experts


def packed_layout(batch: dict[str, Tensor]) -> Layout:
    """The layout of rows with left-padded ``prompts``, right-padded ``responses`` and their ``attention_mask``.

    Rows with ``routed_experts`` also have ``tree_ids``: they share a token only if it has the same experts.
    """
    prompts, responses, attention = batch["prompts"], batch["responses"], batch["attention_mask"].bool()
    in_prompt, attended = attention[:, : prompts.shape[1]], attention[:, prompts.shape[1] :]
    prompt_lengths, response_lengths = in_prompt.sum(-1), (attended.sum(-1) - 1).clamp(min=0)
    j = torch.arange(responses.shape[1], device=prompts.device)
    is_read = torch.cat([in_prompt, j < response_lengths[:, None]], 1)
    tokens = torch.cat([prompts, responses], 1)
    tree = prefix_tree(batch.get("tree_ids", tokens), is_read)

    def of_nodes(x: Tensor) -> Tensor:
        nodes = x.new_zeros(len(tree.token_ids), *x.shape[2:])
        nodes[tree.nodes[is_read]] = x[is_read]
        return nodes

    row_lengths = prompt_lengths + response_lengths
    order = row_lengths.argsort(descending=True)
    widths = _block_widths(row_lengths[order].tolist())
    width = torch.tensor(widths, device=prompts.device)
    row = order.repeat_interleave(width)
    column = torch.arange(len(row), device=prompts.device) - (width.cumsum(0) - width).repeat_interleave(width)
    is_used = column < row_lengths[row]
    place = (prompts.shape[1] - prompt_lengths[row] + column).clamp(max=is_read.shape[1] - 1)
    token = tree.nodes[row, place]
    used_slots = is_used.nonzero()[:, 0]
    slots = torch.zeros_like(tree.token_ids)
    slots[token[used_slots]] = used_slots  # a shared token has several slots, and any of them can be used
    return Layout(
        input_ids=of_nodes(tokens)[None],
        position_ids=tree.position_ids[None],
        blocks=[(len(list(rows)), block_width) for block_width, rows in groupby(widths)],
        tokens=torch.where(is_used, token, 0),
        slots=slots,
        predicting=tree.nodes[:, prompts.shape[1] - 1 : -1][attended],
        attended=attended,
        routes=of_nodes(batch[ROUTES]) if ROUTES in batch else None,
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
        "attention_mask": layout.attended.new_ones(1, 1, 1, 1),
    }


def packed_micro_batches(
    nodes: Tensor, labels: Sequence[Hashable] | None = None, *, max_tokens: int
) -> list[list[int]]:
    """Split rows, in their order, into micro-batches of at most ``max_tokens`` tokens; a shared token counts once.

    ``nodes`` (B, T) are the nodes of the rows' prefix tree. Rows with the same label in ``labels`` stay together; None:
    no constraint.
    """
    units = [[row] for row in range(len(nodes))] if labels is None else rows_by_label(labels)
    parts: list[list[int]] = []
    used, numbers = 0, nodes.cpu().numpy()
    last_part = np.full(numbers.max(initial=-1) + 1, -1)  # the last part with each token
    for rows in units:
        tokens = np.unique(numbers[rows])
        tokens = tokens[tokens >= 0]
        whole, cost = len(tokens), int((last_part[tokens] != len(parts) - 1).sum())
        if whole > max_tokens:
            what = f"row {rows[0]} has" if len(rows) == 1 else f"the group or rollout of row {rows[0]} has"
            raise ValueError(
                f"{what} {whole} tokens, more than max_tokens={max_tokens}: raise the budget, "
                "or shorten prompts or responses"
            )
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
        if query.shape[2] == 1 and query.shape[1] > key.shape[1] and kwargs.get("position_bias") is None:
            return _decode_attention(query, key, value, attention_mask, kwargs.get("scaling")), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
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
        width = q.shape[2]
        mask = None if window is None or window >= width else _window_mask(width, window, q.device)
        attended = sdpa_attention_forward(module, q, k, v, attention_mask=mask, **kwargs)[0]
        outputs.append(rearrange(attended, "rows width heads d -> (rows width) heads d"))
    return rearrange(torch.cat(outputs).index_select(0, layout.slots), "n heads d -> 1 n heads d"), None


def _decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of one new token, (batch, 1, heads, d), if several query heads share the keys of one head.

    Heads that share keys are put on the axis of positions. With a mask, transformers' ``sdpa`` would copy the cache for
    each of them, in every layer for every token.
    """
    sharing = rearrange(query, "batch (keys group) 1 d -> batch keys group d", keys=key.shape[1])
    attended = scaled_dot_product_attention(sharing, key, value, attn_mask=mask, scale=scaling)
    return rearrange(attended, "batch keys group d -> batch 1 (keys group) d")


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    position = torch.arange(width, device=device)
    distance = position[:, None] - position
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
