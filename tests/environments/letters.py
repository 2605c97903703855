"""A tokenizer of letters and samplers that are functions of their arguments: episodes without a model."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlprims.environments import Completion

END = 0


class Letters:
    """One token is one character; 0 ends a text."""

    all_special_tokens = ("\0",)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(i) for i in ids if i != END)


def says(*texts: str) -> Callable[[Sequence[int], int, int], Completion]:
    """A sampler that writes these texts turn by turn, the last one again and again."""

    def sample(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
        ids = [*map(ord, texts[min(turn, len(texts) - 1)]), END]
        return Completion(ids, [-0.5] * len(ids))

    return sample


def random_text(prompt_ids: Sequence[int], sample_id: int, turn: int) -> Completion:
    """A function of (sample, turn): one to nine letters, with log-probs; one in three is cut."""
    rng = np.random.Generator(np.random.Philox(key=[sample_id, turn]))
    ids = [int(i) for i in rng.integers(ord("a"), ord("f"), size=int(rng.integers(1, 10)))]
    cut = bool(rng.integers(3) == 0)
    ids += [] if cut else [END]
    return Completion(ids, [float(x) for x in -rng.random(len(ids))], finish="length" if cut else "stop", version=turn)
