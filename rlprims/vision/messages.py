"""Messages with images in the layouts of TRL, verl and OpenAI: bare parts in order, and the images apart from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlprims.turns.tokens import is_image_part
from rlprims.vision.images import KEYS, Place, read_images

MARK = "<image>"
"""The place of an image in a text, as in verl's rows."""
_PART = {"type": "image"}


def split_images(messages: Sequence[Any], column: Any, place: Place) -> tuple[list[Any], tuple[bytes, ...]]:
    """The messages with ``{"type": "image"}`` where an image is, and the images in their order.

    A part has its image itself, or it takes the next one of ``column``, as a mark ``<image>`` does. If there are no
    parts and marks, the images of the column come before the text of the user's first message.

    Raises:
        ValueError: the column has more or fewer images than there are places for, or an image cannot be read.
    """
    given, found = read_images(column, place), list[bytes | None]()
    said = [_split(message, found, place, has_marks=bool(given)) for message in messages]
    if given and not found:
        first = next((i for i, each in enumerate(said) if isinstance(each, Mapping) and each.get("role") == "user"), 0)
        said[first] = {**said[first], "content": [*[_PART] * len(given), *_parts(said[first].get("content"))]}
        found = [None] * len(given)
    if (places := found.count(None)) != len(given):
        raise ValueError(f"expected an image for each {MARK} or image part, got {len(given)} images for {places}")
    rest = iter(given)
    return said, tuple(next(rest) if image is None else image for image in found)


def without_images(messages: Iterable[Any]) -> list[Any]:
    """The messages with their other parts."""
    return [
        {**each, "content": [part for part in each["content"] if part != _PART]} if _has_parts(each) else each
        for each in messages
    ]


def _split(message: Any, found: list[bytes | None], place: Place, *, has_marks: bool) -> Any:
    """The message with bare parts. ``found`` gets the image of each, or None if it is in the column."""
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    if has_marks and isinstance(content, str) and MARK in content:
        first, *others = content.split(MARK)
        found += [None] * len(others)
        return {**message, "content": [*_parts(first), *(part for text in others for part in (_PART, *_parts(text)))]}
    if not _has_parts(message):
        return message
    parts = []
    for part in message["content"]:
        if is_image_part(part):
            has_own = any(part.get(key) is not None for key in KEYS)
            found.append(read_images(part, place)[0] if has_own else None)
            part = _PART
        elif isinstance(part, Mapping):  # parquet gives every part all keys
            part = {key: value for key, value in part.items() if value is not None}
        parts.append(part)
    return {**message, "content": parts}


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
