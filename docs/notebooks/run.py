"""Execute the notebooks of this folder: their outputs are written into them, or with ``--check`` compared.

    python docs/notebooks/run.py            # run and write
    python docs/notebooks/run.py --check    # run, and fail where a text that is stored is not what the code says

No kernel is needed: the code cells of a notebook run in order in one namespace.
"""

import ast
import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def main() -> None:
    torch.set_num_threads(1)
    names = [name for name in sys.argv[1:] if name != "--check"]
    for path in [HERE / name for name in names] or sorted(HERE.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(cells, 1):
            outputs = run(cell, f"{path.name}, cell {number}", number, namespace)
            if "--check" in sys.argv and texts(outputs) != texts(cell["outputs"]):
                sys.exit(f"{path.name}, cell {number} says\n{texts(outputs)}\nand stored is\n{texts(cell['outputs'])}")
            cell |= {"execution_count": number, "outputs": outputs}
        if "--check" not in sys.argv:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=90, metadata={"Software": None})
        return {"text/plain": ["a figure"], "image/png": base64.b64encode(picture.getvalue()).decode()}
    data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_().splitlines(keepends=True)
    return data


def texts(outputs: list[dict[str, Any]]) -> str:
    return "".join("".join(output["data"]["text/plain"]) for output in outputs)


if __name__ == "__main__":
    main()
