"""Messages of environments with images: read, checked, and rendered by the model's processor."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlprims.environments import ChatRenderer, Message
from rlprims.turns.tokens import checked_messages, images_in
from rlprims.vision.images import read_images
from rlprims.vision.messages import with_images
from rlprims.vision.processor import Expanding


class ImageRenderer(ChatRenderer):
    """Renders one episode by a processor. ``images`` are those of the first messages that are not in their parts."""

    def __init__(self, processor: Any, images: Sequence[bytes], **how: Any) -> None:
        super().__init__(processor.tokenizer, **how)
        self.processor, self.images = processor, images

    def read_images(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with each image as bytes in its part; nothing is opened or fetched."""
        checked = checked_messages([dict(message) for message in messages], "messages", images=True)
        given, self.images = self.images, ()
        return with_images(checked, given or None, partial(read_images, folder=None))

    def _reader(self, messages: Sequence[Message]) -> Any:
        return Expanding(self.processor, images_in(messages))
