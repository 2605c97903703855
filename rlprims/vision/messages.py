"""Messages with images in the layouts of TRL, verl and OpenAI: bare parts in order, and the images apart from them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlprims.turns.tokens import has_image_parts, is_image_part
from rlprims.vision.images import KEYS, read_images
from rlprims.vision.processor import image_token, load_processor

MARK = "<image>"  # the place of an image in a text of verl's rows
_PART = {"type": "image"}


def images_of_row(
    asked: Any, row: Mapping[str, Any], config: Any, tokenizer: Any, folder: Path
) -> tuple[Any, tuple[bytes, ...], Any]:
    """The messages of a row with bare image parts, the images in their order, and the model's processor.

    ``asked`` is a text or messages, which a row without images keeps. ``config`` are the settings of rows.
    """
    column = config.images_in(row)
    if not (column or has_image_parts(asked) or (column == [] and MARK in str(asked))):
        marks = [MARK] * bool(config.images and "image" in row) + [image_token(tokenizer.name_or_path)]
        for mark in (mark for mark in marks if mark and mark in str(asked)):
            raise ValueError(f"the text has {mark}, the place of an image, and the row no image: see data.images")
        return asked, (), None
    processor = load_processor(tokenizer.name_or_path)
    if isinstance(asked, str) and config.template != "chat":
        raise ValueError(f"the row has images, expected data.template: chat, got {config.template!r}")
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    read = partial(read_images, folder=folder, http=config.images_from == "http")
    return *split_images(messages, column, read), processor


def split_images(messages: Sequence[Any], column: Any, read: Callable[[Any], Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The messages with ``{"type": "image"}`` where an image is, and the images in their order.

    A part has its image itself, or it takes the next one of ``column``. So do marks ``<image>``, unless there is no
    column, None. Without parts and marks the images of the column come before the text of the user's first message.
    """
    given, found = read(column), list[bytes | None]()
    said = [_split(message, found, read, has_marks=column is not None) for message in messages]
    if given and not found:
        first = next((i for i, each in enumerate(said) if isinstance(each, Mapping) and each.get("role") == "user"), 0)
        said[first] = {**said[first], "content": [*[_PART] * len(given), *_parts(said[first].get("content"))]}
        found = [None] * len(given)
    if (places := found.count(None)) != len(given):
        raise ValueError(f"expected an image for each {MARK} or image part, got {len(given)} images for {places}")
    rest = iter(given)
    return said, tuple(next(rest) if image is None else image for image in found)


def with_images(messages: Sequence[Any], column: Any, read: Callable[[Any], Any]) -> list[Any]:
    """The messages of :func:`split_images` with each image in its part: ``{"type": "image", "image": bytes}``."""
    said, images = split_images(messages, column, read)
    rest = iter(images)
    for message in said:
        if isinstance(parts := message["content"], list):
            message["content"] = [{**part, "image": next(rest)} if is_image_part(part) else part for part in parts]
    return said


def _split(message: Any, found: list[bytes | None], read: Callable[[Any], Any], *, has_marks: bool) -> Any:
    """The message with bare parts. ``found`` gets the image of each, or None if it is in the column."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if has_marks and isinstance(content, str) and MARK in content:
        content = [part for text in content.split(MARK) for part in (_PART, *_parts(text))][1:]
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if is_image_part(part):
            found.append(read(part)[0] if any(part.get(key) is not None for key in KEYS) else None)
            part = _PART
        elif isinstance(part, Mapping):  # parquet gives every part all keys
            part = {key: value for key, value in part.items() if value is not None}
        parts.append(part)
    return {**message, "content": parts}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
