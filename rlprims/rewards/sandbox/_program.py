"""Runs inside the sandbox: one program, as the module ``__main__``."""

import importlib
import sys
import types
from pathlib import Path


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    importlib.import_module("_start").begin()
    sys.path.remove(str(here))
    file = here / "program.py"
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.__file__ = str(file)
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), program.__dict__)


if __name__ == "__main__":
    main()
