"""A worker's call that raises an error is kept in the run's directory, and raises the same error in one process."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprims.cli import main
from rlprims.data_proto import DataProto
from tests import tiny
from tests.trainer import shared_cluster
from tests.trainer.runs import rlprims

ROOT = Path(__file__).parents[2]
LOSS = """
from pathlib import Path
from rlprims import losses

def fails(log_probs, old_log_probs, advantages, response_mask):
    for row, mask in enumerate(response_mask):
        if Path(__file__).with_suffix(".on").exists() and advantages[row][mask].sum() > 0.1:
            before, now = old_log_probs[row][mask].tolist(), log_probs[row][mask].tolist()
            raise ValueError(f"{before} of this row, apart {max(abs(x - y) for x, y in zip(before, now)):.2f}")
    return losses.clipped_surrogate(log_probs, old_log_probs, advantages, response_mask)
"""
"""It fails on a row's values, from a later step on, and says them; and how far the weights are from the step's."""


@pytest.fixture
def failing(settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path) -> Path:
    """A run whose third step fails on a rank, after a checkpoint of the second."""
    loss, cluster = tmp_path / "loss.py", {"training_workers": 2, "rollout_workers": 1, "engine": "hf"}
    loss.write_text(LOSS)
    settings["algorithm"] |= {"policy_loss": f"{loss}:fails"}
    settings |= {"execution": "ray", "ray": cluster, "optimizer": {"lr": 0.02}, "steps": 2}
    shared_cluster.rlprims("train", write_config(settings))
    loss.with_suffix(".on").touch()
    return tmp_path / "run"


def doctor(run: Path, *before: str, typed: str = "") -> str:
    """What a process without Ray prints; in a driver's own, Ray changes signatures of methods."""
    command = [sys.executable, *before, "-m", "rlprims", "doctor", str(run / "failed_call")]
    ran = subprocess.run(command, input=typed, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.ray
def test_the_call_alone_raises_the_error_of_the_rank(failing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(failing), "steps=4"]) == 2
    first, *kept, then, details = capsys.readouterr().err.splitlines()[-4:]
    where, _, said = first.partition(" of 2: ")
    assert where.startswith("error: step 3: training rank ")
    assert said.endswith("of this row, apart 0.00")  # as every first update of a step
    assert kept == [f"the same call alone: rlprims doctor {failing}/failed_call"]
    assert then.endswith(f": rlprims resume {failing}")
    assert details.startswith("details: ")

    batch = DataProto.load(failing / "failed_call")
    rows = [str(batch["old_log_probs"][i][mask].tolist()) for i, mask in enumerate(batch["response_mask"])]
    assert rows.count(said.partition(" of this row")[0]) == 1
    (of_step,) = batch["failed_call"]["arguments"]["totals"].values()
    assert of_step[1] > len(rows)  # sequences: the other rank has some, too

    told = doctor(failing, "-m", "pdb", "-c", "continue", typed="p before\nq\n")
    assert f"ValueError: {said}" in told
    assert f"(Pdb) {said.partition(' of this row')[0]}" in told
    (failing.parent / "loss.on").unlink()
    assert f"no error in one process. In the run: {said}" in doctor(failing)


@pytest.mark.ray
def test_a_disk_that_cannot_keep_it_changes_nothing_else(failing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (failing / "failed_call").write_text("in the way")
    assert main(["resume", str(failing), "steps=4"]) == 2
    first, kept, then, _ = capsys.readouterr().err.splitlines()[-4:]
    assert "of this row, apart 0.00" in first
    assert kept.startswith(f"the batch of the call is not kept: save: {failing}/failed_call exists")
    assert then.endswith(f": rlprims resume {failing}")


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("log_probs", {"reference": False, "plain": True}),
    ("log_probs", {"reference": True, "plain": False}),
    ("entropies", {}),
    ("top_tokens", {"size": 2}),
    ("values", {}),
    ("reward_scores", {}),
    ("generate", {"sampling": {"max_new_tokens": 3}, "seed": 1, "prompt_width": None, "versions": True}),
]


@pytest.mark.slow
def test_every_call_of_a_run_can_be_made_again(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fails as in the run without the columns that it reads; with them it does not."""
    settings["model"]["reward"] = str(tiny.save_classifier(tmp_path / "reward"))
    settings["algorithm"] = {"preset": "ppo", "kl_in_reward": {}}
    settings["evaluation"] = {"every": 100, "limit": 2, "samples": 1}
    rlprims("train", write_config(settings | {"steps": 1, "prompts_per_generation": None}))
    tokens, path = torch.tensor([[3, 4, 5], [6, 7, 8]]), tmp_path / "run" / "failed_call"
    valid = torch.ones_like(tokens, dtype=torch.bool)
    columns = {"prompts": tokens[:, :1], "responses": tokens[:, 1:], "attention_mask": valid}
    rows = DataProto.from_dict(columns | {"response_mask": valid[:, 1:]})
    prompts = DataProto.from_dict({"sample_id": tokens[:, 0]}, {"prompt_ids": [[3], [6]]})
    for method, arguments in CALLS:
        about = {"failed_call": {"method": method, "arguments": arguments, "error": f"of {method}"}}
        batch, lacking = (prompts, rows) if method == "generate" else (rows, prompts)
        DataProto(batch.batch, batch.non_tensor_batch, about).save(path)
        rlprims("doctor", path)
        assert f"no error in one process. In the run: of {method}" in capsys.readouterr().out
        DataProto(lacking.batch, lacking.non_tensor_batch, about).save(path)
        with pytest.raises(RuntimeError, match="MissingField: no field"):
            main(["doctor", str(path)])


def test_what_is_no_call_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "failed_call"
    assert main(["doctor", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: load: no batch at {path}")
    DataProto.from_dict({"x": torch.zeros(1)}).save(path)
    assert main(["doctor", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} is not a run")
    for option in ("--gpu", "--cluster"):
        assert main(["doctor", option, str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: doctor {option} ")
