"""Two looks at a picture of dots: the first hides a part of it, and who answers wrongly sees the whole one.

rlprims train examples/dots/looks.yaml      # after python examples/dots/warm_up.py
"""

import io
from typing import Any

from PIL import Image

from rlprims.environments import FirstMessages, Message, Step
from rlprims.rewards.verifiers import tagged_answer

HIDDEN = (0, 0, 32, 8)  # the first row of cells


class Looks:
    """A right answer earns 1 at the first look, and 0.5 at the second."""

    has_images = True

    def __init__(self, question: str, answer: str, image: tuple[bytes, ...]) -> None:
        self.question, self.answer, self.whole, self.looks = question, answer, image[0], 0

    def shown(self, image: Any) -> list[Message]:
        return [
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": self.question}]}
        ]

    def reset(self) -> FirstMessages:
        picture = Image.open(io.BytesIO(self.whole)).convert("RGB")
        picture.paste((255, 255, 255), HIDDEN)
        return self.shown(picture)

    def step(self, message: Message) -> Step:
        self.looks += 1
        right = tagged_answer(message["content"], self.answer)["acc"]
        if right or self.looks == 2:
            return Step(reward=right / self.looks, done=True, columns={"acc": right})
        return Step(self.shown(self.whole))
