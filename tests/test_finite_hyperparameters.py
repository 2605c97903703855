"""A float hyperparameter that is NaN, or infinite without a meaning, is refused by name, in every public function."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import pytest
import torch

from rlprims import advantage, controllers, corrections, diagnostics, filters, logprobs, losses, rewards
from rlprims.testing._cases import VOCABULARY, make_batch
from rlprims.types import token_wise

PACKAGES = (advantage, controllers, corrections, diagnostics, filters, logprobs, losses, rewards)

DATA: dict[str, Any] = {
    **{name: make_batch(0).data[name] for name in VOCABULARY},
    "token_ids": torch.zeros(8, 6, dtype=torch.int64),
    "hidden": torch.ones(8, 6, 2),
    "head_weight": torch.ones(3, 2),
    "teacher_hidden": torch.ones(8, 6, 4),
    "teacher_head_weight": torch.ones(3, 4),
    "loss": token_wise(lambda log_probs, **_: -log_probs),
    "data": {},
}
WEIGHTS = {"batch_normalized": corrections.Weights(DATA["rewards"]), "fused_loss": DATA["rewards"]}
BY_TYPE: dict[Any, Any] = {float: 0.5, int: 2, torch.Generator: torch.Generator()}

NO_BOUND = {
    *("clip_low", "clip_high", "clip_rho", "clip_c", "clip_pg_rho", "w_max", "max_ratio", "safe_ratio"),
    *("low", "high", "threshold", "threshold_low", "threshold_high", "delta", "half_life", "high_step"),
}
"""Infinity is legal where it is a bound that nothing reaches, and for the half-life of what does not decay."""
NO_BOUND_IN = {("m2po", "tau")}


def float_hyperparameters() -> Iterator[tuple[Callable[..., Any], str, bool]]:
    """Every public function or class, its parameters after ``*`` that take floats, and whether infinity is refused."""
    for package in PACKAGES:
        public = getattr(package, "__all__", [name for name in vars(package) if name[0].isupper()])
        for fn in (getattr(package, name) for name in public):
            is_plain_class = inspect.isclass(fn) and not issubclass(fn, tuple | Exception) and "__init__" in vars(fn)
            if (not inspect.isfunction(fn) and not is_plain_class) or getattr(fn, "_is_protocol", False):
                continue
            hints = get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
            for name, parameter in inspect.signature(fn).parameters.items():
                hint = hints.get(name)
                if parameter.kind is parameter.KEYWORD_ONLY and (hint is float or float in get_args(hint)):
                    yield fn, name, name not in NO_BOUND and (fn.__name__, name) not in NO_BOUND_IN


CASES = list(float_hyperparameters())


def arguments_of(fn: Callable[..., Any]) -> dict[str, Any]:
    """Legal arguments: data by name, hyperparameters without a default by type."""
    hints = get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
    data = {**DATA, "weights": WEIGHTS.get(fn.__name__), "x": DATA["scores"]}
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        if name == "generator":
            arguments[name] = torch.Generator()
        elif parameter.default is parameter.empty:
            arguments[name] = BY_TYPE[hints[name]] if parameter.kind is parameter.KEYWORD_ONLY else data[name]
    return arguments | ({"penalty": 1.0} if fn is rewards.truncation_penalty else {})


def test_the_signatures_have_them() -> None:
    assert len({fn for fn, _, _ in CASES}) > 80
    assert {(losses.dpo, "beta", True), (losses.cispo, "w_max", False)} <= set(CASES)


@pytest.mark.parametrize(("fn", "name", "is_finite"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_number_that_makes_no_sense_is_refused_by_name(fn: Callable[..., Any], name: str, is_finite: bool) -> None:
    arguments = arguments_of(fn)
    fn(**arguments)
    for number in (math.nan, *((math.inf, -math.inf) if is_finite else ())):
        with pytest.raises(ValueError, match=rf"\b{name}={number}"):
            fn(**{**arguments, name: number})
