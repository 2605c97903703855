"""Lints: errors and warnings for combinations of stages that are probably mistakes, and for hyperparameters."""

from collections.abc import Iterator
from inspect import signature
from itertools import chain
from typing import Literal, NamedTuple

from rlprims import advantage, corrections, filters, losses, rewards
from rlprims.algorithms._adapters import kl_to_old
from rlprims.algorithms._algorithm import Algorithm, check_algorithm
from rlprims.algorithms._dry_call import impossible, wrong_shape


class Finding(NamedTuple):
    """One finding. An error means that the algorithm cannot learn."""

    severity: Literal["error", "warning"]
    message: str


_NORMALIZED = (advantage.beta_normalized, advantage.gdpo, advantage.reinforce_pp, advantage.reinforce_pp_baseline)
"""Estimators that normalize their advantages, in addition to those with ``normalize_std``."""

_UNSCALED = (advantage.clip_advantages, advantage.weight_by_sign, advantage.rlsd, advantage.draco)
"""Functions of the normalization stage that do not normalize."""

_OF_SEVERAL_TOKENS = {"topk_log_probs", "teacher_topk_log_probs", "logits", "ref_logits", "teacher_logits", "hidden"}
"""Data of a whole next-token distribution: they do not depend on the sampled token."""

_RATES = (advantage.maxrl, advantage.beta_normalized)
"""Estimators that use a group's mean reward as its share of correct responses."""

_IMPORTANCE = (
    corrections.icepop,
    corrections.importance_weights,
    corrections.mis,
    corrections.seq_mask_tis,
    corrections.tis,
)
"""Corrections that account for the gap between sampler and trainer; the others are gates."""

_OF_ROWS = (filters.max_variance, filters.policy_filtration)
"""Filters that select single rows."""

_STAGES = {
    **dict.fromkeys(("filter", "token_selection", "tokens"), "filters"),
    **dict.fromkeys(("kl_in_reward", "coefficient"), "controllers"),
    **dict.fromkeys(("baseline", "advantage", "normalization", "value_target"), "advantage"),
    **dict.fromkeys(("policy_loss", "loss_terms", "value_loss", "aggregation"), "losses"),
    **{"score_shaping": "rewards", "corrections": "corrections"},
}
"""The package of each stage's functions; functions of other packages may be in any stage."""

_SEQUENCE_RATIO = (losses.gspo, losses.gspo_token)


def check(algorithm: Algorithm) -> list[Finding]:
    """All findings, errors first.

    >>> from rlprims import algorithms
    >>> check(algorithms.grpo(kl_coef=0.0).replace(group_size=1))[0].message
    'advantage.grpo compares the samples of a prompt, and group_size is 1: every advantage would be 0'
    """
    check_algorithm(algorithm)
    errors = chain(_misplaced(algorithm), _refused(algorithm), _errors_of_stages(algorithm), _errors_of_data(algorithm))
    warnings = chain(_warnings_of_losses(algorithm), _warnings_of_scales(algorithm), _warnings_of_ratios(algorithm))
    return [*(Finding("error", message) for message in errors), *(Finding("warning", message) for message in warnings)]


def _refused(a: Algorithm) -> Iterator[str]:
    """Hyperparameters that a primitive does not accept."""
    for stage, filled in a.uses():
        if reason := impossible(filled):
            yield f"{stage}: {_short(filled.path)} refuses {reason}"
        if stage in ("advantage", "normalization", "policy_loss") and (reason := wrong_shape(filled)):
            yield f"{stage}: {reason}"


