"""The processor of a model with vision: it renders messages with images, and expands each to its placeholder tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from types import SimpleNamespace
from typing import Any

from rlprims._storage import local_copy
from rlprims.turns.tokens import Answered, Chat, encode, images_in, is_image_part
from rlprims.vision.images import decode


@cache
def load_processor(path: str) -> Any:
    """The processor of a model by its type, for texts and images.

    Raises:
        ValueError: the type has no processor of images, or its files or packages are missing.
    """
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    path = local_copy(path, weights=False)
    try:
        config = AutoConfig.from_pretrained(path)
        if type(config) not in PROCESSOR_MAPPING or not hasattr(config, "vision_config"):
            raise ValueError(f"the type {config.model_type} reads text alone")
        return _for_images(PROCESSOR_MAPPING[type(config)]).from_pretrained(path, video_processor=None)
    except Exception as error:  # of files, of packages that are missing, of a class that is unknown
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model.path: expected a model with a processor of images, got {path!r}: {reason}") from None


@cache
def image_token(path: str) -> str | None:
    """What stands for an image in a text; None for a model of texts."""
    try:
        return str(load_processor(path).image_token)
    except ValueError:
        return None


def _for_images(of_all: Any) -> Any:
    """The class without its processor of videos, which transformers loads only where torchvision is installed."""
    from transformers import ProcessorMixin

    class WithoutVideos(ProcessorMixin):  # type: ignore[misc]
        video_processor = SimpleNamespace(num_frames=None, fps=None)  # SmolVLM asks before it looks for a video

        def __init__(self, *args: Any, video_processor: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    names = [name for name in of_all.get_attributes() if name != "video_processor"]
    changes = {"get_attributes": classmethod(lambda cls: names)}
    return type(of_all.__name__, (of_all, WithoutVideos), changes)


def collapsed(ids: list[int], blocks: Sequence[list[int]], placeholder: int) -> list[int]:
    """The ids with one placeholder for each image, in the place of its block of tokens.

    >>> collapsed([5, 9, 9, 6, 9, 7], [[9, 9], [9]], 1)
    [5, 1, 6, 1, 7]
    """
    found, begin = list[int](), 0
    for number, block in enumerate(blocks):
        places = range(begin, len(ids) - len(block) + 1)
        place = next((i for i in places if ids[i : i + len(block)] == block), None)
        if place is None:
            raise ValueError(f"image {number} of the prompt: expected its {len(block)} tokens, got others")
        found += [*ids[begin:place], placeholder]
        begin = place + len(block)
    return found + ids[begin:]


def prompt(
    processor: Any, messages: Any, images: Sequence[bytes], tools: Any = None, arguments: Any = None
) -> tuple[str, list[int]]:
    """The rendered text of messages, with one placeholder for each image, and its ids, with each image's tokens.

    Messages have parts ``{"type": "image"}`` where the images are, in order. ``arguments`` are the template's.
    """
    text = Chat(processor, arguments or {}).text(messages, tools, generate=True)
    return text, [*expanded(processor, text, tuple(images))]


@lru_cache(maxsize=64)  # the episodes of a group begin with the same prompt
def expanded(processor: Any, text: str, images: tuple[bytes, ...]) -> tuple[int, ...]:
    """The ids of a text with one placeholder for each image, with each image's tokens."""
    for kind, expected in (("image", len(images)), ("video", 0), ("audio", 0)):
        token = getattr(processor, f"{kind}_token", None)
        if token and (found := text.count(token)) != expected:
            raise ValueError(f"expected {expected} placeholders {token} in the text, one for an {kind}, got {found}")
    pictures = [[decode(image) for image in images]] if images else None
    try:
        ids = processor(text=[text], images=pictures, add_special_tokens=False)["input_ids"]
    except Exception as error:  # such as a ValueError for sides of 1 and 300 pixels
        raise ValueError(f"the model's processor refuses the images: {' '.join(str(error).split())}") from None
    return tuple(int(token) for token in ids[0])


@dataclass(frozen=True)
class ImageChat(Chat):
    """Renders messages with a processor's template. In a text each image is the text of its tokens, in their order."""

    processor: Any = None
    images: Sequence[bytes] = ()

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, generate: bool = False) -> str:
        first, *others = self._rendering.text(messages, tools, generate=generate).split(self.processor.image_token)
        return first + "".join(block + part for block, part in zip(self._blocks, others, strict=False))

    def answered(self, messages: Sequence[Mapping[str, Any]], tools: Any, **how: Any) -> Answered:
        if any(is_image_part(part) for m in messages if m["role"] == "assistant" for part in m.get("content") or ()):
            raise ValueError("expected images in what others say, got one in an answer: it cannot be learned")
        whole = expanded(self.processor, self._rendering.text(messages, tools), tuple(self.images))
        if encode(self.tokenizer, self.text(messages, tools)) != [*whole]:
            raise ValueError("the model's processor makes other tokens of the chat than its tokenizer of the text")
        return super().answered(messages, tools, **how)

    @cached_property
    def _rendering(self) -> Chat:
        """Writes one placeholder for each image."""
        return Chat(self.processor, self.arguments)

    @cached_property
    def _blocks(self) -> list[str]:
        ids = [expanded(self.processor, self.processor.image_token, (image,)) for image in self.images]
        return [self.tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in ids]


class Expanding:
    """A processor in the place of a tokenizer, for texts with no placeholder or with one for each of these images."""

    def __init__(self, processor: Any, images: tuple[bytes, ...]) -> None:
        self.processor, self.images = processor, images

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor if name == "chat_template" else self.processor.tokenizer, name)

    def apply_chat_template(self, messages: Any, **how: Any) -> str:
        """The text of the messages; a ValueError if the template leaves out an image."""
        text: str = self.processor.apply_chat_template(messages, **how)
        if (found := text.count(self.processor.image_token)) < (expected := len(images_in(messages))):
            raise ValueError(f"it writes {found} of {expected} images")
        return text

    def encode(self, text: str, **_: Any) -> list[int]:
        images = self.images if self.processor.image_token in text else ()
        return [*expanded(self.processor, text, images)]
