"""What an import costs, and that the maths drags nothing in."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]

COUNT = """
import importlib, json, sys, torch
loaded = {}
for package in ("advantage", "losses", "rewards", "filters"):
    before = set(sys.modules)
    importlib.import_module(f"rlprims.{package}")
    loaded[package] = sorted(set(sys.modules) - before)
print(json.dumps(loaded))
"""
FORBIDDEN = {"pydantic", "tensordict", "transformers", "yaml", "rich", "matplotlib", "ray", "safetensors", "httpx2"}


@pytest.mark.slow
def test_the_maths_loads_torch_and_few_modules() -> None:
    answer = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, check=True)
    loaded = json.loads(answer.stdout)
    assert max(map(len, loaded.values())) <= 50
    assert not {name.split(".")[0] for names in loaded.values() for name in names} & FORBIDDEN


def test_the_package_itself_loads_nothing() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "import sys, rlprims; print('torch' in sys.modules)"], capture_output=True, check=True
    )
    assert answer.stdout.strip() == b"False"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("rlprims")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


INSIDE_TRANSFORMERS = {
    "transformers.cache_utils",  # the layers of a cache whose tokens have places
    "transformers.core_model_loading",  # the names in a checkpoint of weights that were merged when they were loaded
    "transformers.integrations.sdpa_attention",  # attention over packed rows
    "transformers.masking_utils",  # its masks
    "transformers.models.auto.modeling_auto",  # the types that it loads as causal language models
    "transformers.models.auto.processing_auto",  # the class of a type's processor
}
"""Modules without a promise of stability; ``transformers.utils`` is documented."""


def test_modules_inside_transformers_are_known_and_bounded() -> None:
    """A minor version may move them: `make test` of a new version shows it, and the bound keeps the next major out."""
    used = {
        node.module
        for path in (ROOT / "rlprims").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers.")
    }
    assert used - {"transformers.utils"} == INSIDE_TRANSFORMERS
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = (each for each in extras["train"] if each.startswith("transformers"))
    assert re.search(r">=\d.*,<\d", requirement)
