"""One check for every kind of primitive, its short names, and the report of the laws that a function breaks."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rlprims.corrections import Weights
from rlprims.masking import check_choice
from rlprims.testing._bindings import Effort, Kind, Law, laws_of
from rlprims.testing._primitive import DIFFERENTIABLE, ESTIMATED_FROM, Primitive
from rlprims.testing._report import report_of

Exempt: TypeAlias = Mapping[str, str] | None
Others: TypeAlias = Mapping[str, Any] | None


class KindCheck(Protocol):
    """The check of one kind: :func:`check` without ``kind``."""

    def __call__(
        self,
        fn: Callable[..., Any],
        /,
        *,
        exempt: Exempt = None,
        alternatives: Others = None,
        effort: Effort = "usual",
        **hyperparameters: Any,
    ) -> None: ...


def check(
    fn: Callable[..., Any],
    kind: Kind,
    /,
    *,
    exempt: Exempt = None,
    alternatives: Others = None,
    effort: Effort = "usual",
    inputs: tuple[str, ...] = (),
    **hyperparameters: Any,
) -> None:
    """Test the laws for a primitive of any kind. ``check_loss(fn)`` is ``check(fn, "loss")``, and so on.

    Args:
        fn: called by the names of its parameters. Those before ``*`` are data named by the vocabulary (optional data
            default to None); those after ``*`` are hyperparameters.
        kind: "advantage", "loss", "aggregation", "reward", "weights", "selector", "filter", "logits" or "transforms".
        exempt: law to reason, for laws that do not hold by design. A law that does hold must not be listed.
        alternatives: hyperparameter to another value, which must change the result on some batch.
        effort: ``quick`` leaves out FakeTensors and the compiler, ``compiler`` tests only these; ``thorough`` adds
            packed graphs of every size, export, DTensors and second derivatives entry by entry: half a minute.
        inputs: the data to differentiate by, for "transforms"; the other kinds have their own.
        hyperparameters: values for the call, if a hyperparameter has no default or another value is wanted.

    Raises:
        AssertionError: with the primitive, the broken laws of each cause, the argument, and the largest difference.
        ValueError: an unknown kind, a parameter outside the vocabulary, or an unknown law in ``exempt``.

    >>> from rlprims.losses import reinforce, token_mean
    >>> check(reinforce, "loss", effort="quick")
    >>> check(token_mean, "aggregation", effort="quick")
    """
    subject = subject_of(fn, kind, hyperparameters, alternatives, inputs)
    with _without_traces():
        _enforce(subject, fn, kind, effort, exempt or {})


def subject_of(
    fn: Callable[..., Any],
    kind: Kind,
    hyperparameters: Mapping[str, Any],
    alternatives: Others = None,
    inputs: tuple[str, ...] = (),
) -> Primitive:
    """What a law is called with."""
    check_choice("kind", kind, Kind)
    tensor_function, hyperparameters = _with_tensor_result(fn, kind), dict(hyperparameters)
    if kind == "selector" and "generator" in signature(fn).parameters:
        hyperparameters.setdefault("generator", torch.Generator().manual_seed(0))
    minimized = DIFFERENTIABLE if kind in ("loss", "aggregation", "logits") else ()
    estimated = ESTIMATED_FROM if kind in ("advantage", "reward") else inputs
    primitive = Primitive(tensor_function, hyperparameters, alternatives or {}, minimized, estimated)
    if kind != "logits":
        primitive.check_vocabulary()
    return primitive


_ABOUT = Path(__file__).with_name("_about.txt").read_text("utf-8")
"""The docstring of each kind's check."""


def _check_of(kind: Kind) -> KindCheck:
    def check_kind(
        fn: Callable[..., Any],
        /,
        *,
        exempt: Exempt = None,
        alternatives: Others = None,
        effort: Effort = "usual",
        **hyperparameters: Any,
    ) -> None:
        check(fn, kind, exempt=exempt, alternatives=alternatives, effort=effort, **hyperparameters)

    check_kind.__name__ = check_kind.__qualname__ = f"check_{kind}"
    text = _ABOUT.partition(f"\n## {kind}\n")[2].partition("\n\n## ")[0]
    about, _, more = text.partition("\n")
    check_kind.__doc__ = f"Test the laws for {about}\n\nArguments and errors are those of :func:`check`.\n{more}\n"
    return check_kind


check_advantage: KindCheck = _check_of("advantage")
check_loss: KindCheck = _check_of("loss")
check_aggregation: KindCheck = _check_of("aggregation")
check_reward: KindCheck = _check_of("reward")
check_weights: KindCheck = _check_of("weights")
check_selector: KindCheck = _check_of("selector")
check_filter: KindCheck = _check_of("filter")
check_logits: KindCheck = _check_of("logits")
check_transforms: KindCheck = _check_of("transforms")


def _with_tensor_result(fn: Callable[..., Any], kind: Kind) -> Callable[..., Tensor]:
    """``fn``, or a wrapper that returns a tensor, and the same one in each call."""

    @wraps(fn)
    def values(**data: Any) -> Tensor:
        weights: Weights = fn(**data)
        return weights.values

    @wraps(fn)
    def with_the_same_draw(**data: Any) -> Tensor:
        if "generator" in data:
            data["generator"] = data["generator"].clone_state()
        selected: Tensor = fn(**data)
        return selected

    return {"weights": values, "selector": with_the_same_draw}.get(kind, fn)


@contextmanager
def _without_traces() -> Iterator[None]:
    """Nothing is logged to ``torch.__trace``: pytest would show thousands of empty lines for a broken law."""
    log = logging.getLogger("torch.__trace")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _enforce(subject: Any, fn: Callable[..., Any], kind: Kind, effort: Effort, exempt: Mapping[str, str]) -> None:
    laws = laws_of(kind, subject)
    known, by_name = laws.up_to("thorough"), laws.up_to(effort)
    unknown = set(exempt) - set(known)
    if unknown:
        raise ValueError(f"exempt has {sorted(unknown)}, expected laws that apply to this primitive: {[*known]}")
    broken = broken_laws(subject, by_name)
    unexpected = {name: cause for name, cause in broken.items() if name not in exempt}
    needless = [name for name in exempt if name in by_name and name not in broken]
    report = report_of(unexpected, by_name, kind)
    report += [f"  {name}: the law holds, so it needs no exemption" for name in needless]
    if report:
        name, count = getattr(fn, "__name__", repr(fn)), len(unexpected) + len(needless)
        raise AssertionError("\n".join([f"{name} breaks {count} of {len(by_name)} laws:", *report]))


def broken_laws(subject: Primitive, laws: Mapping[str, Law]) -> dict[str, str]:
    """The laws that it breaks, each with the cause."""
    broken: dict[str, str] = {}
    for name, law in laws.items():
        try:
            law(subject)
        except Exception as error:  # an AssertionError of the law, or an error that the primitive raised
            raised = "" if isinstance(error, AssertionError) else f"raised {type(error).__name__}: "
            broken[name] = f"{raised}{error}"
    return broken
