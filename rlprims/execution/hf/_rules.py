"""What may follow the tokens so far: one mechanism for all options that leave tokens out.

A rule is a generator for one response. It yields ids as a set of :class:`rlprims.types.SamplingSupport` has them: those
of tokens that may follow, or ~v of those that may not, or none if all may. It is sent the token that followed.
"""

import json
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from rlprims._extras import hint
from rlprims.execution import EvaluatedSampling, Sampling
from rlprims.types import SamplingSupport

Rule: TypeAlias = Generator[list[int], int, None]


def not_ended(least: int, end_ids: Sequence[int]) -> Rule:
    """No end token among the first ``least`` tokens."""
    for _ in range(least):
        yield [~token for token in end_ids]
    while True:
        yield []


def without(words: Sequence[Sequence[int]]) -> Rule:
    """No last token of a word after its others, as in vLLM.

    >>> rule = without([[5], [7, 8]])
    >>> [rule.send(token) for token in (None, 7, 3)] == [[~5], [~5, ~8], [~5]]
    True
    """
    seen = list[int]()
    while True:
        seen.append((yield [~last for *first, last in words if not first or seen[-len(first) :] == first]))


def within(matcher: Any, vocabulary: int) -> Rule:
    """What a grammar allows."""
    from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

    bits = allocate_token_bitmask(1, vocabulary)
    while True:
        fill_next_token_bitmask(matcher, bits, 0)
        allowed = (bits[0, :, None] >> torch.arange(32)).flatten()[:vocabulary] % 2 == 1
        matcher.consume_token((yield SamplingSupport.from_allowed(allowed[None]).ids.tolist()))


def ends_thinking(prompt: Sequence[int], start: list[int], end: list[int], budget: int) -> Rule:
    """The tokens of ``end``, one after another, when ``budget`` tokens have followed ``start``, here or in the prompt.

    >>> rule = ends_thinking([8], [8], [9], budget=2)
    >>> [rule.send(token) for token in (None, 5, 6, 9)]
    [[], [], [9], []]
    """
    seen, since = list[int](), None
    for place in count():
        seen.append(prompt[place] if place < len(prompt) else (yield []))
        if seen[-len(end) :] == end:
            since = None
        elif since is None and seen[-len(start) :] == start:
            since = len(seen)
        if since is not None and place + 1 >= len(prompt) and len(seen) - since >= budget:
            since = None
            for token in end:
                seen.append((yield [token]))


class Followers(NamedTuple):
    """The rules of one response."""

    masks: list[Rule]
    thinking: Rule | None

    def after(self, token: int | None) -> tuple[list[int], bool]:
        """The ids for what may follow ``token`` (None: the prompt), and whether it is forced, not the policy's."""
        forced = self.thinking.send(token) if self.thinking else []  # type: ignore[arg-type]
        ids = [v for rule in self.masks for v in rule.send(token)]  # type: ignore[arg-type]
        return forced or ids, bool(forced)


Rules: TypeAlias = Callable[[Sequence[int]], Followers]  # of a response to the prompt with these tokens


def rules_of(sampling: Sampling, tokenizer: Any, end_ids: Sequence[int], vocabulary: int) -> Rules | None:
    """The rules of responses, or None if every token may always follow.

    Raises:
        ValueError: a text has no tokens here, or a form of responses cannot be read.
    """
    words = list[list[int]]()
    for word in sampling.bad_words:  # as vLLM
        plain, spaced = _ids(tokenizer, word.lstrip()), tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        words += [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]
    budget = sampling.thinking_budget
    start, end = [[] if budget is None else _ids(tokenizer, mark) for mark in sampling.thinking_marks]
    matcher = _matcher(sampling.structured, tokenizer, end_ids, vocabulary) if sampling.structured else None
    if not (sampling.min_new_tokens or words or matcher or end):
        return None

    def rules(prompt: Sequence[int]) -> Followers:
        masks = [not_ended(sampling.min_new_tokens, end_ids)] if sampling.min_new_tokens else []
        masks += [without(words)] if words else []
        masks += [within(matcher.deep_copy(), vocabulary)] if matcher else []
        return Followers(masks, None if budget is None else ends_thinking(prompt, start, end, budget))

    return rules


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids or tokenizer.unk_token_id in ids:
        raise ValueError(f"sampling: the tokenizer has no tokens for {text!r}: leave it out, or write another text")
    return ids


