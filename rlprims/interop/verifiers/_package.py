"""The import of verifiers when it is first needed, and its environments, made once per process."""

import importlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from rlprims.algorithms import import_path


def package() -> Any:
    try:
        importlib.import_module("verifiers.envs.environment")  # removed in 0.4
        return importlib.import_module("verifiers")
    except ImportError as error:
        needed = "verifiers from 0.1.14 to 0.3.1"
        raise ImportError(f"interop.verifiers needs {needed} ({error}): pip install verifiers==0.3.1") from None


_LOADING = threading.Lock()


@cache
def _made(name: str, options: str) -> Any:
    vf, arguments = package(), json.loads(options)
    with _without_signal_handlers():
        made = import_path(name)(**arguments) if "." in name else vf.load_environment(name, **arguments)
    if not isinstance(made, vf.Environment):
        raise TypeError(f"{name}: expected an environment of verifiers, got {type(made).__name__}")
    if made.requires_group_rollouts:
        raise ValueError(f"the rubric of {name} compares the rollouts of a group, expected one for single rollouts")
    return made


def loaded(name: str, split: str, options: str) -> tuple[Any, Any]:
    """The environment and its data, made once in the process."""
    with _LOADING:
        made = _made(name, options)
        return made, made.get_dataset() if split == "train" else made.get_eval_dataset()


@contextmanager
def _without_signal_handlers() -> Iterator[None]:
    """Disable signal handlers: environments of verifiers set them for the whole process when they are made.

    Python does not allow this outside of the main thread, where episodes begin, and the trainer's handlers must stay.
    """
    module: Any = importlib.import_module("verifiers.envs.environment")
    original = module.signal
    module.signal = SimpleNamespace(**{**vars(original), "signal": lambda *_: None})
    try:
        yield
    finally:
        module.signal = original
