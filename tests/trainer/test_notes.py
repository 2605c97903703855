"""A run whose first scores are all the same says that there is nothing to learn, and shows three responses."""

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rlprims.trainer.config import Config
from rlprims.trainer.session import start


def printed(load: Callable[..., Config], settings: dict[str, Any], console: Console, verifier: str, steps: int) -> str:
    changes = {"algorithm": {"preset": "grpo", "kl_coef": 0.0, "group_size": 3}, "steps": steps}
    changes |= {
        "prompts_per_generation": None,
        "verifier": f"tests.trainer.verifiers.{verifier}",
        "data": settings["data"],
    }
    start(load({**settings, **changes}, "data.eval=null"), console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_three_steps_of_one_score_are_reported_once_with_three_responses(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    text = printed(load, settings, console, "always_right", steps=5)
    assert text.count("every score of the first 3 steps is 1 (36 responses): nothing can be learned from them") == 1
    assert text.count("nothing to learn from · sums") == 3  # of three prompts
    assert text.index("nothing can be learned") < text.index("nothing to learn from")


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "steps"), [("has_a_digit", 3), ("always_right", 2)])
def test_scores_that_differ_and_too_few_steps_are_not(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, verifier: str, steps: int
) -> None:
    assert "nothing" not in printed(load, settings, console, verifier, steps)


@pytest.mark.slow
def test_a_shaped_difference_is_something_to_learn_from(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    shaped = {"preset": "dapo", "group_size": 3, "filter": None, "max_length": 8, "buffer_length": 4}
    config = load({**settings, "algorithm": shaped, "prompts_per_generation": None, "steps": 3,
                   "verifier": "tests.trainer.verifiers.always_right"}, "data.eval=null")  # fmt: skip
    start(config, console)
    assert "nothing" not in console.file.getvalue()  # type: ignore[attr-defined]
