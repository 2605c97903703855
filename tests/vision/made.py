"""Pictures as files, and a model with vision whose processor is that of examples/dots: nothing is downloaded."""

import io
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from PIL import Image
from transformers import AutoTokenizer, Idefics3Config

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples" / "dots"))
from processor import PATCHES, build_processor  # noqa: E402 - of examples/dots


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def picture(colour: Any, *size: int) -> Image.Image:
    return Image.new("RGB", size or (32, 32), colour)


RED, GREEN, BLUE = (encoded(picture(colour)) for colour in ("red", "green", "blue"))


@cache
def model() -> Path:
    """A folder with the files that rows need of a model: config, tokenizer and processor."""
    folder = Path(mkdtemp())
    build_processor(64).save_pretrained(folder)
    Idefics3Config().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model())


__all__ = ["BLUE", "GREEN", "PATCHES", "RED", "ROOT", "build_processor", "encoded", "model", "picture", "tokenizer"]
