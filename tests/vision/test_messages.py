"""Messages in the layouts of TRL, verl and OpenAI become the same parts, and the images follow in their order."""

import base64
from pathlib import Path
from typing import Any

import pytest

from rlprims.vision.images import read_images
from rlprims.vision.messages import split_images
from tests.vision.made import BLUE, GREEN, RED

IMAGE = {"type": "image"}


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def split(messages: Any, column: Any = None) -> tuple[list[Any], tuple[bytes, ...]]:
    return split_images(messages, column, lambda value: read_images(value, Path()))


def test_three_layouts_are_one() -> None:
    expected = user([text("is "), IMAGE, text(" as "), IMAGE, text("?")]), (RED, BLUE)
    assert split(user("is <image> as <image>?"), [RED, BLUE]) == expected
    assert split(user([text("is "), IMAGE, text(" as "), IMAGE, text("?")]), [RED, BLUE]) == expected
    own = [{"type": "image_url", "image_url": {"url": uri(data)}} for data in (RED, BLUE)]
    assert split(user([text("is "), own[0], text(" as "), own[1], text("?")])) == expected


def test_without_places_the_images_come_first() -> None:
    messages = [{"role": "system", "content": "s"}, *user("q"), {"role": "assistant", "content": "a"}, *user("r")]
    said, images = split(messages, [RED, BLUE])
    assert said == [messages[0], *user([IMAGE, IMAGE, text("q")]), *messages[2:]]
    assert images == (RED, BLUE)
    assert split(user([text("q")]), RED) == (user([IMAGE, text("q")]), (RED,))


def test_images_follow_in_the_order_of_their_places() -> None:
    """Over several messages, from a column and from the parts themselves."""
    own = {"type": "image", "image": {"bytes": GREEN, "path": None}, "text": None}
    messages = [*user("<image>a"), {"role": "assistant", "content": "b"}, *user([own, text("c"), IMAGE])]
    said, images = split(messages, [RED, BLUE])
    assert images == (RED, GREEN, BLUE)
    assert said == [*user([IMAGE, text("a")]), messages[1], *user([IMAGE, text("c"), IMAGE])]


def test_keys_without_a_value_are_left_out_as_parquet_adds_them() -> None:
    parts = [{"type": "text", "text": "q", "image": None}, {"type": "image", "text": None, "image": None}]
    assert split(user(parts), [RED]) == (user([text("q"), IMAGE]), (RED,))


@pytest.mark.parametrize(
    ("messages", "column", "counts"),
    [
        (user("<image><image>"), [RED], "1 images for 2"),
        (user("<image>"), [RED, BLUE], "2 images for 1"),
        (user("<image>"), [], "0 images for 1"),
        (user([IMAGE, text("q")]), None, "0 images for 1"),
        (user([{"type": "image_url", "image_url": uri(RED)}]), [BLUE], "1 images for 0"),
    ],
)
def test_more_and_fewer_places_than_images(messages: Any, column: Any, counts: str) -> None:
    with pytest.raises(ValueError, match=rf"expected an image for each <image> or image part, got {counts}"):
        split(messages, column)


def test_a_mark_is_text_where_there_is_no_column() -> None:
    assert split(user("write <image> in HTML")) == (user("write <image> in HTML"), ())
