"""FSDP2 ranks in processes of their own, without Ray: see ``fsdp_ranks.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


def test_two_ranks_are_one_process(tmp_path):
    from rlprims.execution.ray._cluster import CPU_ENVIRONMENT  # which needs Ray

    for name, changes in {"plain": {}, "tied": {"tie_word_embeddings": True}, "wide": {"vocab_size": 4096}}.items():
        tiny.save_model(tmp_path / name, **changes)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("fsdp_ranks.py")), str(tmp_path)]
    # As pytest finds modules, for a process that is not pytest; one thread each.
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))}
    environment = os.environ | paths | CPU_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "passed: all" in done.stdout
