"""The primitives that may have made a step's numbers, with the values of their hyperparameters.

A hyperparameter's values are its default, those of all presets and dialects, those of its type (a bool, a Literal), the
usual ones of ``USUAL``, and those that the caller adds.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from torch import Tensor

from rlprims import corrections, losses
from rlprims.algorithms import DIALECTS, PRESETS, Algorithm, BoundFunction, LossTerm, use

Options: TypeAlias = Mapping[str, Sequence[Any]]
Weighting: TypeAlias = tuple[tuple[BoundFunction, ...], BoundFunction | None]
"""Corrections, and a token selection."""

USUAL: Options = {
    "ddof": (0, 1),
    **dict.fromkeys(("eps", "whiten_eps"), (0.0, 1e-9, 1e-8, 1e-6, 1e-5, 1e-4)),
    "gamma": (0.9, 0.95, 0.99, 1.0),
    "lam": (0.0, 0.9, 0.95, 1.0),
    **dict.fromkeys(("clip_low", "clip_high"), (0.1, 0.2, 0.24, 0.28, 0.3)),
    "dual_clip": (None, 3.0),
    "high": (1.5, 2.0, 3.0, 5.0),
}
FINE = frozenset({"eps", "whiten_eps", "tolerance"})
"""Hyperparameters that change a result by less than a hundredth: they are told apart last."""


@cache
def specs() -> tuple[Algorithm, ...]:
    """Every preset, and every preset in each of its dialects."""
    dialects: list[tuple[str | None, str]] = [(None, name) for name in PRESETS]
    dialects += [(dialect, name) for dialect, names in DIALECTS.items() for name in names]
    return tuple(PRESETS[name](dialect=dialect) if dialect else PRESETS[name]() for dialect, name in dialects)


@cache
def _values_in_specs() -> dict[tuple[Callable[..., Any], str], tuple[Any, ...]]:
    values: dict[tuple[Callable[..., Any], str], dict[Any, None]] = {}
    for _, part in (each for spec in specs() for each in spec.uses()):
        for name, value in part.hyperparameters.items():
            values.setdefault((part.fn, name), {})[value] = None
    return {key: tuple(each) for key, each in values.items()}


@cache
def _values_of_types(fn: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(fn)
    literals = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return {**{name: (True, False) for name, hint in hints.items() if hint is bool}, **literals}


def candidates(fn: Callable[..., Any], more: Options, *, fine: bool | None = None) -> Iterator[dict[str, Any]]:
    """The values of its hyperparameters, all combinations; only the coarse or the fine ones vary, or both (None)."""
    part = use(fn)
    known = part.hyperparameters
    axes: dict[str, tuple[Any, ...]] = {}
    for name in (*known, *sorted(part.unbound)):
        axes[name] = (known[name],) if name in known else ()
        if name != "keep_by" and (fine is None or (name in FINE) == fine):
            found = (*axes[name], *_values_of_types(fn).get(name, ()), *_values_in_specs().get((fn, name), ()))
            found = (*found, *USUAL.get(name, ()), *more.get(name, ()))
            axes[name] = tuple(value for value in dict.fromkeys(found) if value != "error")
        elif not axes[name]:
            del axes[name]
    yield from (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))


def of_package(package: Any, wants: set[str], without: set[str], batch: Mapping[str, Tensor]) -> list[Any]:
    """The functions of a package that need ``wants``, nothing of ``without``, and nothing that the batch lacks."""
    functions = [fn for name in package.__all__ if inspect.isfunction(fn := getattr(package, name))]
    needs = {fn: use(fn).needs for fn in functions}
    return [fn for fn in functions if wants <= needs[fn] <= batch.keys() and not without & needs[fn]]


def policy_losses(batch: Mapping[str, Tensor]) -> list[Any]:
    """The losses of policies: all that some spec has, the most frequent first, and all that read advantages."""
    named = [fn for fn, _ in Counter(spec.policy_loss.fn for spec in specs()).most_common()]
    named += of_package(losses, {"log_probs", "advantages"}, set(), batch)
    return [fn for fn in dict.fromkeys(named) if use(fn).needs <= batch.keys()]


def weightings(batch: Mapping[str, Tensor]) -> list[Weighting]:
    """Corrections and token selections as some spec has them; none comes first. Drawn selections are left out."""
    found: dict[Any, None] = {((), None): None}
    for spec in specs():
        drawn = spec.token_selection is not None and "generator" in spec.token_selection.hyperparameters
        if spec.token_weight_needs <= batch.keys() and not drawn:
            found[spec.corrections, spec.token_selection] = None
    if {"old_log_probs", "rollout_log_probs"} <= batch.keys():
        for level, action, high in product(("token", "sequence"), ("truncate", "mask"), USUAL["high"]):
            weights = use(corrections.importance_weights, level=level, action=action, high=high)
            found[(weights,), None] = None
    return list(found)


def loss_terms(batch: Mapping[str, Tensor]) -> list[LossTerm]:
    """Loss terms with coefficient 1: KLs by the estimators of their value and gradient, entropy, and those of specs."""
    kinds = ("k1", "k2", "k3", "abs")
    pairs = [(value, gradient) for value in kinds for gradient in (None, *kinds) if gradient != value]
    parts = [use(losses.kl, value=value, gradient=gradient) for value, gradient in pairs if gradient]
    parts = [use(losses.kl, value=value) for value in kinds] + parts
    found = [LossTerm(coefficient=1.0, loss=part) for part in (*parts, use(losses.negative_entropy))]
    found += [term.model_copy(update={"coefficient": 1.0}) for spec in specs() for term in spec.loss_terms]
    needs = {term: term.loss.needs | {term.mask} | (term.tokens.needs if term.tokens else set()) for term in found}
    return [term for term in dict.fromkeys(found) if needs[term] <= batch.keys()]
