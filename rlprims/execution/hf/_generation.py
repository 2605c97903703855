"""Sampling of responses to prompts, with the columns that ``Execution`` defines."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlprims.data_proto import DataProto
from rlprims.execution._config import Sampling
from rlprims.execution._kept import kept_columns
from rlprims.execution._padding import left_padded
from rlprims.execution.hf._draw import sample_seeds
from rlprims.execution.hf._routes import recorded, routes_column
from rlprims.execution.hf._sampler import Responses, sample


class Generation:
    """Samples responses from a model in this process, ``max_rows`` at a time; ``routes``: and records the experts."""

    def __init__(self, module: nn.Module, tokenizer: Any, *, max_rows: int, routes: bool = False) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.routes = routes
        self.pad_token_id, self.end_ids = special_ids(module.generation_config, tokenizer)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        ids = prompt_ids(prompts, prompt_width)
        seeds = sample_seeds(seed, prompts["sample_id"].tolist())
        starts = range(0, max(1, len(ids)), self.max_rows)
        parts = [self._sample(ids[i : i + self.max_rows], seeds[i : i + self.max_rows], sampling) for i in starts]
        columns = [None if column[0] is None else torch.cat(column).cpu() for column in zip(*parts, strict=True)]
        responses = Responses(*columns)  # type: ignore[arg-type]
        return with_responses(prompts, responses, prompt_width=prompt_width, pad_token_id=self.pad_token_id)

    def _sample(self, ids: list[list[int]], seeds: Tensor, sampling: Sampling) -> Responses:
        distinct = list(dict.fromkeys(map(tuple, ids)))
        index = {prompt: i for i, prompt in enumerate(distinct)}
        padded, mask = left_padded(distinct, max(map(len, distinct), default=0), self.pad_token_id)
        device = next(self.module.parameters()).device
        with recorded(self.module) if self.routes else nullcontext() as take_routes:
            return sample(
                self.module,
                padded.to(device),
                mask.to(device),
                torch.tensor([index[tuple(prompt)] for prompt in ids], dtype=torch.int64, device=device),
                sampling,
                seeds=seeds,
                end_ids=torch.tensor(self.end_ids, device=device),
                pad_id=self.pad_token_id,
                ends_text=self._ends_text(sampling),
                take_routes=take_routes,
            )

    def _ends_text(self, sampling: Sampling) -> Callable[[list[int]], bool] | None:
        if not sampling.stop:
            return None
        longest = max(map(len, sampling.stop))

        def ends(tokens: list[int]) -> bool:
            # A character has at most 4 bytes and a token at least one, so these tokens contain a whole stop text.
            text = self.tokenizer.decode(tokens[-4 * longest :])
            return any(stop in text for stop in sampling.stop)

        return ends


def prompt_ids(prompts: DataProto, prompt_width: int | None) -> list[list[int]]:
    """The prompts' tokens.

    Raises:
        ValueError: a prompt is longer than ``prompt_width``.
    """
    ids: list[list[int]] = [list(row) for row in prompts["prompt_ids"]]
    longest = max(map(len, ids), default=0)
    if prompt_width is not None and longest > prompt_width:
        raise ValueError(f"a prompt has {longest} tokens, more than prompt_width={prompt_width}: raise the width")
    return ids


def with_responses(
    prompts: DataProto, responses: Responses, *, prompt_width: int | None, pad_token_id: int
) -> DataProto:
    """The prompts with their responses, in the columns that :class:`rlprims.execution.Execution` defines."""
    ids = prompt_ids(prompts, prompt_width)
    width = max(map(len, ids), default=0) if prompt_width is None else prompt_width
    padded, mask = left_padded(ids, width, pad_token_id)
    attention = torch.cat([mask, responses.mask], 1)
    more: dict[str, Tensor] = {}
    if responses.kept_ids is not None and responses.kept_counts is not None:
        more |= kept_columns(responses.kept_ids, responses.kept_counts)
    if responses.routes is not None:
        more |= routes_column(responses.routes, attention)
    sampled = DataProto.from_dict(
        tensors={
            "prompts": padded,
            "responses": responses.tokens,
            "attention_mask": attention,
            "response_mask": responses.mask,
            "rollout_log_probs": responses.log_probs,
            "ended": responses.ended,
            **more,
        }
    )
    return prompts.union(sampled)


def special_ids(settings: Any, tokenizer: Any) -> tuple[int, list[int]]:
    """The padding token, and the tokens that end a response according to the model's ``generation_config``.

    Raises:
        ValueError: the model has no token that ends a response.
    """
    ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    if ends is None:
        raise ValueError("the model has no end-of-sequence token: set eos_token_id in its generation_config.json")
    ends = list(ends) if isinstance(ends, list) else [ends]
    return (tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]), ends
