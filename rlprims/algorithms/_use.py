"""A primitive with bound hyperparameters, for one stage of an :class:`Algorithm`."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, SupportsIndex, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from torch import Tensor

import rlprims
from rlprims._imports import FileError, file_of, imported
from rlprims._near import near
from rlprims.trajectories import by_trajectory


class BoundFunction(BaseModel):
    """A function and the hyperparameters bound to it; made by :func:`use`.

    In YAML or JSON it is the import path, ``rlprims.advantage.rloo``, or a mapping,
    ``{fn: rlprims.advantage.grpo, ddof: 0}``; the printed form ``advantage.rloo`` is accepted too.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True, extra="forbid")

    fn: Callable[..., Any]
    bound: tuple[tuple[str, Any], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _from_path_or_mapping(cls, value: Any) -> Any:
        if isinstance(value, str) or callable(value):
            value = {"fn": value}
        if not isinstance(value, Mapping) or "bound" in value:
            return value
        if "fn" not in value:
            raise ValueError(f"expected 'fn', the import path of a function, got only {sorted(value)}")
        fn = import_path(value["fn"]) if isinstance(value["fn"], str) else value["fn"]
        return {"fn": fn, "bound": tuple((k, v) for k, v in value.items() if k != "fn")}

    @model_validator(mode="after")
    def _check_names_and_types(self) -> "BoundFunction":
        if not hasattr(self.fn, "__qualname__"):
            raise ValueError(f"expected a function or a class, with the hyperparameters beside it, got {self.fn!r}")
        hints = _hyperparameters(self.fn)
        checked = []
        for name, value in self.bound:
            if name not in hints:
                meant = near(name, hints)
                suggestion = f"did you mean {meant!r}?" if meant else f"it takes {sorted(hints) or 'none'}"
                raise ValueError(f"{self.path} has no hyperparameter {name!r}: {suggestion}")
            try:
                valid = TypeAdapter(hints[name]).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ValueError(f"{self.path}: {name}={value!r} has the wrong type: {reason}") from None
            if isinstance(value, bool) and not isinstance(valid, bool):
                raise ValueError(f"{self.path}: {name}={value!r} has the wrong type: expected a number")
            checked.append((name, valid))
        object.__setattr__(self, "bound", tuple(sorted(checked)))
        return self

    @model_serializer
    def _to_path_or_mapping(self, info: SerializationInfo) -> Any:
        if info.mode == "python":  # in memory a function needs no path
            return {"fn": self.fn, **dict(self.bound)}
        if not _is_importable(self.fn):
            raise ValueError(f"{self.path} cannot be imported, expected a function of a module: define it in a module")
        return {"fn": self.path, **dict(self.bound)} if self.bound else self.path

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """For pickle: a function of a file goes by its path, as its module has no name in another process."""
        if file_of(self.fn):
            return BoundFunction.model_validate, ({"fn": self.path, **dict(self.bound)},)
        return super().__reduce_ex__(protocol)

    @property
    def path(self) -> str:
        """The shortest public path from which it can be imported."""
        return _public_path(self.fn)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Every hyperparameter with its bound or default value."""
        parameters = inspect.signature(self.fn).parameters
        defaults = {name: parameters[name].default for name in _hyperparameters(self.fn)}
        return {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty} | dict(self.bound)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the data that it requires."""
        return frozenset(name for name, required in _data(self.fn).items() if required)

    @property
    def unbound(self) -> frozenset[str]:
        """Hyperparameters that have neither a default nor a bound value."""
        return frozenset(_hyperparameters(self.fn)) - frozenset(self.hyperparameters)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same function and the same values, bound or by default."""
        if not isinstance(other, BoundFunction):
            return NotImplemented
        return self.fn == other.fn and self.hyperparameters == other.hyperparameters

    def __hash__(self) -> int:
        return hash((self.fn, frozenset(self.hyperparameters.items())))

    def __call__(self, data: Mapping[str, Any], **hyperparameters: Any) -> Any:
        """Call it with the entries of ``data`` that it names. With ``trajectory_ids`` its sequences are rollouts."""
        missing = sorted(self.needs - {name for name in data if data[name] is not None})
        if missing:
            meant = {name: near(name, missing) for name in sorted(data)}
            hint = "".join(f"; {name} is {here} here" for name, here in meant.items() if here)
            raise ValueError(f"{self.path}: expected {missing} in the batch, which has {sorted(data)}{hint}")
        arguments = {name: data[name] for name in _data(self.fn) if name in data} | dict(self.bound) | hyperparameters
        token_wise = "cu_seqlens" not in _data(self.fn) or getattr(self.fn, "token_wise", False)
        if token_wise or "trajectory_ids" in _data(self.fn) or data.get("trajectory_ids") is None:
            return self.fn(**arguments)
        ids_and_mask = {name: data[name] for name in ("trajectory_ids", "response_mask")}
        return by_trajectory(self.fn)(**arguments | ids_and_mask)

    def per_token(self, data: Mapping[str, Any], mask: Tensor) -> Tensor:
        """The result of a call, which must have one number per token.

        Raises:
            ValueError: it has another shape.
        """
        result: Tensor = self(data)
        if result.shape != mask.shape:
            raise ValueError(self.shape_error(result, mask))
        return result

    def shape_error(self, result: Tensor, mask: Tensor) -> str:
        return (
            f"{self.path} returned {tuple(result.shape)}, expected one number per token, {tuple(mask.shape)}: "
            "layout.expand_to_tokens(x, response_mask) repeats the numbers of responses"
        )

    def __str__(self) -> str:
        short = self.path.removeprefix("rlprims.")
        return f"{short}({', '.join(f'{k}={v!r}' for k, v in self.bound)})" if self.bound else short


def use(fn: Callable[..., Any] | str, **hyperparameters: Any) -> BoundFunction:
    """Bind hyperparameters (the parameters after ``*``) to a primitive. Data (those before) come from the batch.

    >>> from rlprims import losses
    >>> print(use(losses.clipped_surrogate, clip_high=0.28))
    losses.clipped_surrogate(clip_high=0.28)
    >>> use(losses.clipped_surrogate, cliphigh=0.28)
    Traceback (most recent call last):
    ...
    ValueError: rlprims.losses.clipped_surrogate has no hyperparameter 'cliphigh': did you mean 'clip_high'?
    """
    try:
        return BoundFunction.model_validate({"fn": fn, **hyperparameters})
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def import_path(path: str) -> Any:
    """The object at ``package.module.name``, or at ``/folder/file.py:name``.

    ``losses.x`` is of this library, unless you have a package ``losses``.

    >>> import_path("losses.token_mean") is import_path("rlprims.losses.token_mean")
    True
    """
    try:
        return imported(path)
    except FileError:
        raise
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        # If a module exists and cannot be imported, it is the user's module, and its own error is the useful one.
        absent = isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")
        if (absent or isinstance(error, AttributeError)) and path.partition(".")[0] in rlprims.__all__:
            with suppress(ImportError, AttributeError):
                return imported(f"rlprims.{path}")
        fix, name = "write it as package.module.function", path.rpartition(".")[2]
        paths = {each: f"{package}.{each}" for package in _PACKAGES for each in imported(f"rlprims.{package}.__all__")}
        if meant := near(name, paths):
            fix += f"; did you mean {paths[meant]}?"
        if "(" in path:
            fix = f"write {{fn: {path.partition('(')[0]}, name: value}}"
        reason = str(error) if path.rpartition(".")[0].strip(".") else "it names no module"
        raise ValueError(f"cannot import {path!r} ({reason}): {fix}") from None


_PACKAGES = ("advantage", "corrections", "filters", "losses", "rewards", "rewards.verifiers")


def _is_importable(fn: Callable[..., Any]) -> bool:
    try:
        return import_path(_public_path(fn)) is fn
    except ValueError:
        return False


@cache
def _public_path(fn: Callable[..., Any]) -> str:
    parts = fn.__module__.split(".")
    public = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for module in public if file_of(fn) is None else ():
        if getattr(importlib.import_module(module), fn.__name__, None) is fn:
            return f"{module}.{fn.__name__}"
    return file_of(fn) or f"{fn.__module__}.{fn.__qualname__}"


@cache
def _hyperparameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """Names after ``*`` and their types."""
    hints = get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
    parameters = inspect.signature(fn).parameters.values()
    return {p.name: hints.get(p.name, Any) for p in parameters if p.kind is p.KEYWORD_ONLY}


@cache
def _data(fn: Callable[..., Any]) -> dict[str, bool]:
    """Names before ``*``, and whether each is required."""
    parameters = inspect.signature(fn).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
