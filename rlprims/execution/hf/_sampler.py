"""Sampling with a key-value cache: whole batch at once, finished rows leave it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlprims.execution._config import Sampling


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
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    # right=True: a banned token adds nothing to the sum, so it is never the first to pass u.
    chosen = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def sample(
    model: nn.Module,
    prompts: Tensor,
    prompt_mask: Tensor,
    sampling: Sampling,
    *,
    u: Tensor,
    end_ids: Tensor,
    pad_id: int,
    ends_text: Callable[[list[int]], bool] | None = None,
) -> Responses:
    """Responses to left-padded ``prompts`` (B, P), token t of row i drawn at quantile ``u[i, t]``."""
    rows, limit = len(prompts), sampling.max_new_tokens
    device = prompts.device
    process = processed(sampling)
    u = u.to(device)
    tokens = torch.full((rows, limit), pad_id, dtype=torch.int64, device=device)
    mask = torch.zeros(rows, limit, dtype=torch.bool, device=device)
    log_probs = torch.zeros(rows, limit, dtype=torch.float32, device=device)
    truncated = torch.ones(rows, dtype=torch.bool, device=device)

    alive = torch.arange(rows, device=device)
    attention = prompt_mask.long()
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    inputs, cache = prompts, DynamicCache()
    for t in range(limit if rows else 0):
        output = model(
            input_ids=inputs,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = process(output.logits[:, -1].float())
        chosen = choose(logits, u[alive, t] if sampling.temperature > 0 else None)
        tokens[alive, t] = chosen
        mask[alive, t] = True
        log_probs[alive, t] = torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0]
        ended = torch.isin(chosen, end_ids)
        if ends_text is not None:
            texts = [ends_text(row) for row in tokens[alive, : t + 1].tolist()]
            ended |= torch.tensor(texts, dtype=torch.bool, device=device)
        truncated[alive[ended]] = False
        positions = positions[:, -1:] + 1
        if bool(ended.any()):
            going = (~ended).nonzero()[:, 0]
            if not len(going):
                break
            cache.batch_select_indices(going)
            alive, attention, positions, chosen = alive[going], attention[going], positions[going], chosen[going]
        attention = nn.functional.pad(attention, (0, 1), value=1)
        inputs = chosen[:, None]
    return Responses(tokens, mask, log_probs, truncated)
