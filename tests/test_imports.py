"""What an import costs, and that the maths drags nothing in."""

import json
import subprocess
import sys

import pytest

COUNT = """
import json, sys, torch
before = set(sys.modules)
import {module}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
FORBIDDEN = {"pydantic", "tensordict", "transformers", "yaml", "rich", "matplotlib", "ray", "safetensors"}


def modules_after(module: str) -> set[str]:
    answer = subprocess.run([sys.executable, "-c", COUNT.format(module=module)], capture_output=True, check=True)
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("room", ["advantage", "losses", "rewards", "filters"])
def test_a_room_loads_torch_and_at_most_fifty_modules(room: str) -> None:
    loaded = modules_after(f"rlprims.{room}")
    assert len(loaded) <= 50
    assert not {name.split(".")[0] for name in loaded} & FORBIDDEN


def test_the_package_itself_loads_nothing() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", "import sys, rlprims; print('torch' in sys.modules)"], capture_output=True, check=True
    )
    assert answer.stdout.strip() == b"False"
