"""Recorded rollouts in the sampler's place give the recorded run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.runs.directory import RunDirectory
from rlprims.runs.records import read_rollouts
from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests.trainer.runs import metrics_of

MASKED = {"preset": "rloo", "group_size": 3, "ended": {"length": "mask_turn"}}


WHOLE, TRUNCATED = {}, {"top_p": 0.8, "min_p": 0.02}
REMAX = {"preset": "remax", "group_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "sampling"),
    [
        pytest.param(None, WHOLE, id="dapo-whole"),
        pytest.param(MASKED, TRUNCATED, id="masked-truncated"),
        pytest.param(None, TRUNCATED, id="dapo-truncated", marks=pytest.mark.release),
        pytest.param(MASKED, WHOLE, id="masked-whole", marks=pytest.mark.release),
        pytest.param(REMAX, WHOLE, id="remax-whole"),
        pytest.param(REMAX, TRUNCATED, id="remax-truncated", marks=pytest.mark.release),
    ],
)
def test_a_replay_trains_as_the_recorded_run_did(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    tmp_path: Path,
    algorithm: Any,
    sampling: dict[str, float],
) -> None:
    """Truncated sampling too: the recording has the sets that each token was drawn from."""
    settings["sampling"] |= sampling
    if algorithm:
        settings["algorithm"] = algorithm
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    start(load(settings, f"run_dir={recorded}"), console)
    start(load(settings, f"run_dir={replayed}", f"replay={recorded}", "steps=4"), console)
    expected = [line for line in metrics_of(recorded) if line["step"] <= 4]
    got = [line for line in metrics_of(replayed) if not (line["kind"] == "eval" and line["step"] == 4)]
    assert got == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stream": True, "prompts_per_generation": None},
        {"sampling": {"max_new_tokens": 8, "top_p": 0.8}, "algorithm": MASKED},
        {"sampling": {"max_new_tokens": 8, "stop": ["3", "a"]}, "algorithm": MASKED},
    ],
    ids=["whole", "streamed", "truncated", "stop texts"],
)
def test_a_replay_of_episodes_plays_the_environment_again(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings["data"]["environment"] = "tests.trainer.environments.Digits"
    settings |= {"episode_limits": {"turns": 3}, "verifier": None, **changes}
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    start(load(settings, f"run_dir={recorded}", "steps=4"), console)
    start(load(settings, f"run_dir={replayed}", f"replay={recorded}", "steps=3"), console)
    assert any(line.get("turns", 1) > 1 for line in metrics_of(recorded))
    expected = [line for line in metrics_of(recorded) if line["step"] <= 3]
    assert metrics_of(replayed) == expected
    for step in (1, 2, 3):
        assert read_rollouts(replayed, step) == read_rollouts(recorded, step)


def test_an_environment_that_answers_otherwise_is_not_a_replay(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    settings["data"] |= {"environment": "tests.trainer.environments.Digits", "eval": None}
    settings |= {"episode_limits": {"turns": 3}, "verifier": None}
    recorded, other = tmp_path / "recorded", "data.environment=tests.trainer.environments.SaysMore"
    start(load(settings, f"run_dir={recorded}", "steps=1"), console)
    with pytest.raises(ValueError, match=r"turn 1 of sample \d+ answers another prompt: an environment must answer"):
        start(load(settings, f"run_dir={tmp_path / 'new'}", f"replay={recorded}", "steps=1", other), console)


@pytest.mark.slow
def test_another_loss_on_the_same_samples(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    start(load(settings, f"run_dir={recorded}", "steps=3", "compress_rollouts=true"), console)
    other = "algorithm.aggregation=rlprims.losses.seq_mean_token_mean"
    start(load(settings, f"run_dir={replayed}", f"replay={recorded}", "steps=3", other), console)
    first, second = metrics_of(recorded), metrics_of(replayed)
    assert [line.get("score") for line in first if line["kind"] == "train"] == [
        line.get("score") for line in second if line["kind"] == "train"
    ]
    assert first != second


def test_recordings_may_be_compressed_and_of_some_steps(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    whole, some = tmp_path / "whole", tmp_path / "some"
    start(load(settings, f"run_dir={whole}", "steps=2"), console)
    start(load(settings, f"run_dir={some}", "steps=2", "compress_rollouts=true", "record_rollouts_every=2"), console)
    assert [path.name for path in (some / "rollouts").iterdir()] == ["step_000002.jsonl.gz"]
    assert read_rollouts(some) == read_rollouts(whole, 2)
    RunDirectory.open(some).truncate_after(1)
    assert list((some / "rollouts").iterdir()) == []


@pytest.mark.slow
def test_replay_refuses_a_step_that_was_not_recorded(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    start(load(settings, f"run_dir={recorded}", "steps=2"), console)
    short = load(settings, f"replay={recorded}")
    with pytest.raises(ValueError, match=r"has no sample \d+ \(\d+ are recorded\): replay fewer steps"):
        start(short, console)
    with pytest.raises(ValueError, match="answers another prompt: use the same data and seed"):
        start(load(settings, f"run_dir={tmp_path / 'other'}", f"replay={recorded}", "seed=1"), console)
