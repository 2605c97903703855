"""The settings that all kinds of runs share, and their files: YAML, dotted overrides, errors that name the fix."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from rlprims._imports import absolute
from rlprims._near import near, suggest
from rlprims.algorithms import merge
from rlprims.execution import ModelConfig, OptimizerConfig, ProfileConfig


class Section(BaseModel):
    """A section of settings: frozen, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_REFERENCE = re.compile(r"(?<!\\)\$\{(?:oc\.env:(\w+)(?:,([^{}]*))?|([^{}]*))\}")
Settings = TypeVar("Settings", bound=Section)
Place = Annotated[str, BeforeValidator(lambda path: str(path) if isinstance(path, Path) else path)]  # or a url


class EvaluationSteps(Section):
    """The steps of a run after which it is evaluated."""

    every: int = Field(default=50, ge=1, description="steps between two evaluations")
    before_training: bool = Field(default=True, description="evaluate before the first step")


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=1, description="steps between two checkpoints; the last step is always saved")
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints that are kept")
    hugging_face: Literal["every", "last"] = Field(
        default="last",
        description="on ranks, checkpoints in which policy/ is written beside the shards. last: that at the end of "
        "the run, and the best. One process always writes it",
    )
    copy_to: str | None = Field(default=None, pattern="://", description="url to which checkpoints are copied")


