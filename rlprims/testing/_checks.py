"""The checks, one for each kind of primitive, and the report of the laws that it breaks."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rlprims.corrections import Weights
from rlprims.testing._bindings import Effort, Kind, Laws, laws_of
from rlprims.testing._laws_logits import LogitFunction
from rlprims.testing._primitive import DIFFERENTIABLE, ESTIMATED_FROM, Primitive

Exemptions = Mapping[str, str]


def check_advantage(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
    **hyperparameters: Any,
) -> None:
    """Hold an advantage estimator to the laws: rewards in, one advantage per token out.

    Args:
        fn: called by the names of its parameters. Those before ``*`` are data named by the vocabulary, ``cu_seqlens``
            and other optional data default to None; those after ``*`` are hyperparameters.
        exempt: law to reason, for laws that do not hold by design; one that does hold must not be listed.
        alternatives: hyperparameter to another value, which must change the result on some batch.
        effort: ``quick`` leaves FakeTensors and the compiler out, ``compiler`` all else; ``thorough`` adds packed
            graphs of every size, ``torch.export``, DTensors and second derivatives entry by entry, up to half a minute.
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
    _check("advantage", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_loss(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
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
    _check("loss", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_aggregation(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
    **hyperparameters: Any,
) -> None:
    """Hold an aggregation to the laws: per-token ``losses`` to a scalar, the same for every split into micro-batches.

    If it takes ``totals`` (and ``group_tokens``, ``row_tokens``, ``trajectory_tokens``) it is given those of the whole
    step with each part.
    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.losses import token_mean
    >>> check_aggregation(token_mean)
    """
    _check("aggregation", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_reward(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
    **hyperparameters: Any,
) -> None:
    """Hold a reward function to the laws: placement or shaping, per token or per row.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.rewards import at_last_token
    >>> check_reward(at_last_token)
    """
    _check("reward", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_weights(
    fn: Callable[..., Weights],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
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

    _check("weights", fn, values, hyperparameters, alternatives, effort, exempt)


def check_selector(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
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
    _check("selector", fn, with_the_same_draw, hyperparameters, alternatives, effort, exempt)


def check_filter(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
    **hyperparameters: Any,
) -> None:
    """Hold a group filter to the laws: scores and groups in, one answer per row out.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.filters import nonzero_range
    >>> check_filter(nonzero_range)
    """
    _check("filter", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_logits(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    alternatives: Mapping[str, Any] | None = None,
    effort: Effort = "usual",
    **hyperparameters: Any,
) -> None:
    """Hold a function of ``logits`` (..., V), and perhaps ``token_ids`` (...), to the laws: a log-prob, an entropy.

    Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.logprobs import entropy_from_logits
    >>> check_logits(entropy_from_logits)
    """
    _check("logits", fn, fn, hyperparameters, alternatives, effort, exempt)


def check_transforms(
    fn: Callable[..., Tensor],
    /,
    *,
    exempt: Exemptions | None = None,
    effort: Effort = "usual",
    inputs: tuple[str, ...] = (),
    **hyperparameters: Any,
) -> None:
    """Hold any function of the vocabulary's tensors that returns a tensor to the laws of torch's transforms only.

    That is ``vmap``, ``torch.compile``, FakeTensors, subclasses, and, by those ``inputs`` that it is differentiated by,
    ``torch.func.grad``, ``jvp`` and second derivatives. Arguments and errors are those of :func:`check_advantage`.

    >>> from rlprims.diagnostics import token_mean
    >>> def mean_entropy(entropies, response_mask):
    ...     return token_mean(entropies, response_mask).value()
    >>> check_transforms(mean_entropy, effort="quick")
    """
    _check("transforms", fn, fn, hyperparameters, None, effort, exempt, inputs)


def _check(
    kind: Kind,
    fn: Callable[..., Any],
    tensor_function: Callable[..., Tensor],
    hyperparameters: Mapping[str, Any],
    alternatives: Mapping[str, Any] | None,
    effort: Effort,
    exempt: Exemptions | None,
    inputs: tuple[str, ...] = (),
) -> None:
    """The one body: ``tensor_function`` is ``fn``, or ``fn`` made to return a tensor."""
    subject: Primitive | LogitFunction
    if kind == "logits":
        subject = LogitFunction(tensor_function, hyperparameters, alternatives or {})
    else:
        minimized = DIFFERENTIABLE if kind in ("loss", "aggregation") else ()
        estimated = ESTIMATED_FROM if kind in ("advantage", "reward") else inputs
        subject = Primitive(tensor_function, hyperparameters, alternatives or {}, minimized, estimated)
        subject.check_vocabulary()
    _enforce(subject, fn, laws_of(kind, subject), effort, exempt or {})


def _enforce(subject: Any, fn: Callable[..., Any], laws: Laws, effort: Effort, exempt: Exemptions) -> None:
    known, by_name = laws.up_to("thorough"), laws.up_to(effort)
    unknown = set(exempt) - set(known)
    if unknown:
        raise ValueError(f"exempt names {sorted(unknown)}, which do not bind this primitive; those that do: {[*known]}")
    broken: dict[str, str] = {}
    for name, law in by_name.items():
        try:
            law(subject)
        except Exception as error:  # an AssertionError of the law, or whatever the primitive raised under it
            broken[name] = (
                str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
            )
    idle = [name for name in exempt if name in by_name and name not in broken]
    report = [f"{name}: {broken[name]}" for name in broken if name not in exempt]
    report += [f"{name}: holds after all, so it needs no exemption" for name in idle]
    if report:
        name = getattr(fn, "__name__", repr(fn))
        raise AssertionError(f"{name} breaks {len(report)} of {len(by_name)} laws:\n  " + "\n  ".join(report))
