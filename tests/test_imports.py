"""What an import costs, and that the maths drags nothing in."""

import json
import subprocess
import sys
from graphlib import TopologicalSorter

import grimp
import pytest

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
