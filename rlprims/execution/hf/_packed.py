"""The forward without padding: each prompt once for all its responses, and the logits of the responses' tokens alone.

The tokens of a micro-batch stand in one row, prompts before responses, and no layer but attention knows of rows: that
one puts them together by a :class:`Layout`. The numbers are those of the padded batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "rlprims_packed"


class Layout(NamedTuple):
    """Where the tokens of B rows stand: the prompts that differ, then each response without its last token.

    For attention the rows stand in blocks of nearly equal lengths, each as wide as its longest: S slots in all.
    """

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    blocks: list[tuple[int, int]]  # rows and width of each
    tokens: Tensor  # (S,), which of the N is in each slot, the prompt's first; 0 where a row has no more
    slots: Tensor  # (N,), where in the blocks each token is found, once
    predicting: Tensor  # (M,), of each attended response token, row after row, the token before it
    attended: Tensor  # (B, T), those tokens


def layout(batch: dict[str, Tensor]) -> Layout:
    """Of rows with left-padded ``prompts``, right-padded ``responses`` and their ``attention_mask``."""
    prompts, responses, attention = batch["prompts"], batch["responses"], batch["attention_mask"].bool()
    here, attended = attention[:, : prompts.shape[1]], attention[:, prompts.shape[1] :]
    distinct, source = torch.unique(torch.where(here, prompts, -1), dim=0, return_inverse=True)
    lengths, read = (distinct >= 0).sum(-1), (attended.sum(-1) - 1).clamp(min=0)
    first_of_prompt = (lengths.cumsum(0) - lengths)[source]
    first_of_response = lengths.sum() + read.cumsum(0) - read
    of_prompt = lengths[source]

    of_row = of_prompt + read
    order = of_row.argsort(descending=True)
    widths = _widths(of_row[order].tolist())
    blocks = [(len(list(rows)), width) for width, rows in groupby(widths)]
    width = torch.tensor(widths, device=prompts.device)
    row = order.repeat_interleave(width)
    column = torch.arange(len(row), device=prompts.device) - (width.cumsum(0) - width).repeat_interleave(width)
    after_prompt = column - of_prompt[row]
    token = torch.where(after_prompt < 0, first_of_prompt[row] + column, first_of_response[row] + after_prompt)
    has_one = after_prompt < read[row]
    taken = has_one.nonzero()[:, 0]
    slots = torch.zeros(int(lengths.sum() + read.sum()), dtype=torch.int64, device=prompts.device)
    slots[token[taken]] = taken  # of a shared prompt any of its rows
    j = torch.arange(responses.shape[1], device=prompts.device)
    last_of_prompt = (first_of_prompt + of_prompt - 1)[:, None]
    return Layout(
        input_ids=torch.cat([distinct[distinct >= 0], responses[j < read[:, None]]])[None],
        position_ids=column[slots][None],
        blocks=blocks,
        tokens=torch.where(has_one, token, 0),
        slots=slots,
        predicting=torch.where(j == 0, last_of_prompt, first_of_response[:, None] + j - 1)[attended],
        attended=attended,
    )


def _widths(lengths: Sequence[int]) -> list[int]:
    """Of each row, longest first, the width of its block: it joins one that it fills to three quarters."""
    widths: list[int] = []
    for length in lengths:
        widths.append(widths[-1] if widths and 4 * length >= 3 * widths[-1] else max(length, 1))
    return widths


def packed_logits(model: nn.Module, where: Layout) -> Tensor:
    """(M, V): what the model says of each attended response token before it sees it, row after row."""
    logits: Tensor = model(
        input_ids=where.input_ids,
        position_ids=where.position_ids,
        use_cache=False,
        logits_to_keep=where.predicting,
        layout=where,
    ).logits
    return logits[0]


def packs(model: nn.Module) -> bool:
    """Whether its forward takes a layout."""
    return bool(getattr(model, "packs", False))


@contextmanager
def packing(model: nn.Module) -> Iterator[None]:
    """Inside, a forward takes a layout if the model :func:`packs`; the backward belongs inside, it may repeat one."""
    with attending(model, _NAME):
        yield


@contextmanager
def attending(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, the attention is the registered one of that name, if the model :func:`packs`: its own can go."""
    if not packs(model):
        yield
        return
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def probe(model: nn.Module) -> dict[str, Tensor]:
    """Rows to ask a model with: two with the same prompt, one with a shorter one, and an early end."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    device = next(model.parameters()).device
    ids = (torch.arange(30, device=device) * 7 % vocabulary).reshape(3, 10)
    ids[1, :4] = ids[0, :4]
    attention = torch.ones(3, 10, dtype=torch.bool, device=device)
    attention[2, :2] = attention[1, 8:] = False
    return {"prompts": ids[:, :4], "responses": ids[:, 4:], "attention_mask": attention}


@torch.no_grad()
def pack_if_equal(model: nn.Module, padded_logits: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
    """Let the model pack if that says what the padded forward does: the model itself is asked, no list is complete."""
    batch = probe(model)
    where = layout(batch)
    expected = padded_logits(model, batch)[where.attended]
    model.packs = True  # type: ignore[assignment]
    try:
        with packing(model):
            packed = packed_logits(model, where)
    except Exception:  # whatever is raised by a forward that was not made for it
        model.packs = False  # type: ignore[assignment]
    else:
        tolerance = 1e-5 * max(1.0, float(expected.abs().max()))
        model.packs = torch.allclose(packed, expected, rtol=0, atol=tolerance)  # type: ignore[assignment]


def micro_batches_of_groups(
    prompts: Sequence[int], prompt_lengths: Sequence[int], response_lengths: Sequence[int], *, max_tokens: int
) -> list[list[int]]:
    """Rows in their order into micro-batches of at most ``max_tokens`` tokens, a prompt's counted once in each.

    ``prompts`` says which rows have the same.

    Raises:
        ValueError: a row is longer than the budget; it names the row.
    """
    parts: list[list[int]] = []
    used, seen = 0, set[int]()
    for row, (prompt, shared, own) in enumerate(zip(prompts, prompt_lengths, response_lengths, strict=True)):
        if shared + own > max_tokens:
            raise ValueError(
                f"row {row} has {shared + own} tokens, more than max_tokens={max_tokens}: raise the budget, "
                "or shorten prompts or responses"
            )
        cost = own if prompt in seen else shared + own
        if not parts or used + cost > max_tokens:
            parts.append([])
            used, seen, cost = 0, set(), shared + own
        parts[-1].append(row)
        used += cost
        seen.add(prompt)
    return parts


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention of (1, heads, N, d) within each row of the layout."""
    where: Layout = kwargs.pop("layout")
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"the packed forward does not know {unknown}")
    window = kwargs.pop("sliding_window", None)

    def in_blocks(x: Tensor) -> list[Tensor]:
        # The gradient of this index adds slices, that of x[...] single numbers.
        tokens = x[0].transpose(0, 1).index_select(0, where.tokens)
        parts = torch.split(tokens, [rows * width for rows, width in where.blocks])
        return [
            part.view(*block, *part.shape[1:]).transpose(1, 2) for part, block in zip(parts, where.blocks, strict=True)
        ]

    outs = []
    for q, k, v in zip(*map(in_blocks, (query, key, value)), strict=True):
        width = q.shape[2]
        mask = None if window is None or window >= width else _band(width, window, q.device)
        outs.append(sdpa_attention_forward(module, q, k, v, attention_mask=mask, **kwargs)[0].flatten(0, 1))
    return torch.cat(outs).index_select(0, where.slots)[None], None


def _band(width: int, window: int, device: torch.device) -> Tensor:
    position = torch.arange(width, device=device)
    distance = position[:, None] - position
    return ((distance >= 0) & (distance < window))[None, None]


AttentionInterface.register(_NAME, _attention)
