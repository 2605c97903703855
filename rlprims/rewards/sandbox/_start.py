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


def used_names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def defined_names(tree: ast.AST) -> set[str]:
    """The names that a program defines or imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def standard_names(tree: ast.AST, known: Mapping[str, Any]) -> dict[str, Any]:
    """The names of :data:`MODULES` that a program uses and neither defines nor imports."""
    missing = used_names(tree) - defined_names(tree) - set(known) - set(dir(builtins))
    found: dict[str, Any] = {name: importlib.import_module(name) for name in missing & set(MODULES)}
    for module in map(importlib.import_module, MODULES if missing - set(found) else ()):
        found |= {name: getattr(module, name) for name in (missing - set(found)) & public_names(module)}
        if missing == set(found):
            break
    return found
