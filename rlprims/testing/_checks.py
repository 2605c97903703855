"""Which laws bind which kind of primitive, and the report of those that it breaks."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlprims.corrections import Weights
from rlprims.testing import (
    _laws_advantage,
    _laws_aggregation,
    _laws_errors,
    _laws_filter,
    _laws_layout,
    _laws_logits,
    _laws_loss,
    _laws_mask,
    _laws_numeric,
    _laws_purity,
    _laws_selector,
)
from rlprims.testing._laws_logits import LogitFunction
from rlprims.testing._primitive import DIFFERENTIABLE, Primitive

T = TypeVar("T")
Law = Callable[[T], None]
Exemptions = Mapping[str, str]

_ALWAYS: tuple[Law[Primitive], ...] = (
    _laws_layout.rows_may_be_permuted,
    _laws_mask.empty_batches_are_legal,
    _laws_purity.inputs_are_untouched,
    _laws_purity.strides_do_not_matter,
    _laws_purity.no_global_randomness,
    _laws_purity.no_value_is_read_by_the_host,
    _laws_numeric.float32_whatever_comes_in,
    _laws_numeric.float64_stays,
    _laws_numeric.traces_without_a_break,
    _laws_errors.wrong_shapes_are_refused,
    _laws_errors.hyperparameters_matter,
)
_WITH_A_MASK: tuple[Law[Primitive], ...] = (
    _laws_layout.padding_changes_nothing,
    _laws_layout.packed_equals_padded,
    _laws_mask.masked_is_absent,
    _laws_mask.zero_outside_the_mask,
    _laws_mask.nothing_valid_gives_zero,
    _laws_errors.wrong_masks_are_refused,
)
_WITH_GROUPS: tuple[Law[Primitive], ...] = (
    _laws_layout.groups_may_be_renamed,
    _laws_errors.wrong_groups_are_refused,
)
_PER_ROW: tuple[Law[Primitive], ...] = (
    _laws_layout.batches_may_be_merged,
    _laws_layout.nan_stays_in_its_group,
    _laws_numeric.constants_get_no_gradient,
)
_GROUP_BASELINE: tuple[Law[Primitive], ...] = (
    _laws_advantage.equal_rewards_give_zero,
    _laws_advantage.a_shift_of_a_group_cancels,
    _laws_advantage.a_scale_passes_or_cancels,
    _laws_advantage.one_advantage_per_response,
)
_LOSS: tuple[Law[Primitive], ...] = (_laws_numeric.gradient_is_the_derivative,)
_IMPORTANCE_WEIGHTED: tuple[Law[Primitive], ...] = (_laws_loss.on_policy_it_is_reinforce,)
_TWO_POLICIES: tuple[Law[Primitive], ...] = (
    _laws_loss.far_log_ratios_are_finite,
    _laws_loss.impossible_tokens_are_finite,
)
_AGGREGATION: tuple[Law[Primitive], ...] = (
    _laws_numeric.gradient_is_the_derivative,
    _laws_aggregation.parts_sum_to_the_whole,
    _laws_aggregation.rows_without_tokens_do_not_count,
    _laws_aggregation.it_is_linear,
)
_FILTER: tuple[Law[Primitive], ...] = (
    _laws_filter.groups_are_kept_whole,
    _laws_filter.equal_scores_are_dropped,
    _laws_filter.unknown_scores_are_dropped,
    _laws_filter.twice_is_once,
)
_SELECTOR: tuple[Law[Primitive], ...] = (_laws_selector.every_token_gets_an_answer,)
_LOGITS: tuple[Law[LogitFunction], ...] = (
    _laws_logits.any_leading_shape,
    _laws_logits.a_shift_of_logits_cancels,
    _laws_logits.banned_tokens_are_legal,
    _laws_logits.unread_rows_get_no_gradient,
    _laws_logits.float32_whatever_comes_in,
    _laws_logits.inputs_are_untouched,
    _laws_logits.gradient_is_the_derivative,
    _laws_logits.traces_without_a_break,
    _laws_logits.hyperparameters_matter,
)


def check_advantage(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold an advantage estimator to the laws: rewards in, one advantage per token out.

    Args:
        fn: called by the names of its parameters. Those before ``*`` are data named by the vocabulary, ``cu_seqlens``
            and other optional data default to None; those after ``*`` are hyperparameters.
        exempt: law to reason, for laws that do not hold by design; one that does hold must not be listed.
        alternatives: hyperparameter to another value, which must change the result on some batch.
        hyperparameters: values to call it with, where the default is not meant or missing.

    Raises:
        AssertionError: names the primitive, each broken law, the argument, and the largest difference.
        ValueError: a parameter outside the vocabulary, or an unknown law in ``exempt``.

    >>> import torch
    >>> from rlprims.advantage import rloo
    >>> check_advantage(rloo)
    >>> def mean_over_padding(rewards, response_mask, cu_seqlens=None):
    ...     return rewards - rewards.mean()
    >>> check_advantage(mean_over_padding)
    Traceback (most recent call last):
    ...
    AssertionError: mean_over_padding breaks ...
    """
    p = _primitive(fn, hyperparameters, alternatives, ())
    baseline = _GROUP_BASELINE if "group_ids" in p.data and "rewards" in p.data else ()
    _enforce(p, fn, (*_general(p), *_PER_ROW, *baseline), exempt)


