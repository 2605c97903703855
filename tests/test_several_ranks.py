"""The page on several GPUs, with real ranks: data, tensor and context parallelism, and the examples of each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE = EXAMPLES / "several_ranks.py"


def torchrun(script: Path, *options: str, ranks: int = 2) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(script), *options]
    found = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])  # for gloo_ranks.py
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": found}
    )


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [pytest.param("ddp", marks=pytest.mark.release), "fsdp2"])
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


@pytest.mark.slow
@pytest.mark.parametrize(("example", "says"), [("tensor_parallel", "loss and gradients"), ("context_parallel", "loss")])
def test_shards_give_the_gradients_of_one_process(example: str, says: str) -> None:
    done = torchrun(EXAMPLES / f"{example}.py")
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert "of 2 ranks are those of one process" in done.stdout


@pytest.mark.slow
def test_one_two_and_four_ranks() -> None:
    done = torchrun(Path(__file__).parent / "gloo_ranks.py", ranks=4)
    assert done.returncode == 0, done.stderr
    assert "1, 2 and 4 ranks give the numbers of one" in done.stdout
