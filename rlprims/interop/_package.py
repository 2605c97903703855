"""The import of another library when it is first needed."""

import importlib
from typing import Any


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
