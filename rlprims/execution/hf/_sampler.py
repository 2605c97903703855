"""Sampling with a key-value cache: each prompt is read once for all its samples, and finished rows leave the batch."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlprims.execution._config import Sampling
from rlprims.execution.hf._cache import RoomyLayer
from rlprims.logprobs import from_logits
from rlprims.softmax import row_blocks

_SHARE_GOING = 7 / 8
"""Of the rows in the batch, below which the finished ones leave it: that copies the keys and values of the others."""


class Responses(NamedTuple):
    tokens: Tensor  # int64 (B, T), padded right
    mask: Tensor  # bool (B, T)
    log_probs: Tensor  # float32 (B, T), of the distribution that was sampled from
    truncated: Tensor  # bool (B,), the length limit came before an end


def uniforms(seed: int, sample_ids: Sequence[int], count: int) -> Tensor:
    """float64 (B, count) in [0, 1): each row a function of (seed, sample id) alone.

    Counter-based, so a sample is the same in any batch, in any order, and again after a crash, with no state to keep.
    """
    rows = [np.random.Generator(np.random.Philox(key=[seed, sample])).random(count) for sample in sample_ids]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, count, dtype=torch.float64)


def processed(sampling: Sampling) -> Callable[[Tensor], Tensor]:
    """Logits to the logits that are sampled from."""
    steps: list[Any] = []
    if sampling.temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))

    def process(logits: Tensor) -> Tensor:
        for step in steps:
            logits = step(None, logits)
        return logits

    return process


def choose(logits: Tensor, u: Tensor | None) -> Tensor:
    """The token at quantile ``u`` of each row's distribution, or the likeliest."""
    if u is None:
        return logits.argmax(-1)
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for rows in row_blocks(logits):
        cumulative = torch.softmax(logits[rows].double(), -1).cumsum(-1)
        # right=True: a banned token adds nothing to the sum, so it is never the first to pass u.
        chosen[rows] = torch.searchsorted(cumulative, u[rows, None] * cumulative[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Tensor,
    prompt_mask: Tensor,
    source: Tensor,
    sampling: Sampling,
    *,
    u: Tensor,
    end_ids: Tensor,
    pad_id: int,
    ends_text: Callable[[list[int]], bool] | None = None,
) -> Responses:
    """B responses: row i goes on from the left-padded ``prompts[source[i]]``, with token t at quantile ``u[i, t]``."""
    rows, limit = len(source), sampling.max_new_tokens
    device = prompts.device
    process = processed(sampling)
    u = u.to(device)
    tokens = torch.full((rows, limit), pad_id, dtype=torch.int64, device=device)
    mask = torch.zeros(rows, limit, dtype=torch.bool, device=device)
    log_probs = torch.zeros(rows, limit, dtype=torch.float32, device=device)
    truncated = torch.ones(rows, dtype=torch.bool, device=device)

    row_of = torch.arange(rows, device=device)  # of each lane of the batch
    going = torch.ones(rows, dtype=torch.bool, device=device)
    padded, attention = not bool(prompt_mask.all()), prompt_mask.long()
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    inputs, cache = prompts, Cache(layer_class_to_replicate=RoomyLayer)
    for t in range(limit if rows else 0):
        output = model(
            input_ids=inputs,
            attention_mask=attention if padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits, positions = output.logits[:, -1], positions[:, -1:] + 1
        if t == 0:
            cache.batch_select_indices(source)
            logits, attention, positions = logits[source], attention[source], positions[source]
        logits = process(logits.float())
        chosen = choose(logits, u[row_of, t] if sampling.temperature > 0 else None)
        alive = row_of[going]
        tokens[alive, t] = chosen[going]
        mask[alive, t] = True
        log_probs[alive, t] = from_logits(logits, chosen)[going]
        ended = torch.isin(chosen, end_ids)
        if ends_text is not None:
            texts = [ends_text(row) for row in tokens[row_of, : t + 1].tolist()]
            ended |= torch.tensor(texts, dtype=torch.bool, device=device)
        truncated[row_of[ended & going]] = False
        going &= ~ended
        left = int(going.sum())
        if not left:
            break
        if left < _SHARE_GOING * len(going):
            lanes = going.nonzero()[:, 0]
            cache.batch_select_indices(lanes)
            row_of, attention, positions, chosen = row_of[lanes], attention[lanes], positions[lanes], chosen[lanes]
            going = going[lanes]
        attention = nn.functional.pad(attention, (0, 1), value=1)
        inputs = chosen[:, None]
    return Responses(tokens, mask, log_probs, truncated)
