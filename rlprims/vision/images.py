"""Images as rows of data have them, to encoded bytes: read, checked by decoding, and decoded again for the model."""

import base64
import binascii
import importlib
import io
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlprims._extras import hint

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow reads them by itself. For others, such as EPS, it starts programs."""
MOST_SIDE = 16_384
"""Pixels on a side of an image. ``PIL.Image.MAX_IMAGE_PIXELS`` is the limit of its area."""
MOST_BYTES = 64 * 2**20
"""Bytes of an encoded image."""
KEYS = ("bytes", "image", "path", "url", "base64", "image_url")
"""The keys under which an object has an image; the first that it has is read."""
_SECONDS = 30.0


class Place(NamedTuple):
    """Where images are that are not in the data."""

    folder: Path
    """Of the data file: paths are relative to it."""
    http: bool = False
    """Whether urls are fetched."""


def read_images(value: Any, place: Place) -> tuple[bytes, ...]:
    """The encoded images of a value, each decoded once as a check: one image, or a list of them; none of null.

    An image is a path, bytes, a data URI, an image of PIL, or an object that has one under one of ``KEYS``.

    Raises:
        ValueError: an image cannot be read, is beyond the limits, or is not used, see :func:`decode`.
    """
    if value is None:
        return ()
    encoded = []
    for each in value if isinstance(value, list | tuple) else [value]:
        data, name = _read(each, place)
        try:
            decode(data)
        except ValueError as error:
            raise ValueError(f"image {name}: {error}") from None
        encoded.append(data)
    return tuple(encoded)


def decode(data: bytes) -> Any:
    """The RGB image of PIL: turned as its EXIF data say, without its alpha channel, as transformers loads a file.

    Raises:
        ValueError: the bytes are no image of ``FORMATS``, or are damaged, beyond the limits, animated or not of 8 bits.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"expected at most {MOST_BYTES} bytes, got {len(data)}: make it smaller")
    image_module = _pillow()
    with _one_error(image_module), image_module.open(io.BytesIO(data), formats=FORMATS) as image:
        return _rgb(image, image_module)


def _rgb(image: Any, image_module: Any) -> Any:
    (width, height), most = image.size, image_module.MAX_IMAGE_PIXELS
    if min(width, height) < 1 or max(width, height) > MOST_SIDE or (most and width * height > most):
        limit = f"1 to {MOST_SIDE} pixels on a side" + f" and at most {most} in all" * bool(most)
        raise _RefusedError(f"expected {limit}, got {width} x {height}")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise _RefusedError(f"expected one frame, got {frames}: save one of them")
    if image.mode[0] in "IF":
        raise _RefusedError(f"expected 8 bits for each channel, got mode {image.mode}: save it with 8 bits")
    return importlib.import_module("PIL.ImageOps").exif_transpose(image).convert("RGB")


class _RefusedError(ValueError):
    """The image is sound, and is not used."""


@contextmanager
def _one_error(image_module: Any) -> Iterator[None]:
    """Raise a ValueError of one line for whatever Pillow raises; a damaged file can raise anything."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large areas, which are refused, and of transparency
            yield
    except _RefusedError:
        raise
    except image_module.UnidentifiedImageError:
        raise ValueError(f"expected an image ({', '.join(FORMATS)}), got other or damaged data") from None
    except image_module.DecompressionBombError as error:
        raise ValueError(f"expected at most {image_module.MAX_IMAGE_PIXELS} pixels: {error}") from None
    except Exception as error:
        raise ValueError(f"damaged: {' '.join(str(error).split())} ({type(error).__name__})") from None


def _pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise ValueError(f"images need Pillow: {hint('vision')}") from None
    return PIL.Image


def _read(value: Any, place: Place) -> tuple[bytes, str]:
    """The bytes, and a name of the image for messages."""
    if isinstance(value, Mapping):
        key = next((key for key in KEYS if value.get(key) is not None), None)
        if key is None:
            raise ValueError(f"expected an image under one of {', '.join(KEYS)}, got {sorted(value)}")
        return _read(f"data:;base64,{value[key]}" if key == "base64" else value[key], place)
    if isinstance(value, bytes | bytearray):
        return bytes(value), "in the row"
    if isinstance(value, str):
        return _from_text(value, place)
    if hasattr(value, "getexif"):  # of PIL
        encoded, image_module = io.BytesIO(), _pillow()
        with _one_error(image_module):
            _rgb(value, image_module).save(encoded, "PNG")
        return encoded.getvalue(), "in the row"
    raise ValueError(f"expected an image as a path, bytes or a data URI, got {type(value).__name__}")


def _from_text(text: str, place: Place) -> tuple[bytes, str]:
    if text.startswith("data:"):
        head, comma, content = text.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise ValueError("no ;base64,")
            return base64.b64decode(content, validate=True), "in the row"
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"expected data:image/...;base64,..., got {text[:40]!r}: {error}") from None
    if text.startswith(("http://", "https://")):
        return _fetched(text, place), text[:200]
    path = place.folder / text.removeprefix("file://")
    try:
        if not path.is_file():  # reading a device would not end
            raise ValueError(f"image {path}: no such file")
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1), str(path)
    except OSError as error:
        raise ValueError(f"image {path}: {error.strerror or error}") from None


def _fetched(url: str, place: Place) -> bytes:
    if not place.http:
        raise ValueError(f"image {url[:200]}: nothing is fetched: set data.images_from: http, or save the file")
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as response:
            data: bytes = response.read(MOST_BYTES + 1)
            return data
    except (OSError, ValueError) as error:  # URLError and timeouts are of OSError
        raise ValueError(f"image {url[:200]}: {' '.join(str(error).split())}") from None
