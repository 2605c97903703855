"""The table of settings is the config, no more and no less."""

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from rlprims.algorithms import Algorithm, Use
from rlprims.trainer.config import Config

DOCS = Path(__file__).parents[2] / "docs" / "trainer.md"


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner not in (Algorithm, Use):
            yield from settings(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_setting_is_documented() -> None:
    table = DOCS.read_text().split("## Settings")[1].split("`algorithm` in full")[0]
    assert re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE) == list(settings(Config))
