"""Models with states, and a longrope model, train two steps by the command; the trainer's numbers are the sampler's."""

from pathlib import Path

import pytest
import yaml

from tests.execution.test_execution_ropes import BORDER, LONG, save
from tests.hybrids import save_hybrid
from tests.trainer.runs import metrics_of, rlprims, small_run

TEN = ("qwen3_5_text", "qwen3_next", "lfm2", "lfm2_moe", "bamba", "jamba", "nemotron_h", "granitemoehybrid")
TEN += ("falcon_h1", "kimi_linear", "minimax")
CHOSEN = ("qwen3_next", "lfm2", "granitemoehybrid")
"""One of each kind of state: a delta rule with experts, convolutions, state spaces; the others before a release."""


def largest_mismatch(model: Path, questions: Path, tmp_path: Path, *overrides: str) -> float:
    settings = small_run(model, questions, tmp_path / "run") | {"steps": 2, "recompute_log_probs_every": 1}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    rlprims("train", config, *overrides)
    lines = [line for line in metrics_of(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [1, 2]
    return max(line["mismatch_max"] for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in CHOSEN else pytest.mark.release) for kind in TEN]
)
def test_a_hybrid_trains(kind: str, questions: Path, tmp_path: Path) -> None:
    model = save_hybrid(tmp_path / "model", kind)
    assert largest_mismatch(model, questions, tmp_path, "model.packing=false") < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_longrope_model_trains_up_to_its_border(
    packing: str, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run ended with 4.77 nats and exit code 0."""
    model, longest = save(tmp_path / "model", LONG), f"sampling.max_new_tokens={BORDER - 4}"
    fitting = ("algorithm.max_length=20", longest, f"model.packing={packing}")
    assert largest_mismatch(model, questions, tmp_path, *fitting) < 1e-5
    assert f"rows end at {BORDER} of 96 tokens" in capsys.readouterr().out
