"""Every public function of the maths describes its arguments and its result, and the words that they share are used."""

import inspect
import pickle
import re
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor

from rlprims import advantage, corrections, diagnostics, filters, logprobs, losses, rewards
from rlprims._described import ARGUMENTS, RETURNS, described
from rlprims.types import PerPair, PerToken, TokenMask

PACKAGES = (advantage, corrections, diagnostics, filters, logprobs, losses, rewards)
FUNCTIONS = {
    f"{package.__name__.removeprefix('rlprims.')}.{name}": thing
    for package in PACKAGES
    for name in package.__all__
    if isinstance(thing := getattr(package, name), FunctionType)
}
ENTRY = re.compile(r"^(\w+(?:, \w+)*): (?=\S)", re.MULTILINE)


def section(function: Callable[..., Any], name: str) -> str:
    found = re.search(rf"^{name}:\n((?:    .*\n?)+)", inspect.getdoc(function) or "", re.MULTILINE)
    return inspect.cleandoc(found[1]) if found else ""


def entries(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """The arguments that the docstring describes, each with its description on one line."""
    _, *parts = ENTRY.split(section(function, "Args"))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [(name, " ".join(words.split())) for label, words in pairs for name in label.split(", ")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_is_described_once(name: str) -> None:
    parameters = list(inspect.signature(FUNCTIONS[name]).parameters)
    assert Counter(argument for argument, _ in entries(FUNCTIONS[name])) == Counter(parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_result_is_described(name: str) -> None:
    assert section(FUNCTIONS[name], "Returns")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_fits_into_120_columns(name: str) -> None:
    lines = [line for part in ("Args", "Returns", "Raises") for line in section(FUNCTIONS[name], part).split("\n")]
    assert max(map(len, lines)) <= 120 - 8


@pytest.mark.parametrize("name", ARGUMENTS)
def test_several_functions_share_the_words_of_an_argument(name: str) -> None:
    found = [words for function in FUNCTIONS.values() for argument, words in entries(function) if argument == name]
    assert sum(words.endswith(f"{ARGUMENTS[name]}.") for words in found) > 1


@pytest.mark.parametrize("words", sorted(set(RETURNS.values())))
def test_several_functions_share_the_words_of_a_result(words: str) -> None:
    assert sum(section(function, "Returns").endswith(f"{words}.") for function in FUNCTIONS.values()) > 1


def a_loss(log_probs: PerToken, advantages: PerToken, response_mask: TokenMask, *, beta: float = 1.0) -> PerToken:
    """A loss.

    Args:
        log_probs, advantages: float, both of the student.
        beta: a temperature.

    Returns:
        float, in nats.

    >>> 1 + 1
    2
    """
    return log_probs * beta


def test_described_keeps_what_the_docstring_says() -> None:
    function = described(a_loss)
    assert function is a_loss
    words = dict(entries(function))
    assert words["beta"] == "a temperature."
    assert words["log_probs"] == words["advantages"] == "float, both of the student."
    assert words["response_mask"] == f"bool (B, T) or (N,); {ARGUMENTS['response_mask']}."
    assert section(function, "Returns") == "float, in nats."
    assert section(function, "Raises").startswith("ValueError: wrong shapes or dtypes; ")
    assert (function.__doc__ or "").endswith("\n\n>>> 1 + 1\n2")
    assert list(inspect.signature(function).parameters) == ["log_probs", "advantages", "response_mask", "beta"]


def test_twice_is_once() -> None:
    text = losses.dpo.__doc__
    assert described(losses.dpo).__doc__ == text


def test_shapes_of_annotations_that_are_optional() -> None:
    def shifted(scores: PerPair | None, length: int) -> Tensor:
        """Shifted scores."""
        raise NotImplementedError

    assert dict(entries(described(shifted))) == {"scores": "float (P,); one for each response."}


def test_a_function_without_a_docstring_stays_without() -> None:
    """As under ``python -OO``."""

    def silent(log_probs: PerToken) -> PerToken:
        return log_probs

    assert described(silent).__doc__ is None


def test_a_described_function_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(losses.dpo)) is losses.dpo  # noqa: S301
