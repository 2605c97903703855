"""FSDP2 ranks in processes of their own, without Ray: see ``fsdp_ranks.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


def on_ranks(script: str, folder: Path, *chosen: str, count: int = 2) -> str:
    """What a script printed."""
    from rlprims.execution.ray._cluster import CPU_ENVIRONMENT  # which needs Ray

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += [str(Path(__file__).with_name(script)), str(folder), *chosen]
    # As pytest finds modules, for a process that is not pytest; one thread each.
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))}
    environment = os.environ | paths | CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_two_ranks_are_one_process(tmp_path):
    for name, changes in {"plain": {}, "tied": {"tie_word_embeddings": True}, "wide": {"vocab_size": 4096}}.items():
        tiny.save_model(tmp_path / name, **changes)
    assert "passed: all" in on_ranks("fsdp_ranks.py", tmp_path)


def test_two_copies_of_the_weights_on_four_ranks_are_one_process(tmp_path):
    tiny.save_model(tmp_path / "plain")
    assert "passed: hybrid" in on_ranks("fsdp_ranks.py", tmp_path, "hybrid sharding", count=4)


def test_formulas_of_two_ranks_are_within_a_quarter_of_what_they_send_hold_and_write(tmp_path):
    found = [json.loads(line) for line in on_ranks("scale_ranks.py", tmp_path).splitlines() if line[:1] == "{"]
    assert len(found) == 10
    for measure in found:
        assert 0.75 < measure["by_formula"] / measure["measured"] < 1.25, measure
