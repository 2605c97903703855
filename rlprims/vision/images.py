"""Images as rows have them, to encoded bytes: read, checked by decoding, and decoded again for the model."""

import base64
import io
import urllib.request
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlprims._extras import hint

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others, such as EPS, start programs
MOST_SIDE, MOST_BYTES = 16_384, 2**26  # the limit of an area is PIL.Image.MAX_IMAGE_PIXELS
KEYS = ("bytes", "image", "path", "url", "base64", "image_url")  # of an object that has an image; the first is read


def read_images(value: Any, folder: Path | None, *, http: bool = False) -> tuple[bytes, ...]:
    """The encoded images of a value, each checked by :func:`decode`: one image, or a list of them; none of null.

    An image is bytes, a data URI, an image of PIL, a path in the folder, if that is not None, or an object that has one
    under one of ``KEYS``; with ``http`` a url.
    """
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple(_checked(each, folder, http) for each in values)


def decode(image: Any) -> Any:
    """The RGB image of bytes or of PIL: turned by its EXIF data, without alpha channel, as transformers loads files.

    Raises:
        ValueError: no image of ``FORMATS``, or damaged, beyond the limits, animated, or not of 8 bits.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(f"images need Pillow: {hint('vision')}") from None
    try:
        with warnings.catch_warnings(action="ignore"):  # of large areas, which are refused here, and of alpha channels
            image = Image.open(io.BytesIO(image), formats=FORMATS) if isinstance(image, bytes) else image
            (width, height), most = image.size, Image.MAX_IMAGE_PIXELS or MOST_SIDE**2
            if not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE and width * height <= most):
                limits = f"1 to {MOST_SIDE} pixels on a side and at most {most} in all"
                raise ValueError(f"expected {limits}, got {width} x {height}")
            if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a photo and its preview
                raise ValueError(f"expected one frame, got {frames}: save one of them")
            if image.mode[0] in "IF":
                raise ValueError(f"expected 8 bits for a channel, got mode {image.mode}: save it with 8 bits")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Image.UnidentifiedImageError:
        raise ValueError(f"expected an image ({', '.join(FORMATS)}), got other or damaged data") from None
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


_check = lru_cache(maxsize=32)(lambda data: decode(data) is None)  # the episodes of a group show the same images


def _checked(value: Any, folder: Path | None, http: bool) -> bytes:
    while isinstance(value, Mapping):
        key = next((key for key in KEYS if value.get(key) is not None), "")
        if not key:
            raise ValueError(f"expected an image under one of {', '.join(KEYS)}, got {sorted(value)}")
        is_text = key in ("bytes", "base64") and isinstance(value[key], str)
        value = f"data:;base64,{value[key]}" if is_text else value[key]
    name = value[:100] if isinstance(value, str) and not value.startswith("data:") else "in the row"
    try:
        data = _bytes(value, folder, http)
        if len(data) > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES} bytes, got more")
        _check(data)
        return data
    except (OSError, ValueError) as error:  # of files, of urllib, of base64
        reason = error.strerror if isinstance(error, OSError) else None
        raise ValueError(f"image {name}: {reason or ' '.join(str(error).split())}") from None


def _bytes(value: Any, folder: Path | None, http: bool) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if hasattr(value, "getexif"):  # of PIL
        decode(value).save(encoded := io.BytesIO(), "PNG")
        return encoded.getvalue()
    if not isinstance(value, str):
        raise ValueError(f"expected a path, bytes or a data URI, got {type(value).__name__}")
    if value.startswith("data:"):
        return base64.b64decode(value.partition(";base64,")[2], validate=True)
    if folder is None:
        raise ValueError("nothing is opened or fetched: expected bytes, a data URI or an image of PIL")
    if value.startswith(("http://", "https://")):
        if not http:
            raise ValueError("nothing is fetched: set data.images_from: http, or save the file")
        with urllib.request.urlopen(value, timeout=30) as response:
            return bytes(response.read(MOST_BYTES + 1))
    path = folder / value.removeprefix("file://")
    if not path.is_file():  # a device has no end
        raise ValueError(f"no such file in {folder}")
    with path.open("rb") as file:
        return file.read(MOST_BYTES + 1)
