"""The settings that all kinds of runs share, and their files: YAML, dotted overrides, errors that name the fix."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlprims.algorithms import merge
from rlprims.execution import ModelConfig, OptimizerConfig, ProfileConfig


class Section(BaseModel):
    """A section of settings: frozen, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Settings = TypeVar("Settings", bound=Section)


def check_template(template: str, field: str) -> str:
    """``template``, if it is "chat" or has ``field`` in it."""
    if template != "chat" and field not in template:
        raise ValueError(f"expected text with {field} in it, or chat")
    return template


class EvaluationSteps(Section):
    """The steps of a run after which it is evaluated."""

    every: int = Field(default=50, ge=1, description="steps")
    before_training: bool = True


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=1, description="steps; the last step is always saved")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that are kept")
    hugging_face: Literal["every", "last"] = Field(
        default="last",
        description="checkpoints of ranks in which policy/ is written besides the shards; last: the checkpoint at the "
        "end of the run, and the best. One process always writes it",
    )


class RunConfig(Section):
    """The settings that every kind of run has."""

    run_dir: Path = Field(description="where everything is written; it must not exist yet")
    modules: Path | None = Field(
        default=None, description="folder of modules that settings name; default for a YAML file: its own folder"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationSteps = EvaluationSteps()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_to: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), description="in addition to metrics.jsonl")
    profile: ProfileConfig = ProfileConfig()
    threads: int = Field(default=1, ge=1, description="torch's threads on the CPU")

    @field_validator("log_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_as(kind: type[Settings], path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file, with overrides ``key.subkey=value``.

    A file may begin with ``extends: other.yaml``, a path relative to it, and changes the settings of that file; its
    ``algorithm`` replaces the other's as a whole. The file can name modules in its own folder. This folder is searched
    after all installed packages, so that no file in it replaces a package, and ``modules`` stores it for a resume.

    Raises:
        ValueError: the file or an override is wrong. The message has one line per mistake. Nothing has run yet.
    """
    values = read_yaml(path)
    for override in overrides:
        _set(values, override)
    modules = str(values.setdefault("modules", str(path.parent.resolve())))
    if modules not in sys.path:
        sys.path.append(modules)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in _lines(error, kind))) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a file and of those that it extends.

    Raises:
        ValueError: there is no such file, or it is not a YAML mapping.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of settings, such as 'steps: 100'")
    base = values.pop("extends", None)
    if base is None:
        return values
    if (path.parent / base).resolve() == path.resolve():
        raise ValueError(f"{path}: extends itself")
    whole = {key: values[key] for key in ("algorithm", "loss") if key in values}
    changes = {key: value for key, value in values.items() if key not in whole}
    merged: dict[str, Any] = merge(read_yaml(path.parent / base), changes)
    return merged | whole


def _set(values: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ValueError(f"override {override!r}: write key.subkey=value")
    *parents, last = dotted.split(".")
    for key in parents:
        inner = values.get(key)
        # `algorithm: dapo` and `advantage: rlprims.advantage.rloo` are short forms of mappings.
        short = {"preset": inner} if key == "algorithm" else {"fn": inner}
        values[key] = dict(inner) if isinstance(inner, dict) else short if isinstance(inner, str) else {}
        values = values[key]
    values[last] = yaml.safe_load(text)


def _lines(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    lines = []
    for e in error.errors():
        place = ".".join(str(part) for part in e["loc"])
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            message = f"unknown; {suggest(str(e['loc'][-1]), _fields(e['loc'][:-1], kind))}"
        elif e["type"] == "missing":
            message = f"is missing: write {e['loc'][-1]}: ..."
        elif "input" in e and not isinstance(e["input"], dict):
            message += f", not {e['input']!r}"
        lines += [f"{place}: {part}" if place else part for part in message.splitlines()]
    return lines


def _fields(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    section: Any = kind
    for name in location:
        if isinstance(name, int):  # an index of a list
            continue
        annotation = section.model_fields[str(name)].annotation
        section = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields"))
    return list(section.model_fields)


def suggest(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(known))}"
