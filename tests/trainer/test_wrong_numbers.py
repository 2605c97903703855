"""A run whose numbers are wrong says so at once, names the stage and the rows, and ends."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlprims.cli import main
from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests import tiny
from tests.trainer.runs import metrics_of

PARTS = "tests.trainer.wrong_parts"
PLAIN = {"steps": 5, "prompts_per_generation": None, "record_rollouts": False}
PAIRED = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "-"} for row in tiny.sums(8)]
DEMONSTRATED = [{"prompt": row["question"], "response": row["answer"]} for row in tiny.sums(8)]


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"policy_loss": f"{PARTS}.nan_loss"}, "loss of 3 of 12 rows, sample_id "),
        ({"policy_loss": f"{PARTS}.infinite_slope"}, "gradient of 12 of 12 rows, sample_id "),
        ({"advantage": f"{PARTS}.nan_advantages"}, "advantages of 3 of 12 rows, sample_id "),
        ({"policy_loss": f"{PARTS}.infinite_slope", "mini_batches": 4}, "gradient of 12 of 12 rows"),
        (
            {"policy_loss": f"{PARTS}.nan_if_large", "mini_batches": 4},
            r"loss of \d of 12 rows, sample_id ",
        ),  # others train
    ],
)
def test_the_first_is_named_and_the_third_ends_the_run(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    changes: dict[str, Any],
    stage: str,
) -> None:
    algorithm = {"preset": "grpo", "kl_coef": 0.0, "group_size": 3, **changes}
    config = load({**settings, **PLAIN, "algorithm": algorithm}, "data.eval=null")
    updates = changes.get("mini_batches", 1)
    wrong = rf"[1-{updates}] of {updates} updates of the policy not finite"
    with pytest.raises(ValueError, match=rf"step 3: {wrong}, the third step in a row: {stage}"):
        start(config, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(rf"warning: step 1: {wrong}: {stage}", printed)
    assert printed.count("not finite") == 1
    assert [line["skipped_updates"] < updates for line in metrics_of(config.run_dir)] == [
        "if_large" in changes.get("policy_loss", "")
    ] * 3
    assert (config.run_dir / "checkpoints" / "step_000003" / "trainer.json").exists()


@pytest.mark.parametrize(
    ("rows", "loss", "stage"),
    [
        (PAIRED, f"{PARTS}.nan_pairs", "loss of 4 of 4 rows"),
        (DEMONSTRATED, f"{PARTS}.infinite_slope", "gradient of 2 of 2 rows"),
    ],
)
def test_so_do_runs_on_stored_rows(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], loss: str, stage: str
) -> None:
    settings = {
        "run_dir": str(tmp_path / "run"),
        "rows_per_step": 2,
        "loss": loss,
        "model": {"path": str(model)},
        "data": {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))},
        "evaluation": {"before_training": False},
    }
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", str(tmp_path / "fit.yaml")]) == 2
    captured = capsys.readouterr()
    assert f"warning: step 1: 1 of 1 updates of the policy not finite: {stage}" in captured.out
    assert f"error: step 3: 1 of 1 updates of the policy not finite, the third step in a row: {stage}" in captured.err
    assert "; then: rlprims resume " in captured.err
    assert json.loads(next((tmp_path / "run" / "checkpoints").glob("step_000003/trainer.json")).read_text())
