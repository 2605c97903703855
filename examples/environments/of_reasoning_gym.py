"""Tasks of Reasoning Gym: ``environment: of_reasoning_gym.ReasoningGym``, and rows of data for it.

A row is one question of a data set, ``{"dataset": "basic_arithmetic", "index": 3}``, from :func:`rows`. Tried with
reasoning-gym 0.1.25 and 0.1.23; it is imported when the first episode begins.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rlprims.environments import FirstMessages, Message, Step


class ReasoningGym:
    """One question and one answer, scored by the data set.

    The answer is the text in ``<answer>`` tags, as in the package's own training code, or without tags the whole
    message. ``columns`` has ``acc``, which is 1 if the score is 1: data sets also give small scores for wrong answers.

    Args:
        dataset: the name of the data set.
        index: the number of the question.
        seed: the seed of the data set.
        options: options of the data set, such as ``{"max_terms": 3}``.
        prompt: text before the question.
    """

    def __init__(
        self, dataset: str, index: int, seed: int = 0, *, options: Mapping[str, Any] | None = None, prompt: str = ""
    ) -> None:
        self.dataset, self.index, self.seed, self.options, self.prompt = dataset, index, seed, options or {}, prompt

    def reset(self) -> FirstMessages:
        self.questions = _dataset(self.dataset, self.seed, tuple(sorted(self.options.items())))
        self.entry = self.questions[self.index]
        return [{"role": "user", "content": f"{self.prompt}{self.entry['question']}"}]

    def step(self, message: Message) -> Step:
        from reasoning_gym.utils import extract_answer

        text = message["content"]
        answer = extract_answer(text, tag_name="answer") or text.strip()
        score = float(self.questions.score_answer(answer, self.entry))
        return Step(reward=score, done=True, columns={"acc": float(score >= 1.0)})


def rows(dataset: str, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of data: the first ``count`` questions of a data set.

    >>> rows("basic_arithmetic", 2)
    [{'dataset': 'basic_arithmetic', 'index': 0, 'seed': 0}, {'dataset': 'basic_arithmetic', 'index': 1, 'seed': 0}]
    """
    return [{"dataset": dataset, "index": index, "seed": seed} for index in range(count)]


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """The data set. A question depends on (seed, index) only, so its size is only an upper limit."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, **{"size": 1_000_000, **dict(options)})
