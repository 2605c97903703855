"""Answers meant to stall or break whoever reads them, among honest ones, within limits that hold."""

import time
from collections.abc import Iterator

import pytest

from rlprims.rewards import verifiers
from rlprims.rewards.pool import Pool

LIMIT = 3.0
HOSTILE = {
    "a tower of powers": r"\boxed{10^{10^{10}}}",
    "a tower that is divided": r"\boxed{\frac{9^{9^{9^{9}}}}{9^{9^{9^{9}}}}}",
    "a factorial": r"\boxed{99999999!}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{" * 8 + "2" + "}" * 8 + "}",
    "nested sets": r"\boxed{" + r"\{" * 400 + r"\}" * 400 + "}",
    "open braces": r"\boxed{" * 10**5,
    "a megabyte": r"\boxed{" + "1+" * 500_000 + "1}",
    "long, not too long": r"\boxed{" + "x^9+" * 200 + "1}",
    "an integral": r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}",
    "a sum": r"\boxed{\sum_{n=1}^{10000000} \frac{1}{n^n}}",
    "not UTF-8": b"\\boxed{\xff\xfe}".decode("utf-8", "surrogateescape"),
    "a surrogate": "\\boxed{\ud800}",
    "nul": "\\boxed{\0}",
    "nothing": "",
    "code": r"\boxed{__import__('os').system('sleep 100')}",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pytest.importorskip("math_verify")
    with Pool(verifiers.math, workers=2, seconds=LIMIT, memory_mb=1024, preload=["math_verify"]) as pool:
        yield pool


SOME = ("a tower of powers", "nested fractions", "a megabyte", "not UTF-8", "nothing")


@pytest.mark.parametrize("names", [SOME, pytest.param(tuple(HOSTILE), marks=pytest.mark.slow)], ids=["some", "all"])
def test_none_stalls_the_batch_and_none_costs_another_row(pool: Pool, names: tuple[str, ...]) -> None:
    responses = [text for name in names for text in (r"\boxed{\frac{14}{2}}", HOSTILE[name])]
    began = time.monotonic()
    scores = pool(responses, ["7"] * len(responses))
    assert time.monotonic() - began < LIMIT * len(names) / 2 + 20
    assert scores.scores[::2].tolist() == [1.0] * len(names)
    assert scores.scores[1::2].nan_to_num(0).tolist() == [0.0] * len(names)
    assert set(scores.causes) <= {"timeout", "raised MemoryError", "raised RecursionError", "raised OverflowError"}


@pytest.mark.slow
def test_a_regular_expression_that_never_ends() -> None:
    pytest.importorskip("regex")
    with Pool(verifiers.response_format, {"pattern": "(a|aa)+", "seconds": 0.5}, workers=1, seconds=20 * LIMIT) as pool:
        scores = pool(["aaa", "a" * 60 + "b", "b"], [""] * 3)
    assert scores.scores[[0, 2]].tolist() == [1.0, 0.0]
    assert scores.causes["raised TimeoutError"].first == 1
