"""The images of rows as inputs of a model: pixels by its processor, and positions by the model's own function."""

from collections import OrderedDict
from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from rlprims.vision.images import decode

MOST_BYTES = 2**30
"""Bytes of the pixels that a :class:`Reader` keeps."""


def pixel_inputs(processor: Any, images: Sequence[bytes]) -> dict[str, Tensor]:
    """What the processor makes of the images of one row, such as ``pixel_values`` and ``image_grid_thw``."""
    if not images:
        return {}
    text = [processor.image_token * len(images)]
    pictures = [[decode(image) for image in images]]
    read = processor(text=text, images=pictures, return_tensors="pt", add_special_tokens=False)
    return {name: x for name, x in read.items() if isinstance(x, Tensor) and name not in _OF_TOKENS}


def model_inputs(
    model: Any, processor: Any, rows: Sequence[dict[str, Tensor]], input_ids: Tensor, attention_mask: Tensor
) -> dict[str, Tensor]:
    """The inputs of a forward pass besides tokens and mask (B, T), from :func:`pixel_inputs` of each row.

    Images follow each other in the order of the rows. ``position_ids`` (3, B, T) are there if the model has a function
    for them, and the type of each token (B, T) if the model reads it. ``model`` needs no data.
    """
    names, body = signature(model.forward).parameters, model.base_model
    seen = [row for row in rows if row]
    dim = int("pixel_attention_mask" in seen[0])  # of images in (1, N, 3, H, W)
    pixels = {name: joined([row[name] for row in seen], dim) for name in seen[0]}
    found = {name: x for name, x in pixels.items() if name in names}
    if typed := [name for name in ("token_type_ids", "mm_token_type_ids") if name in names]:
        types = torch.tensor(processor.create_mm_token_type_ids(input_ids.tolist()))
        found |= dict.fromkeys(typed, types)
    if hasattr(body, "get_rope_index"):
        grids = {name: x for name, x in pixels.items() if name == "image_grid_thw"}
        known: dict[str, Any] = {"mm_token_type_ids": types, "attention_mask": attention_mask, **grids}
        found["position_ids"] = body.get_rope_index(input_ids, **known)[0]
    return found


def joined(rows: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One tensor for the images of all rows. Images (..., H, W) that are smaller get zeros at the right and below.

    >>> joined([torch.ones(1, 3, 2, 1), torch.ones(2, 3, 1, 2)]).shape
    torch.Size([3, 3, 2, 2])
    """
    if rows[0].dim() < 4:
        return torch.cat(list(rows), dim)
    height, width = (max(x.shape[side] for x in rows) for side in (-2, -1))
    padded = [nn.functional.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in rows]
    return torch.cat(padded, dim)


class Reader:
    """The inputs for the images of rows. Pixels are kept by the images' content, :data:`MOST_BYTES` of them."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        self.kept: OrderedDict[tuple[bytes, ...], dict[str, Tensor]] = OrderedDict()
        self.bytes = 0

    def __call__(
        self, images: Sequence[tuple[bytes, ...] | None], input_ids: Tensor, attention_mask: Tensor
    ) -> dict[str, Tensor]:
        """Nothing if no row has an image: these rows are computed as those of a model of text."""
        rows = [self._pixels(tuple(row or ())) for row in images]
        if not any(rows):
            return {}
        return model_inputs(self.model, self.processor, rows, input_ids, attention_mask)

    def _pixels(self, images: tuple[bytes, ...]) -> dict[str, Tensor]:
        if images in self.kept:
            self.kept.move_to_end(images)
            return self.kept[images]
        found = self.kept[images] = pixel_inputs(self.processor, images)
        self.bytes += _bytes_of(found)
        while self.bytes > MOST_BYTES and len(self.kept) > 1:
            self.bytes -= _bytes_of(self.kept.popitem(last=False)[1])
        return found


_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def _bytes_of(pixels: dict[str, Tensor]) -> int:
    return sum(x.nbytes for x in pixels.values())
