"""The verifiers as a reward function and a reward manager of verl."""

from typing import Any

from rlprims.rewards.scoring import naive
from rlprims.rewards.verifiers import by_source


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **unused: Any) -> Any:
    """The result of the verifier for ``data_source`` on one response: ``score``, ``acc``, and ``failed``.

    If a verifier fails, only its row is affected. verl cannot leave out a row, so the row has score 0 and ``failed`` 1.
    Every row has the same columns, because verl reads their names from the first row.

    >>> compute_score("openai/gsm8k", "#### 72", "72")
    {'score': 1.0, 'acc': 1.0, 'failed': 0.0}
    >>> compute_score("no such source", "#### 72", "72")
    {'score': 0.0, 'acc': 0.0, 'failed': 1.0}
    """
    scored = naive(by_source, [solution_str], [ground_truth], {"data_source": [data_source]})
    if scored.failures[0] is not None:
        return {"score": 0.0, "acc": 0.0, "failed": 1.0}
    score = float(scored.scores)
    return {"score": score, "acc": float(scored.columns.get("acc", scored.scores)), "failed": 0.0}


def manager(naive_manager: Any) -> Any:
    """verl's manager for single rows, but it always scores with :func:`compute_score`."""

    def start(self: Any, config: Any, tokenizer: Any, **settings: Any) -> None:
        naive_manager.__init__(self, config, tokenizer, **{**settings, "compute_score": compute_score})

    return type("VerifierRewardManager", (naive_manager,), {"__init__": start})
