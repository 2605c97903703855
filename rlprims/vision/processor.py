"""The processor of a model with vision: it renders messages with images, and expands each to its placeholder tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlprims._storage import local_copy
from rlprims.turns.tokens import Chat
from rlprims.vision.images import decode


def load_processor(path: str) -> Any:
    """The processor of a model by its type, for texts and images: without a processor of videos.

    Raises:
        ValueError: the type has no processor of images, or its files or packages are missing.
    """
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    path = local_copy(path, weights=False)
    try:
        config = AutoConfig.from_pretrained(path)
        if type(config) not in PROCESSOR_MAPPING:
            raise ValueError(f"the type {config.model_type} reads text alone, expected a type with images")
        return _for_images(PROCESSOR_MAPPING[type(config)]).from_pretrained(path)
    except Exception as error:  # of files, of packages that are missing, of a class that is unknown
        raise ValueError(f"model.path: no processor of images in {path!r}: {_line(error)}") from None


def _for_images(of_all: Any) -> Any:
    """The class without its ``video_processor``, which transformers loads only where torchvision is installed."""
    attributes = of_all.get_attributes()
    if "video_processor" not in attributes:
        return of_all
    at = attributes.index("video_processor")

    class ForImages(of_all):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in attributes if name != "video_processor"]

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            loaded = super()._get_arguments_from_pretrained(*args, **kwargs)
            return [*loaded[:at], None, *loaded[at:]]

    ForImages.__name__ = ForImages.__qualname__ = of_all.__name__
    return ForImages


def prompt(
    processor: Any,
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[bytes],
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """The rendered text of messages, with one placeholder for each image, and its ids, with each image's tokens.

    Messages have parts ``{"type": "image"}`` where the images are, in order. ``arguments`` are the template's.

    Raises:
        ValueError: the text has another number of placeholders than there are images, or the processor refuses one.
    """
    text = Chat(processor, arguments or {}, parts=True).text(messages, tools, generate=True)
    check_placeholders(processor, text, len(images))
    pictures = [decode(image) for image in images]
    try:
        ids = processor(text=[text], images=[pictures] if pictures else None, add_special_tokens=False)["input_ids"]
    except Exception as error:  # such as a ValueError for sides of 1 and 300 pixels
        raise ValueError(f"the model's processor refuses the images: {_line(error)}") from None
    return text, [int(token) for token in ids[0]]


def check_placeholders(processor: Any, text: str, images: int) -> None:
    """Raise a ValueError if a text has other placeholders than those of its images."""
    for kind, expected in (("image", images), ("video", 0), ("audio", 0)):
        token = getattr(processor, f"{kind}_token", None)
        if token and (found := text.count(token)) != expected:
            raise ValueError(f"expected {expected} placeholders {token} in the prompt, one for an {kind}, got {found}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
