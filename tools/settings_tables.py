"""Writes the tables of settings of docs/trainer.md and docs/stored_data.md: ``python -m tools.settings_tables``.

A table stands between ``<!-- settings: NAMES -->`` and ``<!-- end -->``, NAMES being settings or sections of settings.
Its words and defaults are those of the fields.
"""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlprims.algorithms import Algorithm, BoundFunction
from rlprims.execution import LoraConfig
from rlprims.fit.config import FitConfig
from rlprims.trainer.config import Config

DOCS = Path(__file__).parents[1] / "docs"
PAGES: dict[Path, type[BaseModel]] = {DOCS / "trainer.md": Config, DOCS / "stored_data.md": FitConfig}
BLOCK = re.compile(r"(<!-- settings: ([\w. ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CODE = re.compile(
    r"(?:\\\w+)?\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\[[a-z_, ]+\]|<\w+>|\b\w+/\*[.\w]+|\b[A-Za-z]\w*(?:[._/@]\w+)+"
    r"|\b[a-z]+_\w+|\b\w+/(?!\w)|\b[a-z]+: (?:true|false|local|ray|sdpa)\b(?!\.)"
)
"""Names, paths and values in a description, which stand as code on the page."""
MORE = {
    "stream": "execution.md#each-group-as-it-is-ready",
    "max_staleness": "execution.md#when-batches-are-sampled",
    "old_groups.share": "execution.md#groups-that-are-trained-on-again",
    "algorithm": "algorithms.md",
    "audit": "audit.md",
    "model.teacher": "distillation.md",
    "model.reward": "rewards.md#a-reward-model",
    "model.lora": "execution.md#lora",
    "model.vision": "vision.md",
    "model.device": "execution.md#on-a-gpu",
    "model.packing": "execution_inside.md#without-padding",
    "model.fused_head": "execution_inside.md#large-vocabularies",
    "model.replay_routes": "execution_inside.md#mixtures-of-experts",
    "data.train": "your_data.md",
    "checkpoint.copy_to": "trainer.md#where-things-live",
    "data.teacher_template": "distillation.md",
    "data.environment": "agents.md",
    "verifier": "rewards.md",
    "rewards": "rewards.md",
    "scoring.workers": "rewards.md",
    "execution": "execution.md",
    "ray.init": "execution.md#start-a-run",
    "ray.pools": "execution.md#pools-and-roles",
    "ray.colocate": "execution.md#one-device-for-rank-and-engine",
    "ray.weight_transfer": "execution_inside.md#how-weights-reach-the-engines",
    "ray.running_requests": "execution.md#groups-that-go-on-through-updates",
    "ray.training_timeout": "execution_failures.md",
    "ray.shard_over": "execution.md#what-to-set",
    "ray.training_tensor_parallel": "execution.md#what-to-set",
    "replay": "agents.md#the-same-episodes-again",
    "profile.steps": "execution_inside.md#a-profile",
    "loss": "stored_data.md",
}
"""Where the site says more of a setting."""


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its dotted name; sections are not settings, except adapters, which need not be there."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner not in (Algorithm, BoundFunction):
            yield from settings(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field
            if inner == LoraConfig | None:
                yield from settings(LoraConfig, f"{prefix}{name}.")


def table(section: type[BaseModel], names: list[str], page: str) -> str:
    """The rows of the named settings and sections, in their order."""
    known = dict(settings(section))
    lines = ["| setting | default | |", "|---|---|---|"]
    for wanted in names:
        rows = [name for name in known if name == wanted or name.startswith(f"{wanted}.")]
        if not rows:
            raise ValueError(f"{page}: no setting {wanted}")
        lines += [f"| `{name}` | {default(known[name])} | {meaning(name, known[name], page)} |" for name in rows]
    return "\n".join(lines)


def default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BoundFunction):
        return str(value)
    if value is None or isinstance(value, bool | list | tuple | dict):
        text = json.dumps(value)
        return f"`{text}`" if "<" in text else text
    return str(value)


def meaning(name: str, field: FieldInfo, page: str) -> str:
    """Its description, after the values that it can have if the description does not name them."""
    text = " ".join(inspect.cleandoc(field.description or "").split())
    if missing := [value for value in choices(field.annotation) if not re.search(rf"\b{value}\b", text)]:
        values = [str(value) for value in choices(field.annotation)]
        listed = f"{', '.join(values[:-1])} or {values[-1]}" if missing and len(values) > 1 else values[0]
        text = f"{listed}; {text}" if text else listed
    text = CODE.sub(r"`\g<0>`", text).replace("|", "\\|")
    place = MORE.get(name, "").removeprefix(page)
    return f"{text}. [More]({place})" if place else text


def choices(annotation: Any) -> list[Any]:
    """The values of a Literal, also of one that may be None."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for inner in get_args(annotation) if get_origin(inner) is Literal for value in get_args(inner)]


def page(path: Path) -> str:
    """The text of the page with its tables as they should be."""
    section = PAGES[path]
    return BLOCK.sub(lambda m: f"{m[1]}{table(section, m[2].split(), path.name)}\n{m[3]}", path.read_text())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
