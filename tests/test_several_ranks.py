"""The page on several GPUs, with real ranks: DDP and FSDP2 average gradients, and the example makes up for it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "several_ranks.py"


def torchrun(script: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_ranks_give_the_gradients_of_one_process(wrap: str) -> None:
    done = torchrun(EXAMPLE, "--wrap", wrap)
    assert done.returncode == 0, done.stderr
    assert f"{wrap}: the gradients of 2 ranks are those of one process" in done.stdout


@pytest.mark.slow
def test_without_the_factor_they_are_not(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(EXAMPLE.read_text().replace("(loss * ranks)", "loss"))
    done = torchrun(wrong)
    assert done.returncode != 0
    assert "Tensor-likes are not close" in done.stderr
