"""The stages of a step as functions of an algorithm and named tensors: what every trainer and backend shares.

``data`` maps the names of the vocabulary to tensors. A function that adds returns the new names only.
"""

import operator
from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from rlprims.algorithms._algorithm import Algorithm
from rlprims.algorithms._objective import tokens_of
from rlprims.algorithms._use import Use, use
from rlprims.corrections import Weights
from rlprims.filters import finite
from rlprims.grouping import is_constant
from rlprims.layout import expand_to_tokens
from rlprims.masking import check_sequences, zero_outside
from rlprims.rewards import at_last_token, kl_penalty
from rlprims.trajectories import join

Data = Mapping[str, Tensor]
_PLACEMENT = use(at_last_token)


def shape_scores(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``shaped_scores`` (B,): the raw scores plus every shaping term; and each term under its own name.

    A function that fills two terms gives one column, their sum.
    """
    terms: dict[str, Tensor] = {}
    for part in algorithm.score_shaping:
        name, term = part.fn.__name__, part(data)
        terms[name] = terms[name] + term if name in terms else term
    return {**terms, "shaped_scores": sum(terms.values(), start=data["scores"])}


def component_scores(algorithm: Algorithm, data: Data) -> dict[str, Tensor]:
    """``component_scores`` (B, K), of the columns that ``components`` names; nothing if it names none."""
    missing = [name for name in algorithm.components if name not in data]
    if missing:
        raise ValueError(f"components has {missing}; the columns are {sorted(data)}: the verifier must return them")
    columns = [data[name] for name in algorithm.components]
    return {"component_scores": torch.stack(columns, 1)} if columns else {}


def assess_groups(algorithm: Algorithm, data: Data) -> list[str | None]:
    """For each row, why its group is dropped, or None: a score that is not finite, or the algorithm's filter.

    The filter's ``scores`` are its metric's column; one that asks for other columns has no metric. A rollout of several
    rows (``trajectory_ids``) counts once, by its first row.
    """
    ids = data.get("trajectory_ids")
    if ids is not None:
        rollouts = join(ids, data["response_mask"])
        one_row_each = {name: x[rollouts.first_row[rollouts.exists]] for name, x in data.items() if x.dim()}
        one_row_each.pop("trajectory_ids")
        reasons_of = dict(
            zip(rollouts.exists.nonzero()[:, 0].tolist(), assess_groups(algorithm, one_row_each), strict=True)
        )
        return [reasons_of[rollout] for rollout in ids.tolist()]
    scores, group_ids = data["scores"], data["group_ids"]
    reasons: list[str | None] = [None if ok else "a score is not finite" for ok in finite(scores, group_ids).tolist()]
    if algorithm.filter is None or None not in reasons:
        return reasons
    metric, keep = algorithm.filter.metric, algorithm.filter.keep
    if "scores" not in keep.needs:
        kept, explanations = keep(data).tolist(), [f"does not pass {keep}"] * len(scores)
    elif metric not in data:
        raise ValueError(f"filter.metric is {metric!r}; the columns are {sorted(data)}: the verifier must return it")
    else:
        column = data[metric]
        kept = keep({**data, "scores": column}).tolist()
        explanations = [
            f"{metric} is {value:g} throughout" if constant else f"{metric} does not pass {keep}"
            for value, constant in zip(column.tolist(), is_constant(column, group_ids).tolist(), strict=True)
        ]
    return [
        reason or (None if ok else explanation)
        for reason, ok, explanation in zip(reasons, kept, explanations, strict=True)
    ]


def estimate_advantages(algorithm: Algorithm, data: Data, *, kl_coef: float = 0.0) -> dict[str, Tensor]:
    """``rewards``, ``advantages``, and with a critic ``returns``, from ``shaped_scores`` and what is needed."""
    with torch.no_grad():
        rewards = _PLACEMENT({**data, "scores": data["shaped_scores"]})
        if algorithm.kl_in_reward is not None:
            rewards = kl_penalty(
                rewards,
                data["old_log_probs"],
                data["ref_log_probs"],
                data["response_mask"],
                kl_coef=kl_coef,
                estimator=algorithm.kl_in_reward.estimator,
            )
        advantages = algorithm.advantage({**data, "rewards": rewards})
        estimated = {"rewards": rewards, "advantages": advantages}
        if algorithm.value_target is not None:
            estimated["returns"] = algorithm.value_target({**data, "rewards": rewards})
        elif algorithm.value_loss is not None:
            # The target is taken before the advantages are normalized.
            estimated["returns"] = torch.where(data["response_mask"], advantages + data["values"], 0.0)
        if algorithm.normalization is not None:
            estimated["advantages"] = algorithm.normalization({**data, "advantages": advantages})
        return estimated


def weigh_tokens(algorithm: Algorithm, data: Data, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """``loss_weights``, and the tokens of each loss term that chooses some: (B, T), for :func:`policy_objective`.

    ``data`` is that of a whole update, with ``log_probs`` of the policy before it: statistics and thresholds are the
    update's, so that a loss is the same however the batch is split. If it has ``row_weights`` (B,), each is a factor of
    its row's policy loss. No key for what the algorithm leaves alone.
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
                of_term = {**data, "response_mask": data[term.mask]}
                weights[tokens_of(i)] = _choose(term.tokens, of_term, generator)
    return weights


def _choose(selector: Use, data: Data, generator: torch.Generator | None) -> Tensor:
    chosen: Tensor = selector(data, generator=generator) if "generator" in selector.hyperparameters else selector(data)
    return chosen
