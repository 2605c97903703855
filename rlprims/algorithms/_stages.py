"""The stages of a step as functions of an algorithm and named tensors, for every trainer and backend.

``data`` maps the names of the vocabulary to tensors. A function returns only the names that it adds.
"""

import operator
from collections.abc import Container, Mapping
from functools import reduce

import torch
from torch import Tensor

from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._objective import tokens_of
from rlprims.algorithms._use import BoundFunction, use
from rlprims.corrections import Weights
from rlprims.ended import Ended
from rlprims.filters import finite_scores
from rlprims.grouping import group_count, group_mean, is_constant
from rlprims.layout import expand_to_tokens, last_of_turn, sequence_sum
from rlprims.masking import check_sequences, ended_by, zero_outside
from rlprims.rewards import at_last_token, kl_penalty
from rlprims.scan import sum_from_right
from rlprims.trajectories import join_rows
from rlprims.types import CuSeqlens, PerSequence, PerToken, TokenMask

Data = Mapping[str, Tensor]


def shape_scores(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``shaped_scores`` (B,), the raw scores plus all shaping terms, and each term under the name of its function.

    If a function is used in two terms, its column is their sum.
    """
    data = _with_ends_of_rollouts(data)
    terms: dict[str, Tensor] = {}
    for part in algorithm.score_shaping:
        name, term = part.fn.__name__, part(data)
        terms[name] = terms[name] + term if name in terms else term
    return {**terms, "shaped_scores": sum(terms.values(), start=data["scores"])}


def component_scores(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``component_scores`` (B, K), of the columns that ``components`` names; nothing if it names none."""
    missing = [name for name in algorithm.components if name not in data]
    if missing:
        raise ValueError(f"components has {missing}, expected some of {sorted(data)}: the verifier must return them")
    columns = [data[name] for name in algorithm.components]
    return {"component_scores": torch.stack(columns, 1)} if columns else {}


def leave_out_rows(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``valid_rows`` without the responses that ``algorithm.ended`` leaves out; nothing if it leaves out none."""
    reasons = algorithm.ended.reasons("leave_out")
    if not reasons or "ended" not in data:
        return {}
    data = _with_ends_of_rollouts(data)
    counted = ~ended_by(data["ended"], reasons)
    return {"valid_rows": counted & data["valid_rows"] if "valid_rows" in data else counted}


def _with_ends_of_rollouts(data: Data) -> Data:
    """The data with the ``ended`` of the last row of its rollout in every row: a rollout may go on after a limit."""
    ids, ended = data.get("trajectory_ids"), data.get("ended")
    if ids is None or ended is None:
        return data
    rows = torch.arange(len(ids), device=ids.device)
    last_row = torch.zeros_like(rows).scatter_reduce(0, ids, rows, "amax", include_self=False)
    return {**data, "ended": ended[last_row[ids]]}


def fill_invalid_scores(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """The data for filters: a row that is not valid gets the mean score of the valid rows of its group.

    This changes neither the range nor the mean of the group. The score is NaN if no row of the group is valid.
    """
    columns = dict(data)
    if "valid_rows" not in data:
        return columns
    group_ids, valid = data["group_ids"], data["valid_rows"]
    has_valid = group_count(group_ids, valid) > 0
    for name in {"scores", filter_column(algorithm, columns) or "scores"} & columns.keys():
        mean = torch.where(has_valid, group_mean(columns[name], group_ids, valid), torch.nan)
        columns[name] = torch.where(valid, columns[name], mean)
    return columns


def filter_groups(algorithm: Algorithm, data: Data) -> list[str | None]:
    """For each row the reason why its group is dropped, or None if it is kept.

    A group is dropped because of how a response ended, a score that is not finite, or the filter. The filter's
    ``scores`` are the column of its metric, see :func:`filter_column`; a filter of other columns has no metric. A
    rollout of several rows counts once, with its first row, and ends as its last row. Ragged columns are not used.
    """
    data = _with_ends_of_rollouts(data)
    end_reasons: dict[int, str] = {}
    reasons = algorithm.ended.reasons("drop_group")
    if reasons and "ended" in data:
        drops = ended_by(data["ended"], reasons)
        for group, code in zip(data["group_ids"][drops].tolist(), data["ended"][drops].tolist(), strict=True):
            end_reasons.setdefault(group, f"a response ended by {Ended(code).label}")
    score_reasons = zip(data["group_ids"].tolist(), _filter_by_scores(algorithm, data), strict=True)
    return [end_reasons.get(group, reason) for group, reason in score_reasons]


def filter_column(algorithm: Algorithm, columns: Container[str]) -> str | None:
    """The column that the filter uses as scores: its metric, or ``scores`` if there is no ``acc``; None if neither.

    A verifier that returns a single number has only the column ``scores``.

    >>> from rlprims import algorithms
    >>> filter_column(algorithms.dapo(), {"scores"}), filter_column(algorithms.dapo(), {"scores", "acc"})
    ('scores', 'acc')
    """
    if algorithm.filter is None:
        return None
    metric = algorithm.filter.metric
    if metric in columns:
        return metric
    return "scores" if metric == "acc" and "scores" in columns else None


def _filter_by_scores(algorithm: Algorithm, data: Data) -> list[str | None]:
    ids = data.get("trajectory_ids")
    if ids is not None:
        rollouts = join_rows(ids, data["response_mask"])
        first_rows = rollouts.first_row[rollouts.exists]
        rollout_data = {name: x[first_rows] for name, x in data.items() if x.dim() and not x.is_nested}
        rollout_data.pop("trajectory_ids")
        numbers = rollouts.exists.nonzero()[:, 0].tolist()
        rollout_reasons = dict(zip(numbers, _filter_by_scores(algorithm, rollout_data), strict=True))
        return [rollout_reasons[rollout] for rollout in ids.tolist()]
    scores, group_ids = data["scores"], data["group_ids"]
    is_finite = finite_scores(scores, group_ids).tolist()
    reasons: list[str | None] = [None if ok else "a score is not finite" for ok in is_finite]
    if algorithm.filter is None or None not in reasons:
        return reasons
    metric, keep = filter_column(algorithm, data), algorithm.filter.keep
    if "scores" not in keep.needs:
        kept, explanations = keep(data).tolist(), [f"does not pass {keep}"] * len(scores)
    elif metric is None:
        raise ValueError(
            f"filter.metric is {algorithm.filter.metric!r}, expected one of {sorted(data)}: the verifier must return it"
        )
    else:
        column = data[metric]
        kept = keep({**data, "scores": column}).tolist()
        explanations = [
            f"{metric} is {value:g} throughout" if constant else f"{metric} does not pass {keep}"
            for value, constant in zip(column.tolist(), is_constant(column, group_ids).tolist(), strict=True)
        ]
    rows = zip(reasons, kept, explanations, strict=True)
    return [reason or (None if ok else explanation) for reason, ok, explanation in rows]


def estimate_advantages(
    algorithm: Algorithm, data: Data, *, kl_coef: float = 0.0, turns_earn: bool = False
) -> dict[str, Tensor]:
    """``rewards``, ``advantages``, and with a critic ``returns``, from ``shaped_scores`` and the data that are needed.

    If ``rm_scores`` are per token they are the rewards, and shaping terms are added on the last token. With
    ``turns_earn`` the scores do not include the rewards of turns, as in the trainer's episodes: ``turn_rewards`` (B, T)
    are added to the rewards, unless the algorithm reads them separately.
    """
    with torch.no_grad():
        rm_scores, mask = data.get("rm_scores"), data["response_mask"]
        per_token = rm_scores is not None and rm_scores.shape == mask.shape
        placement = _BESIDE_PROCESS_REWARDS if per_token else _PLACEMENT
        rewards = placement({**data, "scores": data["shaped_scores"]})
        if turns_earn and "turn_rewards" not in algorithm.needs:
            rewards = rewards + zero_outside(data["turn_rewards"], mask)
        if algorithm.kl_in_reward is not None:
            policies = data["old_log_probs"], data["ref_log_probs"]
            estimator = algorithm.kl_in_reward.estimator
            rewards = kl_penalty(rewards, *policies, mask, kl_coef=kl_coef, estimator=estimator)
        advantages = algorithm.advantage.per_token({**data, "rewards": rewards}, mask)
        estimated = {"rewards": rewards, "advantages": advantages}
        if algorithm.value_target is not None:
            estimated["returns"] = algorithm.value_target.per_token({**data, "rewards": rewards}, mask)
        elif algorithm.value_loss is not None:
            estimated["returns"] = torch.where(mask, advantages + data["values"], 0.0)  # before normalization
        if algorithm.normalization is not None:
            estimated["advantages"] = algorithm.normalization.per_token({**data, "advantages": advantages}, mask)
        return estimated


def _beside_process_rewards(
    scores: PerSequence, rm_scores: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> PerToken:
    """The rewards of tokens, plus the score minus their sum on the last token.

    The difference is the shaping of the score, or the whole score of a row without finite rewards of tokens.
    """
    token_scores = zero_outside(rm_scores.float(), response_mask)
    is_finite = sequence_sum(token_scores, response_mask, cu_seqlens).isfinite()
    process = torch.where(expand_to_tokens(is_finite, response_mask, cu_seqlens), token_scores, 0.0)
    difference = scores - sequence_sum(process, response_mask, cu_seqlens)
    return process + at_last_token(difference, response_mask, cu_seqlens)


_PLACEMENT = use(at_last_token)
_BESIDE_PROCESS_REWARDS = use(_beside_process_rewards)


def mask_turns(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``response_mask`` and ``advantages`` without the turns that ``algorithm.ended`` masks; nothing if it masks none.

    Call it after :func:`estimate_advantages`, so that the score of the response counts in its group. The masked turn is
    the last turn of its row; without ``turn_ids`` it is the whole response.
    """
    reasons = algorithm.ended.reasons("mask_turn")
    if not reasons or "ended" not in data:
        return {}
    mask, cu_seqlens = data["response_mask"], data.get("cu_seqlens")
    masked = expand_to_tokens(ended_by(data["ended"], reasons), mask, cu_seqlens)
    if "turn_ids" in data:
        turns_to_come = sum_from_right(last_of_turn(data["turn_ids"], mask, cu_seqlens), mask, cu_seqlens)
        masked = masked & (turns_to_come == 1)
    remaining = mask & ~masked
    return {"response_mask": remaining, "advantages": torch.where(remaining, data["advantages"], 0.0)}


def token_weights(algorithm: Algorithm, data: Data, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """``loss_weights``, and the tokens of each loss term that chooses some: (B, T), for :func:`policy_objective`.

    ``data`` is that of a whole update, with ``log_probs`` of the policy before it: statistics and thresholds are the
    update's, so that a loss is the same for any split of the batch. If it has ``row_weights`` (B,), each is a factor of
    its row's policy loss. There is no key for a stage that the algorithm does not have.
    """
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        factors: list[Weights] = [part(data) for part in algorithm.corrections]
        if algorithm.token_selection is not None:
            factors.append(Weights(_choose(algorithm.token_selection, data, generator).float()))
        if "row_weights" in data:
            mask, cu_seqlens = data["response_mask"], data.get("cu_seqlens")
            check_sequences(mask, cu_seqlens, row_weights=data["row_weights"])
            factors.append(Weights(zero_outside(expand_to_tokens(data["row_weights"], mask, cu_seqlens), mask)))
        if factors:
            weights["loss_weights"] = reduce(operator.mul, factors).values
        for i, term in enumerate(algorithm.loss_terms):
            if term.tokens is not None:
                term_data = {**data, "response_mask": data[term.mask]}
                weights[tokens_of(i)] = _choose(term.tokens, term_data, generator)
    return weights


def _choose(selector: BoundFunction, data: Data, generator: torch.Generator | None) -> Tensor:
    chosen: Tensor = selector(data, generator=generator) if "generator" in selector.hyperparameters else selector(data)
    return chosen
