"""Sampling with a key-value cache. A prompt is read once for all its samples, and finished rows leave the batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlprims.ended import Ended
from rlprims.execution._config import Sampling
from rlprims.execution._kept import KeptSets
from rlprims.execution.hf._draw import draw
from rlprims.execution.hf._routes import are_read
from rlprims.logprobs import from_logits

_COMPACT_BELOW = 7 / 8
"""If less than this share of the batch's rows is active, the finished rows are removed, which copies the cache."""


class Responses(NamedTuple):
    tokens: Tensor  # int64 (B, T), padded right
    mask: Tensor  # bool (B, T)
    log_probs: Tensor  # float32 (B, T), of the distribution that was sampled from
    ended: Tensor  # int8 (B,), why: codes of Ended
    kept_ids: Tensor | None = None  # int32 (K,), row after row: what top-k, top-p or min-p left; None: they are off
    kept_counts: Tensor | None = None  # int32 (B, T), how many of these ids each token has
    routes: Tensor | None = None  # int16 (N, L, K), row after row: the experts of each token that was read


def processed(sampling: Sampling) -> Callable[[Tensor], Tensor]:
    """The function from a model's logits to the logits for sampling: temperature, min-p, top-k, top-p.

    Each one is applied to the result of the one before, in the order of vLLM.
    """
    steps: list[Any] = []
    if sampling.temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))

    def process(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(None, logits)
        return logits

    return process


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Tensor,
    prompt_mask: Tensor,
    source: Tensor,
    sampling: Sampling,
    *,
    seeds: Tensor,
    end_ids: Tensor,
    pad_id: int,
    ends_text: Callable[[list[int]], bool] | None = None,
    take_routes: Callable[[], Tensor] | None = None,
) -> Responses:
    """B responses. Row i continues the left-padded ``prompts[source[i]]``; its tokens are drawn with ``seeds[i]``.

    ``take_routes`` returns the experts of the tokens that the model has read since its last call, (N, L, K).
    """
    rows, limit = len(source), sampling.max_new_tokens
    device = prompts.device
    process = processed(sampling)
    seeds = seeds.to(device)
    tokens = torch.full((rows, limit), pad_id, dtype=torch.int64, device=device)
    mask = torch.zeros(rows, limit, dtype=torch.bool, device=device)
    log_probs = torch.zeros(rows, limit, dtype=torch.float32, device=device)
    reasons = torch.full((rows,), Ended.LENGTH, dtype=torch.int8, device=device)
    kept_sets = KeptSets(rows, limit) if sampling.truncates else None
    routes: list[Tensor] = []  # (B, P, L, K) of the prompts, then (B, 1, L, K) of each token

    row_of = torch.arange(rows, device=device)  # the response of each row of the batch
    active = torch.ones(rows, dtype=torch.bool, device=device)  # the rows of the batch that are not finished
    is_padded, attention = not bool(prompt_mask.all()), prompt_mask.long()
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    inputs, cache = prompts, DynamicCache(config=model.config)
    for t in range(limit if rows else 0):
        output = model(
            input_ids=inputs,
            attention_mask=attention if is_padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, positions = output.logits[:, -1], positions[:, -1:] + 1
        if take_routes is not None:
            place = torch.zeros_like(source).scatter(0, row_of, torch.arange(len(row_of), device=device))
            read = take_routes()
            read = read.view(*inputs.shape, *read.shape[1:])
            routes.append(read[(source if t == 0 else place).cpu()])
        if t == 0:
            cache.batch_select_indices(source)
            logits, attention, positions = logits[source], attention[source], positions[source]
        logits = process(logits.float())
        chosen = draw(logits, seeds[row_of], positions[:, 0] - 1) if sampling.temperature > 0 else logits.argmax(-1)
        active_rows = row_of[active]
        tokens[active_rows, t] = chosen[active]
        mask[active_rows, t] = True
        log_probs[active_rows, t] = from_logits(logits, chosen)[active]
        if kept_sets is not None:
            kept_sets.add(t, active_rows, logits[active])
        ended = torch.isin(chosen, end_ids)
        if ends_text is not None:
            texts = [ends_text(row) for row in tokens[row_of, : t + 1].tolist()]
            ended |= torch.tensor(texts, dtype=torch.bool, device=device)
        reasons[row_of[ended & active]] = Ended.STOP
        active &= ~ended
        number_active = int(active.sum())
        if not number_active:
            break
        if number_active < _COMPACT_BELOW * active.shape[0]:
            kept = active.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            row_of, attention, positions, chosen = row_of[kept], attention[kept], positions[kept], chosen[kept]
            active = active[kept]
        attention = nn.functional.pad(attention, (0, 1), value=1)
        inputs = chosen[:, None]
    kept_ids, kept_counts = (None, None) if kept_sets is None else kept_sets.by_row()
    used: Tensor | None = None
    if take_routes is not None:
        used = torch.cat(routes, 1) if routes else take_routes()[:, None]
        used = used[are_read(torch.cat([prompt_mask[source], mask], 1)).cpu()[:, : used.shape[1]]]
    return Responses(tokens, mask, log_probs, reasons, kept_ids, kept_counts, used)
