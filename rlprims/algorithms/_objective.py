"""The objective of an optimizer step: a sum of parts, each with its own tokens, its own mean and its own denominator.

    L = mean of (policy loss + the terms beside it)  +  Σ_c coefficient_c · mean_c of ℓ_c over the tokens M_c

The terms beside the policy loss have its mask, mean and denominator. Every other term is a separate part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.algorithms._algorithm import Algorithm, LossTerm
from rlprims.algorithms._use import BoundFunction
from rlprims.kernels import are_readable
from rlprims.layout import sequence_lengths
from rlprims.losses import count_totals
from rlprims.masking import zero_outside
from rlprims.types import Totals

Data = Mapping[str, Any]

_COUNTS = ("totals", "row_tokens", "group_tokens", "trajectory_tokens")
"""The denominators of means: counts of the policy's tokens, or, with a term's name as prefix, of that term's tokens."""


class StepCounts(NamedTuple):
    """The denominators of one optimizer step."""

    columns: dict[str, Tensor]
    """Columns, int64 (B,) each: split them with the rows."""
    totals: dict[str, Totals]
    """Totals of the step: give all of them to every micro-batch and rank."""


def step_counts(algorithm: Algorithm, data: Data) -> StepCounts:
    """The denominators of all means of the objective, counted over the whole step before it is split.

    ``data`` is that of the step, with the result of :func:`token_weights`. Give each micro-batch its rows of the
    columns, and all of the totals: the objectives of the micro-batches then sum to that of the step, for any split.

    >>> import torch
    >>> from rlprims import algorithms
    >>> data = {"response_mask": torch.tensor([[True, False, True]]), "group_ids": torch.tensor([0])}
    >>> data["observation_mask"] = ~data["response_mask"]
    >>> totals = step_counts(algorithms.echo(), data).totals
    >>> {name: int(count.tokens) for name, count in totals.items()}
    {'totals': 2, 'loss_terms.0.totals': 1}
    """
    counts = _count(data, data["response_mask"])
    for i, term in enumerate(algorithm.loss_terms):
        if term.over == "term":
            counted = _count(data, term_mask(algorithm, i, data))
            counts |= {_of_term(i, name): count for name, count in counted.items()}
    return StepCounts(
        {name: count for name, count in counts.items() if isinstance(count, Tensor)},
        {name: count for name, count in counts.items() if isinstance(count, Totals)},
    )


def _count(data: Data, mask: Tensor) -> dict[str, Tensor | Totals]:
    """The ``_COUNTS`` of the tokens of a mask, over the given rows."""
    cu_seqlens, group_ids, trajectory_ids = (data.get(name) for name in ("cu_seqlens", "group_ids", "trajectory_ids"))
    tokens = sequence_lengths(mask, cu_seqlens)

    def together(ids: Tensor) -> Tensor:
        return torch.zeros_like(tokens).index_add(0, ids, tokens)[ids]

    counts: dict[str, Tensor | Totals] = {
        "totals": count_totals(mask, cu_seqlens, group_ids, trajectory_ids),
        "row_tokens": tokens if trajectory_ids is None else together(trajectory_ids),
    }
    if group_ids is not None:
        counts["group_tokens"] = together(group_ids)
    if trajectory_ids is not None:
        counts["trajectory_tokens"] = counts["row_tokens"]
    return counts


@dataclass(frozen=True)
class ObjectiveTerm:
    """Per-token losses with a common mean: the policy loss with the terms that are added to it, or a separate term."""

    algorithm: Algorithm
    number: int | None
    """The number of the loss term; None: the part of the policy loss."""

    def mask(self, data: Data) -> Tensor:
        """bool, per token: the tokens of its losses."""
        mask: Tensor = data["response_mask"]
        return mask if self.number is None else term_mask(self.algorithm, self.number, data)

    def losses(self, data: Data) -> Tensor:
        """The losses per token, multiplied by their coefficients; 0 outside its mask."""
        if self.number is None:
            return policy_losses(self.algorithm, data)
        return _term_losses(self.algorithm, self.number, data)

    def mean(self, data: Data, losses: Tensor) -> Tensor:
        """The mean of the losses; with the counts of the step in ``data``, the given rows' share of the step's mean."""
        term = None if self.number is None else self.algorithm.loss_terms[self.number]
        aggregation = term.aggregation if term is not None and term.aggregation else self.algorithm.aggregation
        scalar: Tensor = aggregation({**data, **self._counts(term, data), "losses": losses})
        return scalar

    def _counts(self, term: LossTerm | None, data: Data) -> dict[str, Any]:
        if term is None or self.number is None:
            return {}
        mask = self.mask(data)
        names = {name: name if term.over == "policy" else _of_term(self.number, name) for name in _COUNTS}
        if data.get("totals") is None:
            counts: Mapping[str, Any] = _count(data, data["response_mask"] if term.over == "policy" else mask)
            return {**counts, "response_mask": mask}
        for name in (names["totals"], names["row_tokens"]):
            if name not in data:
                raise ValueError(f"the batch has totals and no {name}: add step_counts(algorithm, data) of the step")
        return {"response_mask": mask, **{name: data.get(own) for name, own in names.items()}}