class RunConfig(Section):
    """The settings that every kind of run has."""

    of_another_command: ClassVar[tuple[str, str]]
    """A setting that this kind does not have, and the command whose settings it is of."""

    run_dir: Path = Field(description="where everything is written; it must not exist yet")
    modules: tuple[Path, ...] = Field(
        default=(),
        description="folders of modules that settings name; []: that of the file, then those of the files it extends",
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="of samples, and of the order of rows and mini-batches")
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationSteps = EvaluationSteps()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_to: tuple[str, ...] = Field(default=(), description="loggers beside metrics.jsonl, by name or class")
    metric_names: Literal["verl", "trl"] | None = Field(
        default=None, description="whose names loggers get for metrics of the same meaning; metrics.jsonl keeps ours"
    )
    profile: ProfileConfig = ProfileConfig(steps=())
    threads: int = Field(default=1, ge=1, description="torch's threads on the CPU")
    deterministic: bool = Field(
        default=False,
        description="on a GPU, the same settings give the same bits: slower, and only with execution: local; a CPU "
        "always does",
    )

    @model_validator(mode="after")
    def _can_be_deterministic(self) -> "RunConfig":
        if self.deterministic and getattr(self, "execution", "local") != "local":
            raise ValueError("deterministic: true needs execution: local, and got ray: leave it out")
        return self

    @field_validator("log_to", "modules", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    @field_validator("log_to")
    @classmethod
    def _whole_paths(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(absolute(name) for name in names)

    def to_yaml(self) -> str:
        import yaml

        text = json.dumps(self.model_dump(mode="json")).replace("${", r"\\${")  # no references when it is read again
        return yaml.safe_dump(json.loads(text), sort_keys=False)


def load_as(kind: type[Settings], path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings of a YAML file, with overrides ``key.subkey=value``.

    A file may begin with ``extends: other.yaml``, a path relative to it, and changes those settings; an ``algorithm``
    replaces the other's as a whole. It can name modules in its own folder and in those of the files that it extends,
    searched in this order after all installed packages, which no file replaces; ``modules`` stores them for a resume.
    ``${key.subkey}``, ``${oc.env:NAME,default}`` and the text ``\\${`` mean what they mean in OmegaConf.
    """
    values = read_yaml(path)
    for override in overrides:
        _set(values, override)
    named = [values["modules"]] if isinstance(values["modules"], str) else values["modules"]
    folders = values["modules"] = resolved(named, values, str(path), "modules")
    values = resolved(values, values, str(path), "")
    sys.path += [folder for folder in folders if folder not in sys.path]
    setting, command = getattr(kind, "of_another_command", ("", ""))
    if setting in values:
        raise ValueError(f"{path}: {setting} is a setting of rlprims {command}: run rlprims {command} {path}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        searched = f"; searched: installed packages, {', '.join(folders)}"
        lines = [line + searched * ("No module named" in line) for line in _lines(error, kind)]
        raise ValueError("\n".join(f"{path}: {line}" for line in lines)) from None


def read_yaml(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The settings of a file and of those that it extends."""
    import yaml  # of the extra train; lab reads rows without it

    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of settings, such as 'steps: 100'")
    base, own = values.pop("extends", None), str(path.parent.resolve())
    files = (*extending, path.resolve())
    if base is not None and (path.parent / base).resolve() in files:
        raise ValueError(f"{path}: extends {base}, which extends it")
    extended = read_yaml(path.parent / base, files) if base is not None else {"modules": []}
    folders = values.pop("modules", None) or list(dict.fromkeys([own, *extended["modules"]]))
    whole = {key: values.pop(key) for key in ("algorithm", "loss") if key in values}
    whole["modules"] = [folders] if isinstance(folders, str) else folders
    return {**merge(extended, values), **whole}


def resolved(value: Any, settings: Mapping[str, Any], file: str, place: str) -> Any:
    """``value`` with what its references name, and whole paths of functions in files that are in ``modules``."""
    if isinstance(value, dict):
        return {key: resolved(each, settings, file, f"{place}.{key}".lstrip(".")) for key, each in value.items()}
    if not isinstance(value, str):
        return [resolved(each, settings, file, place) for each in value] if isinstance(value, list) else value

    def named(found: re.Match[str]) -> Any:
        variable, default, name = found.groups()
        try:
            if variable is not None:
                return os.environ[variable] if default is None else os.environ.get(variable, default)
            return resolved(reduce(getitem, name.split("."), settings), settings, file, place)
        except (KeyError, TypeError, RecursionError):
            raise ValueError(rf"{file}: {place}: {found[0]} names nothing, or itself; as a text: \{found[0]}") from None

    whole = _REFERENCE.fullmatch(value)
    text = named(whole) if whole else _REFERENCE.sub(lambda found: str(named(found)), value).replace(r"\${", "${")
    return absolute(text, settings.get("modules", ())) if isinstance(text, str) else text


def _set(values: dict[str, Any], override: str) -> None:
    import yaml

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
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"override {override!r}: not YAML: texts with braces or colons need quotes") from None


def _lines(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    lines = []
    for e in error.errors():
        place = ".".join(str(part) for part in e["loc"])
        message = e["msg"].removeprefix("Value error, ")
        if e["type"] == "extra_forbidden":
            message = f"unknown; {_meant(str(e['loc'][-1]), _fields(e['loc'][:-1], kind), kind)}"
        elif e["type"] == "missing":
            message = f"is missing: write {e['loc'][-1]}: ..."
        elif "input" in e and not isinstance(e["input"], dict) and not message.endswith("?"):
            message += f", not {e['input']!r}" * (not message.startswith(f"{e['input']}: "))
        lines += [f"{place}: {part}" if place else part for part in message.splitlines()]
    return lines


def _meant(name: str, known: list[str], kind: type[BaseModel]) -> str:
    """The setting that is meant: one of the same section, or of the same name in another."""
    if name in ("strategy", "actor_rollout_ref", "megatron"):
        return "of verl: docs/migration.md has its names, docs/decisions/0009-torch-shards-the-models.md has Megatron"
    elsewhere = [f"{section}.{name}" for section in kind.model_fields if name in _fields((section,), kind)]
    return f"did you mean {elsewhere[0]}?" if elsewhere and not near(name, known) else suggest(name, known)


def _fields(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    section: Any = kind
    for name in location:
        if name not in section.model_fields:  # an index of a list, or a key
            continue
        annotation = section.model_fields[name].annotation
        parts = (annotation, *getattr(annotation, "__args__", ()))
        section = next((part for part in parts if hasattr(part, "model_fields")), None)
    return list(section.model_fields) if section else []
