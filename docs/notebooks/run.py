"""Execute the notebooks of this folder: their outputs are written into them, or with ``--check`` compared.

    python docs/notebooks/run.py            # run and write
    python docs/notebooks/run.py --check    # run, and fail if an output differs from the stored one

No kernel is needed: the code cells of a notebook run in order in one namespace. Numbers may differ in their last
printed digit, because processors round differently.
"""

import ast
import base64
import difflib
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:[eE][-+]?\d+)?")


def main() -> None:
    torch.set_num_threads(1)
    check = "--check" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--check"]
    failures = []
    for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
        try:
            failures += execute(path, check=check)
        except Exception:  # the notebooks after it are run all the same
            failures.append(f"{path.name}: {traceback.format_exc()}")
    if failures:
        sys.exit("\n".join(failures))


def execute(path: Path, *, check: bool) -> list[str]:
    """Run a notebook; what differs from the stored outputs, or none if they are written."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    differences = []
    for number, cell in enumerate(cells, 1):
        name = f"{path.name}, cell {number}"
        outputs = run(cell, name, number, namespace)
        if check and not agree(texts(cell["outputs"]), texts(outputs)):
            differences.append(difference(name, texts(cell["outputs"]), texts(outputs)))
        cell |= {"execution_count": number, "outputs": outputs}
    if not check:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return differences


def agree(stored: str, got: str) -> bool:
    """Whether two outputs have the same words, and numbers that differ by at most one unit of the last printed digit.

    >>> agree("loss 0.4563", "loss 0.4562"), agree("loss 0.4563", "loss 0.4561"), agree("7 rows", "8 rows")
    (True, False, False)
    """
    words, numbers = NUMBER.sub("#", stored).split(), NUMBER.findall(stored)
    if words != NUMBER.sub("#", got).split():  # column widths may change with a sign
        return False
    return all(close(x, y) for x, y in zip(numbers, NUMBER.findall(got), strict=True))


def close(stored: str, got: str) -> bool:
    """Integers must be equal; numbers with a decimal point may differ by one unit of the last digit."""
    mantissa, _, exponent = stored.lower().partition("e")
    if "." not in mantissa or "." not in got:
        return stored == got or float(stored) == float(got) == 0
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(stored) - float(got)) <= 1.01 * unit


def difference(name: str, stored: str, got: str) -> str:
    lines = difflib.unified_diff(stored.splitlines(), got.splitlines(), f"{name}, stored", f"{name}, now", lineterm="")
    return "\n".join(lines)


def run(cell: dict[str, Any], name: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """The value of a cell's last line as a notebook shows it."""
    code = ast.parse("".join(cell["source"]), name)
    namespace["_"] = None
    if code.body and isinstance(code.body[-1], ast.Expr):
        code.body[-1] = ast.Assign([ast.Name("_", ast.Store())], code.body[-1].value)
    exec(compile(ast.fix_missing_locations(code), name, "exec"), namespace)
    if namespace["_"] is None:
        return []
    data = shown(namespace["_"])
    return [{"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}]


def shown(value: Any) -> dict[str, Any]:
    if hasattr(value, "_repr_png_"):
        return {"text/plain": ["a figure"], "image/png": base64.b64encode(value._repr_png_()).decode()}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return data


def texts(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output["data"]["text/plain"]) for output in outputs)


if __name__ == "__main__":
    main()
