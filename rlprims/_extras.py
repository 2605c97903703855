"""What to install: the packages of an extra, or another library that is imported when it is first needed."""

import importlib
from typing import Any


def hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. It runs in the clone: rlprims is on no package index.

    >>> hint("train")
    "pip install '.[train]' in the clone of rlprims"
    """
    return f"pip install '.[{extra}]' in the clone of rlprims"


def package(module: str, name: str, user: str) -> Any:
    """A module of the package ``name``, which ``user`` needs.

    >>> package("no_such_module.part", "no-such-package", "interop.example")
    Traceback (most recent call last):
    ImportError: interop.example needs no-such-package (No module named 'no_such_module'): pip install no-such-package
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{user} needs {name} ({error}): pip install {name.lower()}") from error