def _errors_of_stages(a: Algorithm) -> Iterator[str]:
    """Stages that need another stage, or that are not used by any."""
    estimator = _short(a.advantage.path)
    if "group_ids" in a.advantage.needs and a.group_size == 1:
        yield f"{estimator} compares the samples of a prompt, and group_size is 1: every advantage would be 0"
    if a.filter and a.group_size == 1:
        yield "filter compares the responses of a group, and group_size is 1: every group would be dropped"
    if a.baseline is not None and "baseline_scores" not in a.advantage.needs:
        yield f"baseline computes baseline_scores, which {estimator} does not use: use advantage.remax or advantage.spo"
    if "values" in a.advantage.needs and a.value_loss is None:
        yield f"{estimator} needs values, and no value_loss trains the critic"
    if a.value_loss is not None and "values" not in a.advantage.needs:
        yield f"value_loss trains a critic that {estimator} does not read: remove it"
    if a.filter and a.filter.keep.fn in _OF_ROWS:
        yield f"filter drops whole groups, and {_short(a.filter.keep.path)} chooses rows within them"
    if not a.components and any("component_scores" in part.needs for _, part in a.uses()):
        yield "component_scores are read and components is empty: name the verifier's columns there"
    for i, term in enumerate(a.loss_terms):
        if term.mask != "response_mask" and "advantages" in term.loss.needs:
            loss = _short(term.loss.path)
            yield f"loss_terms.{i} is on {term.mask}, and {loss} reads advantages, which are 0 outside of response_mask"


def _errors_of_data(a: Algorithm) -> Iterator[str]:
    """Functions whose data make the result wrong, or are accounted for twice."""
    distribution_data = sorted(a.advantage.needs & _OF_SEVERAL_TOKENS)
    if distribution_data and not getattr(a.advantage.fn, "of_later_tokens", False):
        yield (
            f"{_short(a.advantage.path)} reads {', '.join(distribution_data)}: a divergence over several tokens does "
            "not depend on the sampled token, so that its expected gradient as an advantage is 0. Use it as a loss, "
            "such as losses.topk_kl, or use advantage.teacher_gap, which reads the sampled token only; if it is a sum "
            f"over later tokens, declare {a.advantage.fn.__name__}.of_later_tokens = True"
        )
    weights = [part for part in a.corrections if part.fn in _IMPORTANCE]
    if len(weights) > 1:
        names = " and ".join(_short(part.path) for part in weights)
        yield f"corrections: {names} account for the same gap: keep one of them, and multiply by gates only"
    if weights and "rollout_log_probs" in a.policy_loss.needs:
        yield (
            f"{_short(a.policy_loss.path)} has its ratio to the policy that sampled, and {_short(weights[0].path)} "
            "corrects for the same gap again: remove the correction, or use clipped_surrogate"
        )
    for part in (a.advantage, a.normalization) if a.ended.reasons("leave_out") else ():
        if part is not None and "valid_rows" not in signature(part.fn).parameters:
            no_rows = f"{_short(part.path)} does not take valid_rows"
            yield f"ended leaves responses out, and {no_rows}: use mask_turn or drop_group"
    if a.token_selection and a.token_selection.fn is filters.kl_cov:
        yield (
            "filters.kl_cov selects the tokens to penalize, and token_selection those to train on: use it for the "
            "tokens of a loss term, as in algorithms.kl_cov()"
        )


def _misplaced(a: Algorithm) -> Iterator[str]:
    """Functions in the wrong stage, such as a loss in the advantage stage."""
    for stage, part in a.uses():
        *_, kind = (piece for piece in stage.split(".") if not piece.isdigit())
        library, _, package = part.path.rpartition(".")[0].partition(".")
        if library == "rlprims" and package in _STAGES.values() and package != _STAGES[kind]:
            yield f"{stage} is {_short(part.path)}, expected a function of rlprims.{_STAGES[kind]}"
        elif kind in ("advantage", "filter", "score_shaping") and "advantages" in part.needs:
            yield f"{stage} is {_short(part.path)}, which reads advantages, and there are none before that stage ends"
        elif _STAGES[kind] == "losses" and (kind == "aggregation") != ("losses" in part.needs):
            expected = "a mean of losses, such as losses.token_mean" if kind == "aggregation" else "a loss per token"
            yield f"{stage} is {_short(part.path)}, expected {expected}"


