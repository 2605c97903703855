"""Environments with pictures, named by import path in configs."""

import io
from typing import Any

from PIL import Image

from rlprims.environments import Step
from tests.vision.made import encoded, picture

COLOURS = ("red", "green", "blue", "white")


class Texts:
    """It reads and answers texts. The images of a row are before its question."""

    def __init__(self, question: str, answer: str) -> None:
        self.question, self.answer, self.turns = question, answer, 0

    def reset(self) -> Any:
        return [{"role": "user", "content": self.question}]

    def step(self, message: Any) -> Step:
        self.turns += 1
        right = len(message["content"]) % 3 / 2
        if right or self.turns == 3:
            return Step(reward=right, done=True, columns={"acc": float(right > 0.5)})
        return Step(self.answers(len(message["content"])))

    def answers(self, number: int) -> list[Any]:
        return [{"role": "user", "content": "Where?"}]


class Pictures(Texts):
    """It answers with a picture, whose colour is that of what was said."""

    has_images = True
    colours = COLOURS

    def answers(self, number: int) -> list[Any]:
        image = picture(self.colours[number % 4])
        shown: Any = image if number % 2 else encoded(image)
        return [{"role": "user", "content": [{"type": "image", "image": shown}, {"type": "text", "text": "Where?"}]}]


class Own(Pictures):
    """It takes the images of its row and shows them in another order."""

    def __init__(self, question: str, answer: str, images: tuple[bytes, ...]) -> None:
        super().__init__(question, answer)
        self.images = images

    def reset(self) -> Any:
        shown = [Image.open(io.BytesIO(image)) for image in self.images[::-1]]
        parts = [{"type": "image", "image": image} for image in shown]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.question}]}]


class Sick(Pictures):
    """Half of its pictures are damaged."""

    def answers(self, number: int) -> list[Any]:
        (message,) = super().answers(0)
        message["content"][0] = {"type": "image", "image": message["content"][0]["image"][: 60 if number % 2 else None]}
        return [message]
