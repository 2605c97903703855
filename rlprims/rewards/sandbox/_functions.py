"""Runs inside a sandbox: loads the tested program and calls its functions for the tests, over descriptor 3."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    values = importlib.import_module("_values")
    importlib.import_module("_start").begin()
    sys.setrecursionlimit(10_000)
    namespace: dict[str, Any] = {"__name__": "program"}
    # This process is isolated, and the result of the tests is computed in another one.
    for file in ("before.py", "program.py"):
        exec(compile((here / file).read_text(encoding="utf-8"), file, "exec"), namespace)
    for line in os.fdopen(os.dup(3), "rb"):
        name, arguments, named = values.loads(line)
        owner, _, method = name.partition("().")
        if owner not in namespace:
            sys.exit(f"{owner} is not defined")
        try:
            function = getattr(namespace[owner](), method) if method else namespace[owner]
            text = values.dumps(("value", function(*arguments, **named)))
        except BaseException as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            text = values.dumps(("raised", kinds, str(error)[:1000]))
        answer = text.encode() + b"\n"
        while answer:
            answer = answer[os.write(3, answer) :]


if __name__ == "__main__":
    main()