def check_loss(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a per-token loss to the laws; gradients flow to log_probs, new_values and entropies only.

    Arguments and errors are those of :func:`check_advantage`.

    >>> import torch
    >>> def surrogate(log_probs, old_log_probs, advantages, response_mask, cu_seqlens=None):
    ...     return -(log_probs - old_log_probs).exp() * advantages * response_mask
    >>> check_loss(surrogate)
    Traceback (most recent call last):
    ...
    AssertionError: surrogate breaks ...
    """
    p = _primitive(fn, hyperparameters, alternatives, DIFFERENTIABLE)
    data = set(p.data)
    weighted = _IMPORTANCE_WEIGHTED if {"log_probs", "old_log_probs", "advantages"} <= data else ()
    pair = _TWO_POLICIES if "log_probs" in data and any(name.endswith("_log_probs") for name in data) else ()
    _enforce(p, fn, (*_general(p), *_PER_ROW, *_LOSS, *weighted, *pair), exempt)


def check_aggregation(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold an aggregation to the laws: per-token ``losses`` to a scalar, the same for every split into micro-batches.

    If it takes ``totals`` (and ``group_tokens``) it is given those of the whole step with each part.
    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.losses import token_mean
    >>> check_aggregation(token_mean)
    """
    p = _primitive(fn, hyperparameters, alternatives, DIFFERENTIABLE)
    _enforce(p, fn, (*_general(p), *_AGGREGATION), exempt)


def check_reward(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a reward function to the laws: placement or shaping, per token or per row.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.rewards import at_last_token
    >>> check_reward(at_last_token)
    """
    p = _primitive(fn, hyperparameters, alternatives, ())
    _enforce(p, fn, (*_general(p), *_PER_ROW), exempt)


def check_weights(
    fn: Callable[..., Weights],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a correction to the laws: log-probs in, :class:`rlprims.corrections.Weights` out, which are constants.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.corrections import importance_weights
    >>> check_weights(importance_weights)
    """

    @wraps(fn)
    def values(**data: Any) -> Tensor:
        return fn(**data).values

    p = _primitive(values, hyperparameters, alternatives, ())
    _enforce(p, fn, (*_general(p), *_PER_ROW), exempt)


def check_selector(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a selection of tokens to the laws: one bool per token out, with thresholds from the whole batch.

    One that takes a ``generator`` gets the same each time. Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.filters import high_entropy
    >>> check_selector(high_entropy)
    """

    @wraps(fn)
    def with_the_same_draw(**data: Any) -> Tensor:
        if "generator" in data:
            data["generator"] = data["generator"].clone_state()
        return fn(**data)

    if "generator" in signature(fn).parameters:
        hyperparameters.setdefault("generator", torch.Generator().manual_seed(0))
    p = _primitive(with_the_same_draw, hyperparameters, alternatives, ())
    _enforce(p, fn, (*_general(p), *_SELECTOR), exempt)


def check_filter(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a group filter to the laws: scores and groups in, one answer per row out.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.filters import nonzero_range
    >>> check_filter(nonzero_range)
    """
    p = _primitive(fn, hyperparameters, alternatives, ())
    _enforce(p, fn, (*_general(p), *_PER_ROW, *_FILTER), exempt)


def check_logits(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    **hyperparameters: Any,
) -> None:
    """Hold a function of ``logits`` (..., V), and perhaps ``token_ids`` (...), to the laws: a log-prob, an entropy.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.logprobs import entropy_from_logits
    >>> check_logits(entropy_from_logits)
    """
    _enforce(LogitFunction(fn, hyperparameters, alternatives or {}), fn, _LOGITS, exempt)


def _primitive(
    fn: Callable[..., Tensor],
    hyperparameters: Mapping[str, Any],
    alternatives: Mapping[str, Any] | None,
    differentiable: tuple[str, ...],
) -> Primitive:
    p = Primitive(fn, hyperparameters, alternatives or {}, differentiable)
    p.check_vocabulary()
    return p


def _general(p: Primitive) -> tuple[Law[Primitive], ...]:
    mask = _WITH_A_MASK if "response_mask" in p.data else ()
    groups = _WITH_GROUPS if "group_ids" in p.data else ()
    return (*_ALWAYS, *mask, *groups)


def _enforce(subject: T, fn: Callable[..., Any], laws: Iterable[Law[T]], exempt: Exemptions | None) -> None:
    by_name = {law.__name__.replace("_", " "): law for law in laws}
    unknown = set(exempt or {}) - set(by_name)
    if unknown:
        raise ValueError(
            f"exempt names {sorted(unknown)}, which do not bind this primitive; those that do: {[*by_name]}"
        )
    broken: dict[str, str] = {}
    for name, law in by_name.items():
        try:
            law(subject)
        except Exception as error:  # an AssertionError of the law, or whatever the primitive raised under it
            broken[name] = (
                str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
            )
    idle = [name for name in exempt or {} if name not in broken]
    report = [f"{name}: {broken[name]}" for name in broken if name not in (exempt or {})]
    report += [f"{name}: holds after all, so it needs no exemption" for name in idle]
    if report:
        name = getattr(fn, "__name__", repr(fn))
        raise AssertionError(f"{name} breaks {len(report)} of {len(by_name)} laws:\n  " + "\n  ".join(report))
