"""Sampling with a key-value cache. A prompt is read once for all its samples, and finished rows leave the batch."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import ModelConfig, Sampling, kept_columns
from rlprims.execution._columns import left_padded
from rlprims.execution.hf._alone import check_lengths
from rlprims.execution.hf._cache import Cache
from rlprims.execution.hf._draw import Choice, draw, sample_seeds
from rlprims.execution.hf._families import ONE_LENGTH
from rlprims.execution.hf._routes import are_read, recorded, routes_column
from rlprims.execution.hf._rules import Followers, Shaped, rules_of
from rlprims.execution.hf._vision import IMAGES, image_inputs
from rlprims.logprobs import from_logits
from rlprims.types import SamplingSupport


class Responses(NamedTuple):
    tokens: Tensor  # int64 (B, T), padded right
    mask: Tensor  # bool (B, T)
    log_probs: Tensor  # float32 (B, T), of the distribution that was sampled from
    ended: Tensor  # int8 (B,), why: codes of Ended
    kept_ids: Tensor | None = None  # int32 (K,), row after row: sets that tokens were drawn from; None: the vocabulary
    kept_counts: Tensor | None = None  # int32 (B, T), how many of these ids each token has
    routes: Tensor | None = None  # int16 (N, L, K), row after row: the experts of each token that was read
    forced: Tensor | None = None  # bool (B, T), tokens that are not the policy's


def processed(sampling: Sampling) -> Callable[[Tensor], Tensor]:
    """The function from logits to those for sampling: temperature, min-p, top-k, top-p, in the order of vLLM."""
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


class _Drawn:
    """The responses of B rows while they are sampled."""

    def __init__(self, rows: int, sampling: Sampling, pad_id: int, device: torch.device) -> None:
        limit = sampling.max_new_tokens
        self.tokens = torch.full((rows, limit), pad_id, dtype=torch.int64, device=device)
        self.mask, self.forced = torch.zeros(2, rows, limit, dtype=torch.bool, device=device)
        self.log_probs = torch.zeros(rows, limit, dtype=torch.float32, device=device)
        self.ended = torch.full((rows,), Ended.LENGTH, dtype=torch.int8, device=device)
        self.truncates = sampling.truncates
        self.kept_ids = [torch.zeros(0, dtype=torch.int32)]  # position after position
        self.kept_counts = torch.zeros(limit, rows, dtype=torch.int32)

    def add(self, t: int, rows: Tensor, choice: Choice, active: Tensor, forced: Tensor | None) -> None:
        """Add what was chosen for these rows (A,) where they are active, or what was forced."""
        # Not by indices of the active rows: the process would wait for the device to count them.
        self.tokens[rows, t] = torch.where(active, choice.tokens, self.tokens[rows, t])
        self.mask[rows, t] = active
        self.log_probs[rows, t] = torch.where(active, choice.log_probs, 0.0)
        if forced is not None:
            self.forced[rows, t], active = forced & active, active & ~forced
        if self.truncates:
            kept = SamplingSupport.from_allowed(choice.logits[active].isfinite())
            self.kept_ids.append(kept.ids.int().cpu())
            self.kept_counts[t, rows[active].cpu()] = kept.offsets.diff().int().cpu()

    def responses(self, routes: Tensor | None) -> Responses:
        kept: tuple[Tensor | None, Tensor | None] = None, None
        if self.truncates:
            by_position = SamplingSupport.from_counts(torch.cat(self.kept_ids), self.kept_counts)
            by_row = rearrange(torch.arange(self.kept_counts.numel()), "(t b) -> (b t)", t=len(self.kept_counts))
            kept = by_position.take(by_row).ids, self.kept_counts.T.contiguous()
        return Responses(self.tokens, self.mask, self.log_probs, self.ended, *kept, routes, self.forced)


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
    fixed: bool = False,
    shaped: Shaped | None = None,
    seen: dict[str, Tensor] | None = None,
) -> Responses:
    """B responses. Row i continues the left-padded ``prompts[source[i]]``; its tokens are drawn with ``seeds[i]``.

    ``take_routes`` returns the experts of the tokens that the model has read since its last call, (N, L, K).
    ``fixed``: keys and values have fixed places if the model can, and on a GPU a token is a CUDA graph. ``shaped`` has
    the options that read the tokens before. ``seen`` are the inputs for the images of the distinct prompts.
    """
    rows, device = len(source), prompts.device
    process, seeds = processed(sampling), seeds.to(device)

    def choose(logits: Tensor, seeds: Tensor, positions: Tensor) -> Choice:
        logits = process(logits.float() if shaped is None else shaped(logits.float()))
        tokens = draw(logits, seeds, positions[:, 0]) if sampling.temperature > 0 else logits.argmax(-1)
        return Choice(tokens, from_logits(logits, tokens), (tokens[:, None] == end_ids).any(-1), logits)

    drawn, routes = _Drawn(rows, sampling, pad_id, device), _Routes(take_routes, source)
    row_of = torch.arange(rows, device=device)  # the response of each row of the batch
    active = torch.ones(rows, dtype=torch.bool, device=device)  # the rows of the batch that are not finished
    inputs, attention = prompts, prompt_mask.long()
    seen = {"position_ids": (attention.cumsum(-1) - 1).clamp(min=0), **(seen or {})}
    positions = seen.pop("position_ids")  # (P, n), or (3, P, n) with images for some types
    is_padded, limit = not bool(prompt_mask.all()), prompts.shape[1] + sampling.max_new_tokens
    cache = Cache(model, choose, is_padded=is_padded, fixed=limit if fixed else 0)
    for t in range(sampling.max_new_tokens if rows else 0):
        if t == 0:
            logits = cache.read(prompts, positions, attention, **seen)
            cache.select(source)
            attention, positions = attention[source], positions.view(-1, *prompts.shape).amax((0, 2))[source, None]
            choice = choose(logits[source], seeds, positions)
        else:
            attention, positions = nn.functional.pad(attention, (0, 1), value=1), positions + 1
            choice = cache.next(inputs, positions, attention, seeds[row_of])
        routes.add(t, row_of, inputs)
        drawn.add(t, row_of, choice, active, None if shaped is None else shaped.forced)
        ended, inputs = choice.ends, choice.tokens[:, None]
        if ends_text is not None:
            texts = [ends_text(row) for row in drawn.tokens[row_of, sampling.min_new_tokens : t + 1].tolist()]
            ended = ended | torch.tensor(texts, dtype=torch.bool, device=device)
        drawn.ended[row_of] = torch.where(ended & active, Ended.STOP.value, drawn.ended[row_of])
        active = active & ~ended
        if shaped is not None:
            shaped.add(choice.tokens)
        number_active = int(active.sum())
        if not number_active:
            break
        if number_active < cache.compact_below * active.shape[0]:
            left = active.nonzero()[:, 0]
            cache.select(left)
            row_of, attention, positions, inputs = row_of[left], attention[left], positions[left], inputs[left]
            active = active[left]
            if shaped is not None:
                shaped.rows = row_of.tolist()
    return drawn.responses(routes.of_read(torch.cat([prompt_mask[source], drawn.mask], 1)))


class _Routes:
    """The experts of the tokens that a sampler reads; nothing if ``take`` is None."""

    def __init__(self, take: Callable[[], Tensor] | None, source: Tensor) -> None:
        self.take, self.source = take, source
        self.found: list[Tensor] = []  # (B, P, L, K) of the prompts, then (B, 1, L, K) of each token

    def add(self, t: int, row_of: Tensor, inputs: Tensor) -> None:
        """Add those of the ``inputs`` of step ``t``: the distinct prompts, then one token of each row of the batch."""
        if self.take is None:
            return
        place = torch.zeros_like(self.source).scatter(0, row_of, torch.arange(len(row_of), device=row_of.device))
        read = rearrange(self.take(), "(b p) l k -> b p l k", b=len(inputs))
        self.found.append(read[(self.source if t == 0 else place).cpu()])

    def of_read(self, attention_mask: Tensor) -> Tensor | None:
        """int16 (N, L, K): the experts of each token that was read, row after row."""
        if self.take is None:
            return None
        used = torch.cat(self.found, 1) if self.found else self.take()[:, None]
        return used[are_read(attention_mask).cpu()[:, : used.shape[1]]]


class Generation:
    """Samples responses from a model in this process, ``max_rows`` at a time; ``routes``: and records the experts."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        *,
        max_rows: int,
        routes: bool = False,
        model: ModelConfig | None = None,
    ) -> None:
        self.module, self.tokenizer, self.max_rows, self.routes = module, tokenizer, max_rows, routes
        self.model = model  # whose images are read, if it can
        self.one_length = module.config.get_text_config().model_type in ONE_LENGTH  # type: ignore[union-attr,operator]
        self.pad_token_id, self.end_ids = special_ids(module.generation_config, tokenizer)

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> DataProto:
        ids = prompt_ids(prompts, prompt_width)
        check_lengths(self.module.config, torch.tensor([0, *map(len, ids)]) + sampling.max_new_tokens)
        seeds = sample_seeds(seed, prompts["sample_id"].tolist())
        lengths = [len(prompt) if self.one_length else 0 for prompt in ids]
        starts = [i for i in range(len(ids)) if i % self.max_rows == 0 or lengths[i] != lengths[i - 1]] or [0]
        images = images_of(prompts)
        ends = pairwise([*starts, len(ids)])
        parts = [self._sample(ids[i:j], images[i:j], seeds[i:j], sampling) for i, j in ends]
        columns = [None if column[0] is None else torch.cat(column).cpu() for column in zip(*parts, strict=True)]
        responses = Responses(*columns)  # type: ignore[arg-type]
        return with_responses(prompts, responses, prompt_width=prompt_width, pad_token_id=self.pad_token_id)

    def _sample(
        self, ids: list[list[int]], images: list[tuple[bytes, ...]], seeds: Tensor, sampling: Sampling
    ) -> Responses:
        prompts = [(tuple(prompt), row) for prompt, row in zip(ids, images, strict=True)]
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
        padded, mask = left_padded([prompt for prompt, _ in index], max(map(len, ids), default=0), self.pad_token_id)
        device = next(self.module.parameters()).device
        seen = {} if self.model is None else image_inputs(self.model, [row for _, row in index], padded, mask)
        vocabulary = self.module.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
        ends = [] if sampling.ignore_eos else self.end_ids
        rules = rules_of(sampling, self.tokenizer, ends, vocabulary)
        shaped = None
        if rules is not None or sampling.logits_processors or sampling.penalizes:
            shaped = Shaped(sampling, [rules(prompt) if rules else Followers([], None) for prompt in ids], ids)
        with recorded(self.module) if self.routes else nullcontext() as take_routes:
            return sample(
                self.module,
                padded.to(device),
                mask.to(device),
                torch.tensor([index[prompt] for prompt in prompts], dtype=torch.int64, device=device),
                sampling,
                seeds=seeds,
                end_ids=torch.tensor(ends, dtype=torch.int64, device=device),
                pad_id=self.pad_token_id,
                ends_text=self._ends_text(sampling),
                take_routes=take_routes,
                fixed=device.type == "cuda" and not self.routes and shaped is None,
                shaped=shaped,
                seen={name: x.to(device) for name, x in seen.items()},
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


def images_of(prompts: DataProto) -> list[tuple[bytes, ...]]:
    """The images of each row, if it has any."""
    return [tuple(row or ()) for row in prompts.non_tensor_batch.get(IMAGES, [None] * len(prompts))]


def prompt_ids(prompts: DataProto, prompt_width: int | None) -> list[list[int]]:
    """The prompts' tokens; a ValueError if a prompt is longer than ``prompt_width``."""
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
    attention, own = torch.cat([mask, responses.mask], 1), responses.mask
    own = own if responses.forced is None else own & ~responses.forced
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
            "response_mask": own,
            "rollout_log_probs": responses.log_probs,
            "ended": responses.ended,
            **more,
        }
    )
    return prompts.union(sampled)


def special_ids(settings: Any, tokenizer: Any) -> tuple[int, list[int]]:
    """The padding token, and those that end a response by the ``generation_config``; a ValueError if none does."""
    ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    if ends is None:
        raise ValueError("the model has no end-of-sequence token: set eos_token_id in its generation_config.json")
    ends = list(ends) if isinstance(ends, list) else [ends]
    return (tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0]), ends
