"""Conversion of a verifier to a reward function of TRL."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlprims.rewards.scoring import naive


def reward_func(
    verifier: Callable[..., Any], *, answer: str = "answer", **options: Any
) -> Callable[..., list[float | None]]:
    """A verifier as one of TRL's ``reward_funcs``; ``answer`` is the dataset's column with the answers.

    Further columns that the verifier names come from the dataset. A row on which it fails has the score None, which TRL
    leaves out of the baseline. Other numbers of the verifier are logged as ``<verifier>/<name>``.

    >>> from rlprims.rewards import verifiers
    >>> score = reward_func(verifiers.gsm8k)
    >>> score(prompts=["6*12="] * 2, completions=["#### 72", "71"], answer=["72", "72"])
    [1.0, 0.0]
    """

    def scores(
        prompts: Sequence[Any], completions: Sequence[Any], log_metric: Any = None, **columns: Any
    ) -> list[float | None]:
        if answer not in columns:
            raise ValueError(f"the dataset has no column {answer!r}: name its column of answers, reward_func(answer=)")
        rows = {name: values for name, values in columns.items() if isinstance(values, list)}
        scored = naive(verifier, [_text(completion) for completion in completions], rows[answer], rows, **options)
        if log_metric is not None:
            for name, column in scored.columns.items():
                log_metric(f"{scores.__name__}/{name}", float(column.nanmean()))
        return [None if math.isnan(score) else score for score in scored.scores.tolist()]

    scores.__name__ = getattr(verifier, "__name__", "verifier")
    return scores


def _text(completion: Any) -> str:
    """The content of a conversation's last message."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])