def objective_parts(algorithm: Algorithm) -> list[ObjectiveTerm]:
    """The parts whose means add up to the objective, that of the policy loss first.

    >>> from rlprims import algorithms
    >>> [part.number for part in objective_parts(algorithms.echo())]
    [None, 0]
    """
    separate = [i for i, term in enumerate(algorithm.loss_terms) if not term.is_beside_the_policy]
    return [ObjectiveTerm(algorithm, number) for number in (None, *separate)]


def policy_objective(algorithm: Algorithm, data: Data) -> Tensor:
    """The scalar to minimize: the mean of :func:`policy_losses` plus the means of the separate terms.

    In a micro-batch ``data`` needs the result of :func:`step_counts` for the whole step. Without ``totals`` the given
    batch is the whole step. A split group is a ``ValueError`` if ``algorithm.together`` is "group_ids".
    """
    if algorithm.together == "group_ids":
        _check_whole_groups(data)
    first, *others = (part.mean(data, part.losses(data)) for part in objective_parts(algorithm))
    return sum(others, start=first)


def _check_whole_groups(data: Data) -> None:
    """Raise ``ValueError`` if a group is split over micro-batches. Values are checked on a CPU only."""
    if "group_tokens" not in data or not are_readable(data["group_tokens"], data["response_mask"]):
        return
    here, step = _count(data, data["response_mask"])["group_tokens"], data["group_tokens"]
    assert isinstance(here, Tensor)
    split = (here > 0) & (here != step)
    if split.any():
        row = int(split.nonzero()[0])
        raise ValueError(
            f"the group of row {row} has {int(here[row])} of the step's {int(step[row])} tokens here, expected all: a "
            "loss compares the responses of a group. Split the batch by group: batching.pack(lengths, group_ids, ...)"
        )


def policy_losses(algorithm: Algorithm, data: Data) -> Tensor:
    """The policy loss, multiplied by its weights, plus the terms that are added to it per token.

    ``data`` needs the result of :func:`token_weights` for the update. The weights multiply the policy loss only, as in
    TRL. A token of weight 0 still counts in the denominator of the aggregation.
    """
    per_token = algorithm.policy_coefficient * algorithm.policy_loss.per_token(data, data["response_mask"])
    has_weights = algorithm.corrections or algorithm.token_selection is not None or "row_weights" in data
    if has_weights or "loss_weights" in data:
        per_token = per_token * _computed("loss_weights", data)
    for i, term in enumerate(algorithm.loss_terms):
        if term.is_beside_the_policy:
            per_token = per_token + _term_losses(algorithm, i, data)
    return per_token


def _term_losses(algorithm: Algorithm, number: int, data: Data) -> Tensor:
    term = algorithm.loss_terms[number]
    losses = term.loss({**data, "response_mask": _column(term.mask, data)})
    if term.tokens is not None:
        losses = zero_outside(losses, _computed(tokens_of(number), data))
    if isinstance(term.coefficient, BoundFunction):
        raise ValueError(
            f"loss_terms.{number}.coefficient is {term.coefficient}, expected a number, because it changes in every "
            f"step: use algorithm.with_coefficients({{'loss_terms.{number}': controller.value}})"
        )
    scaled: Tensor = term.coefficient * losses
    return scaled


def term_mask(algorithm: Algorithm, number: int, data: Data) -> Tensor:
    """bool, per token: M_c, the tokens of a loss term's mask that are selected."""
    term = algorithm.loss_terms[number]
    mask = _column(term.mask, data)
    return mask if term.tokens is None else mask & _computed(tokens_of(number), data)


def _column(name: str, data: Data) -> Tensor:
    if name not in data:
        raise ValueError(f"a loss term is on {name}; the batch has {sorted(data)}: add it, bool like response_mask")
    mask: Tensor = data[name]
    shape = tuple(data["response_mask"].shape)
    if mask.dtype is not torch.bool or mask.shape != shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)} and dtype {mask.dtype}, expected bool {shape}")
    return mask


def tokens_of(term: int) -> str:
    """The column of the tokens that :func:`token_weights` chose for a loss term."""
    return _of_term(term, "tokens")


def _of_term(term: int, name: str) -> str:
    return f"loss_terms.{term}.{name}"


def _computed(name: str, data: Data) -> Tensor:
    """A column of :func:`token_weights`."""
    if name not in data:
        raise ValueError(f"the batch has no {name}: add token_weights(algorithm, data) of the whole update to it")
    column: Tensor = data[name]
    return column


def value_objective(algorithm: Algorithm, data: Data) -> Tensor:
    """The critic's scalar to minimize."""
    if algorithm.value_loss is None:
        raise ValueError(f"{algorithm.name} has no value_loss")
    objective: Tensor = algorithm.aggregation({**data, "losses": algorithm.value_loss(data)})
    return objective
