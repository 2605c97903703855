"""Runs inside a sandbox, before a program: what an ordinary interpreter and the data sets' harnesses provide.

Python starts without ``site`` here, which usually defines ``exit`` and ``quit``.
"""

import ast
import builtins
import importlib
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = (
    *("typing", "collections", "itertools", "functools", "heapq", "bisect", "math", "operator", "copy", "string", "re"),
    *("json", "io", "sys", "datetime", "random", "statistics", "time"),
)
"""The modules whose names the harnesses of APPS, TACO and LiveCodeBench import for a program."""
IMPORTS = "\n".join(
    [*(f"from {name} import *" for name in MODULES), "from builtins import *", f"import {', '.join(MODULES)}"]
)


def begin() -> None:
    """Define ``exit`` and ``quit``, and let the packages be imported that the sandbox was given."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.path.append(str(Path(__file__).parent / "packages"))


def public_names(module: types.ModuleType) -> set[str]:
    """The names that ``from module import *`` imports."""
    return set(getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")])


def standard_names(tree: ast.AST, known: Mapping[str, Any]) -> dict[str, Any]:
    """The names of :data:`MODULES` that a program uses and neither defines nor imports."""
    used: set[str] = set()
    defined = set(known) | set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
    missing = used - defined
    found: dict[str, Any] = {name: importlib.import_module(name) for name in missing & set(MODULES)}
    for module in map(importlib.import_module, MODULES if missing - set(found) else ()):
        found |= {name: getattr(module, name) for name in (missing - set(found)) & public_names(module)}
        if missing == set(found):
            break
    return found
