"""The object that a text names: ``package.module.name``, or ``/folder/file.py:name`` in any file of this machine."""

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from rlprims._near import near

_FILE = re.compile(r"(\S.*\.py):(\w+)")
_PREFIX = "rlprims_file_"
"""Begins the names of the modules that files are, so that none hides an installed package of the file's name."""


class FileError(ValueError):
    """There is no such file, it has no such name, or it raises while it is loaded; in one line."""


def imported(path: str) -> Any:
    """The object. A file's errors are :class:`FileError`, a module's are Python's own."""
    if (found := _FILE.fullmatch(path)) is None:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)
    file = Path(found[1]).expanduser().resolve()
    if "://" in path or not file.is_file():
        where = "" if file == Path(found[1]) else f", neither beside the settings nor as {file}"
        raise FileError(f"{path}: there is no such file on this machine{where}")
    names = _names_of(file)
    if (name := found[2]) not in names:
        meant = near(name, names)
        raise FileError(f"{path}: the file has no {name!r}" + f"; did you mean {meant!r}?" * bool(meant))
    return names[name]


def _names_of(file: Path) -> dict[str, Any]:
    name = _PREFIX + blake2b(str(file).encode(), digest_size=8).hexdigest()
    if name not in sys.modules:
        spec: Any = spec_from_file_location(name, file)
        sys.modules[name] = module = module_from_spec(spec)  # before it runs, as dataclasses look there
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1]
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise FileError(f"{file}, line {line}: {reason}") from None
    return vars(sys.modules[name])


def file_of(fn: Callable[..., Any]) -> str | None:
    """The path of a function that a file defines; None if a module does."""
    is_of_file = fn.__module__.startswith(_PREFIX)
    return f"{sys.modules[fn.__module__].__file__}:{fn.__qualname__}" if is_of_file else None


def absolute(path: str, folders: Sequence[str | Path] = ("",)) -> str:
    """``path``, whose file becomes that of the first folder that has it; any other text as it is."""
    found = _FILE.fullmatch(path)
    files = [file for folder in folders if (file := Path(folder, found[1])).is_file()] if found else []
    return f"{files[0].resolve()}:{found[2]}" if found and files else path
