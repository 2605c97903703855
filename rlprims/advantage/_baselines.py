"""Estimators with a given baseline per response (ReMax, SPO), and functions and objects that compute such baselines.

A ``RoleBaseline`` stores one value per role, a ``ValueTracker`` one per prompt. Call ``baseline`` before
``update`` with the same scores: otherwise it depends on them. The result is :func:`remax`'s ``baseline_scores``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.advantage._group import response_scores
from rlprims.grouping import check_rows, group_bounds, group_count, group_sum
from rlprims.layout import expand_to_tokens, sequence_lengths, to_tokens
from rlprims.masking import (
    batch_moments,
    check_above,
    check_deviation,
    check_sequences,
    check_tokens,
    upcast,
    zero_outside,
)
from rlprims.scan import sum_from_right
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask

Rows: TypeAlias = list[tuple[str, tuple[float, ...]]]
GatherRows: TypeAlias = Callable[[Rows], Iterable[Rows]]
"""A function from the rows of this rank to a list of the rows of each rank."""


@described
def remax(
    rewards: PerToken, baseline_scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> PerToken:
    """ReMax, Li et al. 2023 (arXiv:2310.10505), algorithm 1: the greedy response's score is the baseline.

    A_t = Σ_{u≥t} r_u − b, where b, ``baseline_scores``, is the score of the greedy response to the same prompt. The
    gradient is unbiased for any baseline that does not depend on the response: see also :func:`optimal_value`,
    :class:`RoleBaseline`, :class:`ValueTracker`.

    >>> m = torch.tensor([[True, True, False]])
    >>> remax(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0.25]), m)
    tensor([[0.7500, 0.7500, 0.0000]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    check_sequences(response_mask, cu_seqlens, baseline_scores=baseline_scores)
    returns = sum_from_right(rewards, response_mask, cu_seqlens)
    return zero_outside(returns - expand_to_tokens(baseline_scores, response_mask, cu_seqlens), response_mask)


@described
def spo(
    rewards: PerToken,
    baseline_scores: PerSequence,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
    valid_rows: RowMask | None = None,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> PerToken:
    """SPO, Xu & Ding 2025 (arXiv:2509.13232), section 3: s − v, normalized over the batch, one response per prompt.

    With s_i = Σ_t r_it and v_i, ``baseline_scores``, from a :class:`ValueTracker`: d_i = s_i − v_i, and
    A_i = (d_i − μ) / sqrt(σ² + ε) on each token of the response. μ and σ are of d over the responses of the batch that
    are valid and have a token. In a batch of fewer than two all get 0.

    Args:
        eps: ε, in units of the squared reward.

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> spo(torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([0.5, 0.75, 0.25]), m).T
    tensor([[ 0.8729,  0.2182, -1.0911]])
    """
    check_tokens(response_mask, cu_seqlens, rewards=rewards)
    check_sequences(response_mask, cu_seqlens, baseline_scores=baseline_scores)
    check_deviation(ddof, eps=eps)
    group_ids = torch.zeros_like(baseline_scores, dtype=torch.int64)  # all rows are one group
    s, mask = response_scores(rewards, group_ids, response_mask, cu_seqlens, valid_rows)
    valid = sequence_lengths(mask, cu_seqlens) > 0
    moments = batch_moments(s - upcast(baseline_scores), valid, ddof=ddof, all_reduce=all_reduce)
    denominator = moments.variance + eps
    is_defined = denominator != 0
    scale = torch.where(is_defined, denominator, 1.0).rsqrt().to(s.dtype)
    return to_tokens(zero_outside(moments.centred * scale, valid & is_defined), mask, cu_seqlens)


@described
def optimal_value(
    scores: PerSequence, group_ids: GroupIds, valid_rows: RowMask | None = None, *, beta: float = 0.5
) -> PerSequence:
    """The baseline of A*-PO (arXiv:2505.20686): the value of the optimal policy under a KL penalty.

    V* = β log mean_j exp(s_j / β) over a group of responses from the *reference* policy. It is the maximum over π of
    E[s] − β KL(π, π_ref). It is the mean score for β → ∞ and the largest score for β → 0. The advantage of a response
    is s − V*: ``remax(rewards, baseline_scores, response_mask)`` with the prompt's V*. It is 0 if no row is valid.

    Args:
        valid_rows: rows that the reference sampled; other rows get their group's V* too. None: all rows.
        beta: β > 0, in units of the score; 1/2 in TRL.

    >>> optimal_value(torch.tensor([1.0, 0.0, 0.3]), torch.tensor([0, 0, 1]))
    tensor([0.7169, 0.7169, 0.3000])
    """
    check_above(0, ": the weight of the KL in units of the score", beta=beta)
    check_rows(group_ids, scores=scores)
    _, high = group_bounds(scores.detach(), group_ids, valid_rows)
    exponents = (upcast(scores) - high) / beta  # at most 0, so that exp does not overflow
    exponents = exponents if valid_rows is None else zero_outside(exponents, valid_rows)
    n = group_count(group_ids, valid_rows)
    mean = group_sum(exponents.exp(), group_ids, valid_rows) / n.clamp(min=1)
    return high + beta * torch.where(n > 0, mean, 1.0).log()


class RoleBaseline:
    """Role-conditioned advantage estimation, RAE, of SPIRAL (arXiv:2506.24119): a moving average of each role's score.

    b ← d b + (1 − d) s, starting at 0, with d = ``decay`` in [0, 1) per response. In self-play the roles of a game have
    different expected scores, so a common baseline would favour one role. n scores of a role in one update count as n
    updates with their mean, so their order does not matter.

    >>> rae = RoleBaseline(decay=0.5)
    >>> rae.update(["first", "second", "first"], torch.tensor([1.0, -1.0, 0.0]))
    >>> rae.baseline(["first", "second", "judge"])
    tensor([ 0.3750, -0.5000,  0.0000])
    """

    def __init__(self, *, decay: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}, expected at least 0 and less than 1")
        self.decay = decay
        self.values: dict[str, float] = {}

    def baseline(self, roles: Sequence[str]) -> PerSequence:
        """float (B,), the average score of each row's role so far; 0 for a new role."""
        return torch.tensor([self.values.get(role, 0.0) for role in roles], dtype=torch.float32)

    def update(self, roles: Sequence[str], scores: PerSequence, *, all_gather: GatherRows | None = None) -> None:
        """Update the averages with scores (B,); with ``all_gather`` all ranks have the same averages."""
        for role, rows in _rows_of(roles, all_gather, scores=scores).items():
            decay = self.decay ** len(rows)
            self.values[role] = decay * self.values.get(role, 0.0) + (1 - decay) * fmean(s for (s,) in rows)

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values = _table(state, "values")
        for role, value in values.items():
            _check_number(f"values[{role!r}]", value)
        self.values = {role: float(value) for role, value in values.items()}


class ValueTracker:
    """The KL-adaptive value tracker of SPO (arXiv:2509.13232): each prompt's pass rate, for one response per prompt.

    v = passed / (passed + failed). The counts decay as the policy changes: passed ← ρ passed + s and
    failed ← ρ failed + 1 − s, with ρ = clip(2^(−D/h), ρ_min, ρ_max). D is the KL of the policy from the policy that
    last answered this prompt. A new prompt starts with counts of ½ and ½. SPO then normalizes s − v over the batch:
    :func:`spo`. The defaults are those of the authors' code (verl-recipe). Its D is the mean |change of log-prob| over
    the tokens of the prompt's last response: give that as ``kl`` to get the same numbers.

    Args:
        half_life: h, the KL in nats per token that halves the weight of a count.
        min_decay, max_decay: ρ_min and ρ_max. The counts add up to at most 1 / (1 − ρ_max) answers.

    >>> tracker = ValueTracker()
    >>> tracker.start(["1+1", "3*7"], [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    >>> tracker.baseline(["1+1", "3*7", "new"])
    tensor([0.8750, 0.3750, 0.5000])
    >>> tracker.update(["3*7"], torch.tensor([1.0]), kl=torch.tensor([0.0]))
    >>> tracker.baseline(["3*7"])
    tensor([0.4470])
    """

    def __init__(self, *, half_life: float = 0.06, min_decay: float = 0.875, max_decay: float = 0.96) -> None:
        check_above(0, " of nats per token", inf=True, half_life=half_life)
        if not 0 <= min_decay <= max_decay < 1:
            raise ValueError(f"min_decay={min_decay}, max_decay={max_decay}, expected 0 <= min_decay <= max_decay < 1")
        self.half_life = half_life
        self.min_decay = min_decay
        self.max_decay = max_decay
        self.counts: dict[str, tuple[float, float]] = {}

    def start(self, prompts: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
        """Set the counts from any number of answers of the first policy, with a total weight of 1 / (1 − ρ_min)."""
        for prompt, sample in zip(prompts, scores, strict=True):
            _check_scores(sample)
            weight = 1 / (1 - self.min_decay) / (len(sample) + 1)
            passed = math.fsum(sample)
            self.counts[prompt] = (weight * (passed + 0.5), weight * (len(sample) - passed + 0.5))

    def baseline(self, prompts: Sequence[str]) -> PerSequence:
        """float (B,), the pass rate of each row's prompt so far."""
        counts = [self.counts.get(prompt, (0.5, 0.5)) for prompt in prompts]
        return torch.tensor([passed / (passed + failed) for passed, failed in counts], dtype=torch.float32)

    def update(
        self, prompts: Sequence[str], scores: PerSequence, kl: PerSequence, *, all_gather: GatherRows | None = None
    ) -> None:
        """Update the counts with scores from 0 to 1 and D of each row.

        Rows of a prompt decay its counts once, with their mean D. With ``all_gather`` all ranks have the same counts.
        """
        _check_scores(scores.tolist())
        for prompt, rows in _rows_of(prompts, all_gather, scores=scores, kl=kl).items():
            rho = 2 ** -max(fmean(d for _, d in rows) / self.half_life, 0.0)  # an estimated KL may be negative
            rho = min(max(rho, self.min_decay), self.max_decay)
            passed, failed = self.counts.get(prompt, (0.5, 0.5))
            new_passed = math.fsum(s for s, _ in rows)
            self.counts[prompt] = (rho * passed + new_passed, rho * failed + len(rows) - new_passed)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": {prompt: list(pair) for prompt, pair in self.counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = _table(state, "counts")
        for prompt, pair in counts.items():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"counts[{prompt!r}] is {pair!r}, expected two numbers: passed and failed")
            for number in pair:
                _check_number(f"counts[{prompt!r}]", number)
            if min(pair) < 0 or sum(pair) <= 0:
                raise ValueError(f"counts[{prompt!r}] is {pair!r}, expected numbers of at least 0 and a sum above 0")
        self.counts = {prompt: (float(passed), float(failed)) for prompt, (passed, failed) in counts.items()}


def _rows_of(names: Sequence[str], gather: GatherRows | None, **per_row: Tensor) -> dict[str, list[tuple[float, ...]]]:
    """The rows of each name, in the order of the ranks and of the rows of each rank."""
    for argument, x in per_row.items():
        if x.shape != (len(names),):
            raise ValueError(f"{argument} has shape {tuple(x.shape)}, expected ({len(names)},): one entry per name")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{argument} has NaN or Inf, expected finite numbers: drop those rows")
    named = list(zip(names, zip(*(x.tolist() for x in per_row.values()), strict=True), strict=True))
    rows: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for part in [named] if gather is None else gather(named):
        for name, row in part:
            rows[name].append(row)
    return rows


def _check_scores(scores: Sequence[float]) -> None:
    if not all(0 <= s <= 1 for s in scores):
        raise ValueError(f"scores run from {min(scores)} to {max(scores)}, expected 0 to 1: they count as pass rates")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")


def _table(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The only entry of a state: a mapping from names."""
    table = state.get(key) if isinstance(state, Mapping) and set(state) == {key} else None
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise ValueError(f"the state is {state!r}, expected the result of state_dict: {{{key!r}: {{name: ...}}}}")
    return table