def _warnings_of_losses(a: Algorithm) -> Iterator[str]:
    """Losses and loss terms that probably do something else than is meant."""
    if a.kl_in_reward and any("ref_log_probs" in term.loss.needs for term in a.loss_terms):
        yield "the KL is in the reward and in the loss: it is counted twice"
    for i, term in enumerate(a.loss_terms):
        hyperparameters = term.loss.hyperparameters
        if term.loss.fn is losses.kl and (hyperparameters["gradient"] or hyperparameters["value"]) == "k1":
            yield "k1 as a loss has an expected gradient of 0 and has no effect: use gradient='k2'"
        if term.mask != "response_mask" and term.over == "policy":
            yield (
                f"loss_terms.{i} is on {term.mask} and divided by the count of response_mask: over='term' divides by "
                "the count of its own tokens"
            )
        if term.tokens and term.tokens.fn is filters.clip_cov:
            yield f"loss_terms.{i} is on the tokens that filters.clip_cov keeps: it is a token_selection"
        if term.loss.fn is kl_to_old and a.updates_per_batch == 1:
            yield (
                f"loss_terms.{i} is the KL to the old policy, and a batch has a single update, in which the policy is "
                "the old policy: the term has no effect"
            )
    if a.updates_per_batch == 1 and any(part.fn is corrections.fipo for part in a.corrections):
        yield (
            "corrections.fipo computes weights from the change of the policy since the batch was sampled, and a batch "
            "has a single update: every weight is 1"
        )


def _warnings_of_scales(a: Algorithm) -> Iterator[str]:
    """Scores and advantages that are scaled, or filtered, in a way that is probably not meant."""
    scales = a.advantage.hyperparameters.get("normalize_std", False) or a.advantage.fn in _NORMALIZED
    if scales and a.normalization is not None and a.normalization.fn not in _UNSCALED:
        yield "the advantages are divided by a std and normalized over the batch again"
    if (keep := a.advantage.hyperparameters.get("keep")) and keep >= a.group_size:
        yield f"keep={keep} keeps every response of a group of {a.group_size}: sample more, or leave keep out"
    overlong = any(part.fn is rewards.overlong_penalty for part in a.score_shaping)
    if overlong and scales and a.filter is None:
        yield (
            "overlong_penalty without a group filter: in groups of wrong responses only the length differs, the "
            "division by the std scales that to ±1, and the policy learns to be short"
        )
    if overlong and a.filter and a.filter.metric in ("shaped_scores", "rewards"):
        yield (
            f"the filter uses {a.filter.metric}, which includes the overlong penalty, so groups of wrong responses "
            "pass because of their lengths: filter on acc or scores"
        )
    if a.advantage.fn is advantage.gdpo and a.filter and "scores" in a.filter.keep.needs:
        yield (
            f"advantage.gdpo uses every component, and the filter uses {a.filter.metric} only, so it drops groups that "
            "differ in another component: use keep=filters.varied_components"
        )
    lowered = "score_shaping" if a.score_shaping else "kl_in_reward" if a.kl_in_reward else None
    if a.advantage.fn in _RATES and lowered:
        yield (
            f"{_short(a.advantage.path)} uses the group's mean reward as the share of correct responses, and {lowered} "
            "changes the rewards, which may become negative"
        )


def _warnings_of_ratios(a: Algorithm) -> Iterator[str]:
    """Policy losses with a mean, a clip or a number of updates that their ratio is not made for."""
    name = _short(a.policy_loss.path)
    if a.policy_loss.fn in (*_SEQUENCE_RATIO, losses.gmpo) and a.aggregation.fn is losses.token_mean:
        yield f"{name} with token_mean weights a response by its length: use seq_mean_token_mean"
    averaged = a.policy_loss.fn in _SEQUENCE_RATIO and a.policy_loss.hyperparameters.get("mean") != "product"
    for side in ("clip_low", "clip_high"):
        if averaged and a.policy_loss.hyperparameters[side] >= 0.1:
            yield (f"{name} clips a mean over the response, which {side} >= 0.1 almost never clips: the paper has 4e-4")
    if 1 < a.policy_loss.hyperparameters.get("clip_high", 0) < 2:
        high = a.policy_loss.hyperparameters["clip_high"]
        yield f"{name} has clip_high={high:g}, counted from 1: ratios up to {1 + high:g}. Is {high - 1:.2g} meant?"
    if a.policy_loss.fn is losses.reinforce and a.updates_per_batch > 1:
        yield "losses.reinforce has no ratio for later updates of a batch: use clipped_surrogate"


def _short(path: str) -> str:
    return path.removeprefix("rlprims.")
