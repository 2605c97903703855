"""The forward pass without padding: each prompt once for all its responses, and outputs for response tokens only.

The tokens of a micro-batch are one row, prompts before responses. Only attention depends on which tokens belong
together: it gathers them by a :class:`Layout`. The results are those of the padded batch.

The attention is registered with transformers under a name, and a model is told once, when it is loaded, to use it.
Called without a layout, as for sampling, it is transformers' own ``sdpa``.
"""

from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlprims.grouping import rows_by_label

PACKED_MODELS = (
    "cohere",
    "gemma",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
"""Values of ``model_type`` for which the tests compare packed logits and gradients with padded ones."""

_REFUSED = {
    "bloom": "its attention adds a bias by position (ALiBi)",
    "falcon": "its attention may add a bias by position (ALiBi)",
    "gemma2": "its attention has a soft cap",
    "gpt_oss": "its attention has sinks",
    "mpt": "its attention adds a bias by position (ALiBi)",
}
_NAME = "rlprims_packed"


def use_packing(model: nn.Module) -> None:
    """Let the model use the packed attention, by transformers' own switch.

    Raises:
        ValueError: its type is not among those that are tested, or its attention has a soft cap.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    kind = config.model_type
    reason = _REFUSED.get(kind)
    if reason is None and getattr(config, "attn_logit_softcapping", None) is not None:
        reason = "its attention has a soft cap"
    if reason is None and kind not in PACKED_MODELS:
        reason = f"tested types are {', '.join(PACKED_MODELS)}"
    if reason is not None:
        raise ValueError(f"model.packing: a {kind} cannot be packed: {reason}. Set model.packing: false")
    model.set_attn_implementation(_NAME)  # type: ignore[operator]


class Layout(NamedTuple):
    """Where the tokens of B rows are: the distinct prompts, then each response without its last token.

    For attention the rows are put into blocks of nearly equal lengths, each as wide as its longest row: S slots in all.
    """

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    blocks: list[tuple[int, int]]  # rows and width of each
    tokens: Tensor  # (S,), which of the N tokens is in each slot, the prompt's first; 0 after the end of a row
    slots: Tensor  # (N,), one slot of each token
    predicting: Tensor  # (M,), the token before each attended response token, row after row
    attended: Tensor  # (B, T), the attended response tokens


def layout(batch: dict[str, Tensor]) -> Layout:
    """The layout of rows with left-padded ``prompts``, right-padded ``responses`` and their ``attention_mask``."""
    prompts, responses, attention = batch["prompts"], batch["responses"], batch["attention_mask"].bool()
    in_prompt, attended = attention[:, : prompts.shape[1]], attention[:, prompts.shape[1] :]
    distinct, source = torch.unique(torch.where(in_prompt, prompts, -1), dim=0, return_inverse=True)
    # The model reads all of a prompt, and of a response all but the last token.
    distinct_lengths, response_lengths = (distinct >= 0).sum(-1), (attended.sum(-1) - 1).clamp(min=0)
    prompt_lengths = distinct_lengths[source]
    first_of_prompt = (distinct_lengths.cumsum(0) - distinct_lengths)[source]
    first_of_response = distinct_lengths.sum() + response_lengths.cumsum(0) - response_lengths

    row_lengths = prompt_lengths + response_lengths
    order = row_lengths.argsort(descending=True)
    widths = _block_widths(row_lengths[order].tolist())
    width = torch.tensor(widths, device=prompts.device)
    row = order.repeat_interleave(width)
    column = torch.arange(len(row), device=prompts.device) - (width.cumsum(0) - width).repeat_interleave(width)
    after_prompt = column - prompt_lengths[row]
    token = torch.where(after_prompt < 0, first_of_prompt[row] + column, first_of_response[row] + after_prompt)
    is_used = after_prompt < response_lengths[row]
    used_slots = is_used.nonzero()[:, 0]
    slots = torch.zeros(int(distinct_lengths.sum() + response_lengths.sum()), dtype=torch.int64, device=prompts.device)
    slots[token[used_slots]] = used_slots  # a shared prompt has several: any of them
    j = torch.arange(responses.shape[1], device=prompts.device)
    last_of_prompt = (first_of_prompt + prompt_lengths - 1)[:, None]
    return Layout(
        input_ids=torch.cat([distinct[distinct >= 0], responses[j < response_lengths[:, None]]])[None],
        position_ids=column[slots][None],
        blocks=[(len(list(rows)), block_width) for block_width, rows in groupby(widths)],
        tokens=torch.where(is_used, token, 0),
        slots=slots,
        predicting=torch.where(j == 0, last_of_prompt, first_of_response[:, None] + j - 1)[attended],
        attended=attended,
    )


def _block_widths(lengths: Sequence[int]) -> list[int]:
    """For each row, longest first, the width of its block: a row joins the block that it fills to three quarters."""
    widths: list[int] = []
    for length in lengths:
        widths.append(widths[-1] if widths and 4 * length >= 3 * widths[-1] else max(length, 1))
    return widths


def packed_inputs(where: Layout) -> dict[str, Any]:
    """The arguments of a packed forward pass."""
    return {
        "input_ids": where.input_ids,
        "position_ids": where.position_ids,
        "layout": where,
        # transformers hands a mask of four dimensions on unchanged, and the packed attention does not read it.
        # Without one transformers would make a mask of (N, N).
        "attention_mask": where.attended.new_ones(1, 1, 1, 1),
    }


def packed_micro_batches(
    prompts: Sequence[int],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    labels: Sequence[Hashable] | None = None,
    *,
    max_tokens: int,
) -> list[list[int]]:
    """Rows in their order into micro-batches of at most ``max_tokens`` tokens; a prompt counts once in each.

    Rows with the same number in ``prompts`` have the same prompt. Rows with the same of the ``labels`` stay together;
    None: no constraint.

    Raises:
        ValueError: a row (or rollout) is longer than the budget; it names the row.
    """
    units = [[row] for row in range(len(prompts))] if labels is None else rows_by_label(labels)
    parts: list[list[int]] = []
    used, seen = 0, set[int]()
    for rows in units:
        shared = {prompts[row]: prompt_lengths[row] for row in rows}
        own = sum(response_lengths[row] for row in rows)
        whole = own + sum(shared.values())
        if whole > max_tokens:
            what = f"row {rows[0]} has" if len(rows) == 1 else f"the rollout of row {rows[0]} has"
            raise ValueError(
                f"{what} {whole} tokens, more than max_tokens={max_tokens}: raise the budget, "
                "or shorten prompts or responses"
            )
        cost = own + sum(length for prompt, length in shared.items() if prompt not in seen)
        if not parts or used + cost > max_tokens:
            parts.append([])
            used, seen, cost = 0, set(), whole
        parts[-1] += rows
        used += cost
        seen |= shared.keys()
    return parts


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention of (1, heads, N, d) within each row of the layout; without a layout transformers' ``sdpa``."""
    where: Layout | None = kwargs.pop("layout", None)
    if where is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"packed attention has no {unknown}: set model.packing: false")
    window = kwargs.pop("sliding_window", None)

    def in_blocks(x: Tensor) -> list[Tensor]:
        # The gradient of index_select adds slices, that of x[...] single numbers.
        tokens = x[0].transpose(0, 1).index_select(0, where.tokens)
        parts = torch.split(tokens, [rows * width for rows, width in where.blocks])
        return [
            part.view(*block, *part.shape[1:]).transpose(1, 2) for part, block in zip(parts, where.blocks, strict=True)
        ]

    outputs = []
    for q, k, v in zip(*map(in_blocks, (query, key, value)), strict=True):
        width = q.shape[2]
        mask = None if window is None or window >= width else _window_mask(width, window, q.device)
        outputs.append(sdpa_attention_forward(module, q, k, v, attention_mask=mask, **kwargs)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, where.slots)[None], None


def _window_mask(width: int, window: int, device: torch.device) -> Tensor:
    position = torch.arange(width, device=device)
    distance = position[:, None] - position
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
