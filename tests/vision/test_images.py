"""Images are read as rows have them, and whatever is wrong with one is an error of one line."""

import base64
import functools
import http.server
import io
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rlprims.vision import images
from rlprims.vision.images import FORMATS, decode, read_images
from tests.vision.made import BLUE, GREEN, RED, encoded, picture

HERE = Path()


def test_one_image_in_every_form(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    text = base64.b64encode(RED).decode()
    uri = f"data:image/png;base64,{text}"
    absolute = str(tmp_path / "red.png")
    forms: list[Any] = ["red.png", absolute, f"file://{absolute}", RED, bytearray(RED), uri]
    forms += [{"bytes": RED, "path": "name.png"}, {"bytes": None, "path": "red.png"}, {"bytes": text}, {"url": uri}]
    forms += [{"image": RED}, {"base64": text}, {"type": "image_url", "image_url": {"url": uri}}, {"image_url": uri}]
    for form in forms:
        assert read_images(form, tmp_path) == (RED,), form
    assert read_images([RED, "red.png", {"bytes": BLUE}], tmp_path) == (RED, RED, BLUE)
    assert read_images(None, tmp_path) == read_images([], tmp_path) == ()


def test_an_image_of_pil_becomes_a_png_without_loss() -> None:
    image = picture("white", 3, 2)
    image.putpixel((1, 0), (10, 200, 30))
    (data,) = read_images(image, HERE)
    assert data.startswith(b"\x89PNG")
    assert list(Image.open(io.BytesIO(data)).get_flattened_data()) == list(image.get_flattened_data())


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    image = decode(encoded(picture((200, 0, 0)), form))
    assert image.mode == "RGB"
    assert image.size == (32, 32)
    assert abs(image.getpixel((5, 5))[0] - 200) <= 3


def test_modes_become_rgb() -> None:
    grey, palette = picture("red").convert("L"), picture("red").convert("P")
    clear = Image.new("RGBA", (2, 2), (255, 0, 0, 0))  # as transformers: the colour below, not the background
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(encoded(clear)).getpixel((0, 0)) == (255, 0, 0)
        assert decode(encoded(palette)).getpixel((0, 0)) == (255, 0, 0)
        assert decode(encoded(grey)).getpixel((0, 0)) == (76, 76, 76)  # 0.299 of 255


def test_a_photo_is_turned_as_its_exif_data_say() -> None:
    image, exif = picture("red", 4, 2), Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    assert decode(encoded(image, "JPEG", exif=exif)).size == (2, 4)


def test_of_a_photo_with_a_second_picture_in_its_file_the_first_is_read() -> None:
    """As phones write them: a JPEG, with a preview or a map of depths after it."""
    data = encoded(picture("red"), "MPO", save_all=True, append_images=[picture("blue")])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert decode(data).getpixel((0, 0))[0] > 250


def gif() -> bytes:
    return encoded(picture("red"), "GIF", save_all=True, append_images=[picture("blue")])


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")


WRONG = {
    "an empty file": (b"", r"expected an image \(PNG, JPEG"),
    "a text": (b"hello", r"expected an image \(PNG, JPEG"),
    "a page of PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "got other or damaged data"),
    "half a PNG": (RED[: len(RED) // 2], "truncated|damaged"),
    "half a JPEG": (encoded(picture("red", 300, 300), "JPEG")[:1500], "truncated"),
    "a side of 20,000 pixels": (encoded(picture("red", 20_000, 1)), "16384 pixels on a side .*, got 20000 x 1"),
    "an area beyond Pillow's limit": (bomb(16_000, 16_000), r"89478485 in all, got 16000 x 16000|exceeds limit"),
    "a decompression bomb": (bomb(10**9, 10**9), "exceeds limit|got 1000000000 x 1000000000"),
    "no pixels": (bomb(0, 5), "damaged|got 0 x 5|expected an image"),
    "animated": (gif(), "expected one frame, got 2"),
    "16 bits of grey": (encoded(Image.new("I;16", (4, 4), 40_000)), "8 bits for a channel, got mode I;16"),
    "a path that is none": ("none.png", "image none.png: no such file"),
    "a folder": (".", "image .: no such file"),
    "a device": ("/dev/zero", "image /dev/zero: no such file"),
    "a path with a zero": ("a\0b", "image a\0b: "),
    "a data URI without data": ("data:image/png,xyz", "expected an image"),
    "a data URI of other letters": ("data:image/png;base64,!!!!", "image in the row: "),
    "an url": ("https://example.org/a.png", "nothing is fetched: set data.images_from: http"),
    "an object without an image": ({"name": "a"}, r"expected an image under one of bytes, image, .*, got \['name'\]"),
    "a number": (3, "expected a path, bytes or a data URI, got int"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_image_is_one_line(name: str, tmp_path: Path) -> None:
    value, message = WRONG[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=message) as found:
            read_images([RED, value], tmp_path)
    assert "\n" not in str(found.value)


def test_a_large_file_is_refused_before_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large.png").write_bytes(RED + bytes(100))
    monkeypatch.setattr(images, "MOST_BYTES", len(RED) + 99)
    with pytest.raises(ValueError, match=r"image large\.png: expected at most"):
        read_images("large.png", tmp_path)


@given(st.integers(0, 2**32), st.sampled_from([RED, encoded(picture("red"), "JPEG"), gif(), bomb(9, 9)]))
def test_damaged_bytes_are_an_image_or_an_error(seed: int, data: bytes) -> None:
    damaged = bytearray(data)
    for at in range(3):
        damaged[(seed >> (9 * at)) % len(damaged)] ^= 1 << (seed % 8)
    try:
        found = decode(bytes(damaged)).mode
    except ValueError as error:
        found = str(error)
    assert "\n" not in found


@given(st.binary(max_size=60))
def test_a_file_that_is_an_image_and_something_else_is_the_image(tail: bytes) -> None:
    assert decode(RED + b"PK\x03\x04" + tail).getpixel((0, 0)) == (255, 0, 0)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "green.png").write_bytes(GREEN)
    handler = functools.partial(_Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def test_urls_are_fetched_if_the_settings_say_so(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_images(f"{server}/green.png", HERE, http=True) == (GREEN,)
    with pytest.raises(ValueError, match=re.escape(f"image {server}/none.png: ")):
        read_images(f"{server}/none.png", HERE, http=True)
    monkeypatch.setattr(images, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="expected at most 10 bytes"):
        read_images(f"{server}/green.png", HERE, http=True)


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ValueError, match=r"images need Pillow: pip install '\.\[vision\]'"):
        decode(RED)