def _matcher(structured: dict[Any, Any], tokenizer: Any, end_ids: Sequence[int], vocabulary: int) -> Any:
    try:
        from llguidance import LLMatcher, grammar_from
    except ModuleNotFoundError:
        raise ValueError(f"sampling.structured needs llguidance: {hint('structured')}") from None
    [(kind, form)] = structured.items()
    try:
        grammar = grammar_from(kind, form if isinstance(form, str) else json.dumps(form))
        matcher = LLMatcher(_llguidance(tokenizer, max(vocabulary, len(tokenizer))), grammar)
        problem = matcher.get_error()
    except (ValueError, TypeError) as error:
        problem = str(error)
    if tokenizer.eos_token_id not in end_ids:
        problem = "the tokenizer's end token ends no response of this model"
    if problem:
        raise ValueError(f"sampling.structured.{kind}: {problem.splitlines()[0]}")
    return matcher


@lru_cache(maxsize=2)
def _llguidance(tokenizer: Any, vocabulary: int) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, vocabulary)


class Shaped:
    """The logits of responses after the options that read the tokens before: rules, penalties and processors."""

    def __init__(self, sampling: Sampling, followers: Sequence[Followers], prompts: Sequence[Sequence[int]]) -> None:
        self.sampling, self.followers, self.starts = sampling, followers, [len(prompt) for prompt in prompts]
        self.seen = [list(prompt) for prompt in prompts]
        self.last: list[int | None] = [None] * len(prompts)
        self.rows: Sequence[int] = range(len(prompts))  # the response of each row of the batch
        self.forced = torch.zeros(0, dtype=torch.bool)  # which tokens of the last call are not the policy's

    def __call__(self, logits: Tensor) -> Tensor:
        """Float32 (A, V) for the next token of each row."""
        said = [self.followers[row].after(self.last[row]) for row in self.rows]
        ids = torch.tensor([v for each, _ in said for v in each], dtype=torch.int64, device=logits.device)
        counts = torch.tensor([len(each) for each, _ in said], device=logits.device)
        self.forced = torch.tensor([forced for _, forced in said], device=logits.device)
        logits = logits.masked_fill(~SamplingSupport.from_counts(ids, counts).allowed(logits.shape[1]), -torch.inf)
        if self.sampling.logits_processors or self.sampling.penalizes:
            each = zip(self.rows, logits, self.forced.tolist(), strict=True)
            logits = torch.stack([x if forced else self._changed(x, row) for row, x, forced in each])
        if not logits.isfinite().any(-1).all():
            raise ValueError("sampling: no token is left that may follow; allow more (bad_words, logits_processors)")
        return logits

    def add(self, tokens: Tensor) -> None:
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            self.seen[row].append(token)
            self.last[row] = token

    def _changed(self, logits: Tensor, row: int) -> Tensor:
        """The logits (V,) of one response after penalties and processors."""
        seen, response, how = self.seen[row], self.seen[row][self.starts[row] :], self.sampling
        if how.penalizes:
            logits = penalized(logits, seen, response, how)
        for fn in how.logits_processors:
            before, logits = logits, fn.fn(list(seen), logits.clone(), **dict(fn.bound))
            if getattr(logits, "shape", None) != before.shape:
                raise ValueError(f"{fn.path} returned {logits!r:.60}, expected the logits, {tuple(before.shape)}")
            if not isinstance(how, EvaluatedSampling) and (logits != before)[logits != -torch.inf].any():
                what = f"{fn.path} changed a finite logit at token {len(response)}: for training it may only set logits"
                raise ValueError(f"{what} to -inf, as the trainer scores the policy's; use it in evaluation.sampling")
        return logits


def penalized(logits: Tensor, seen: Sequence[int], response: Sequence[int], how: Sampling) -> Tensor:
    """Repetition penalty of all tokens before; frequency and presence penalties of those of the response; as vLLM."""
    ids = torch.tensor([seen], device=logits.device)
    logits = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(ids, logits[None])[0]
    ids, counts = torch.unique(ids[0, len(seen) - len(response) :], return_counts=True)
    return logits.index_add(0, ids, -(how.frequency_penalty * counts + how.presence_penalty))
