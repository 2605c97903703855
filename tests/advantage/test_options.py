"""An option that is not one of the choices is refused, by every estimator that has choices."""

import inspect
import re
from collections.abc import Callable
from typing import Literal, get_args, get_origin

import pytest
from torch import Tensor

from rlprims import advantage
from rlprims.testing._cases import make_batch

CHOICES = [
    (name, p.name, get_args(p.annotation))
    for name in advantage.__all__
    if inspect.isfunction(function := getattr(advantage, name))
    for p in inspect.signature(function).parameters.values()
    if get_origin(p.annotation) is Literal
]


def answer(name: str, **options: str) -> Tensor:
    estimator: Callable[..., Tensor] = getattr(advantage, name)
    batch = make_batch(0)
    parameters = inspect.signature(estimator).parameters.values()
    data = {p.name: batch.data[p.name] for p in parameters if p.name in batch.data and p.default is p.empty}
    required = {"k": 2} if name == "pkpo" else {}
    return estimator(**data, **required, **options)


def test_the_estimators_with_choices() -> None:
    assert {(name, option) for name, option, _ in CHOICES} == {
        ("gdpo", "singleton"),
        ("gdpo", "whiten_over"),
        ("gpg", "informative"),
        ("gpg", "singleton"),
        ("grpo", "baseline"),
        ("grpo", "keep_by"),
        ("grpo", "singleton"),
        ("grpo", "std_over"),
        ("opo", "singleton"),
        ("optimal_token_baseline", "align"),
        ("optimal_token_baseline", "singleton"),
        ("pkpo", "baseline"),
        ("reinforce_pp_baseline", "singleton"),
    }


@pytest.mark.parametrize(("name", "option", "choices"), CHOICES, ids=[f"{n}-{o}" for n, o, _ in CHOICES])
def test_an_unknown_choice_is_refused_with_the_choices(name: str, option: str, choices: tuple[str, ...]) -> None:
    """gdpo(whiten_over="token") did not whiten; pkpo(baseline="loo") was a formula of no paper."""
    listed = re.escape(f"expected {' or '.join(map(repr, choices))}")
    for wrong in ("loo", choices[0][:-1], ""):
        with pytest.raises(ValueError, match=f"{option}={wrong!r}, {listed}"):
            answer(name, **{option: wrong})
    for choice in choices:
        if choice != "error":
            answer(name, **{option: choice})


@pytest.mark.parametrize("name", ["gdpo", "gpg", "opo", "reinforce_pp_baseline"])
def test_a_choice_of_grpo_alone_is_not_one_of_others(name: str) -> None:
    """gdpo and reinforce_pp_baseline handed it on to what they share with grpo, which has it."""
    with pytest.raises(ValueError, match=r"singleton='error', expected 'zero' or 'raw'"):
        answer(name, singleton="error")


NAN = float("nan")
RANGES = {
    "gamma": (-0.1, 1.1, NAN),
    "lam": (-0.1, 1.1, NAN),
    "ddof": (-1, 2),
    "eps": (-1e-9, NAN),
    "whiten_eps": (-1e-9, NAN),
    "clip_rho": (-1.0, NAN),
    "clip_c": (-1.0, NAN),
    "clip_pg_rho": (-1.0, NAN),
    "discount": (-0.1, 1.1, NAN),
}
OF_ANOTHER_RANGE = {("iw_opd", "gamma"): (-0.1, NAN)}
OUTSIDE = [
    (name, p.name, wrong)
    for name in advantage.__all__
    if inspect.isfunction(getattr(advantage, name))
    for p in inspect.signature(getattr(advantage, name)).parameters.values()
    for wrong in OF_ANOTHER_RANGE.get((name, p.name), RANGES.get(p.name, ()))
]


def test_the_estimators_with_a_discount_or_a_deviation() -> None:
    assert {"gae", "td_lambda", "vtrace", "gigpo", "rtmc", "vineppo", "prime", "reinforce_pp"} <= {
        n for n, _, _ in OUTSIDE
    }
    assert {"grpo", "gdpo", "spo", "whiten", "quantile_baseline", "pass_at_k_training", "tree_grpo", "maxrl"} <= {
        n for n, _, _ in OUTSIDE
    }


@pytest.mark.parametrize(("name", "option", "wrong"), OUTSIDE)
def test_a_number_outside_its_range_is_refused(name: str, option: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=rf"^{option}={re.escape(str(wrong))}, expected "):
        answer(name, **{option: wrong})
