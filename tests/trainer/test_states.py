"""What a run remembers between its steps: it is used as the papers say, and a run that was ended goes on alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.advantage import ValueTracker
from rlprims.filters import SamplingExhausted
from rlprims.runs.directory import RunDirectory
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, resume, start
from tests.tiny import sums, write_jsonl
from tests.trainer.runs import metrics_of

SPO = {"preset": "spo"}
ROLES = {"preset": "remax", "group_size": 2, "baseline": {"fn": "rlprims.advantage.RoleBaseline", "decay": 0.5}}
ENTROPY = {
    "preset": "grpo", "kl_coef": 0.0, "group_size": 2,
    "loss_terms": [{
        "coefficient": {"fn": "rlprims.controllers.AdaptiveEntropy", "target": 9.0, "delta": 0.01},
        "loss": "rlprims.losses.negative_entropy",
    }],
}  # fmt: skip
POOLS = {"hard": (0.0, 1.0), "normal": (0.2, 3.0), "easy": (0.8, 0.5)}


@pytest.fixture
def with_roles(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    rows = [{**row, "role": "even" if i % 2 else "odd"} for i, row in enumerate(sums(20))]
    settings["data"]["train"] = str(write_jsonl(tmp_path / "roles.jsonl", rows))
    settings["data"]["eval"] = None
    return settings | {"prompts_per_generation": None}


def changed(settings: dict[str, Any], kind: str) -> dict[str, Any]:
    everything = {**SPO, "loss_terms": ENTROPY["loss_terms"]}
    settings["algorithm"] = {"spo": SPO, "roles": ROLES, "entropy": ENTROPY}.get(kind, everything)
    if kind in ("all", "episodes"):
        settings["data"]["pools"] = POOLS
    if kind == "episodes":
        settings["data"] |= {"environment": {"fn": "tests.trainer.environments.Digits", "most": 3}}
        settings |= {"algorithm": {**SPO, "baseline": "tests.trainer.test_states.Halves"}, "verifier": None}
    return settings


class Halves(ValueTracker):
    """Of scores that are not pass rates."""

    def update(self, prompts, scores, kl):  # type: ignore[no-untyped-def, override]
        super().update(prompts, scores.clamp(0, 1), kl)


def steps(config: Config, console: Console) -> tuple[Trainer, list[StepResult]]:
    parts = build(config, console)
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    return trainer, [trainer.step() for _ in range(config.steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["all", pytest.param("roles", marks=pytest.mark.slow), pytest.param("episodes", marks=pytest.mark.slow)]
)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_metrics_and_states(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console, tmp_path: Path, kind: str
) -> None:
    settings = changed(with_roles, kind)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(load(settings, f"run_dir={whole}"), console) == 0
    assert start(load(settings, f"run_dir={broken}", "steps=4"), console) == 0
    run = RunDirectory.open(broken)
    assert resume(run, run.config(Config, ["steps=6"]), console) == 0
    assert metrics_of(broken) == metrics_of(whole)
    last = [(path / "checkpoints" / "step_000006" / "trainer.json").read_text() for path in (whole, broken)]
    assert last[0] == last[1]
    assert (whole / "rollouts" / "step_000006.jsonl").read_text() == (
        broken / "rollouts" / "step_000006.jsonl"
    ).read_text()


def test_spo_compares_with_earlier_scores_which_fade_as_the_policy_moves(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console
) -> None:
    with_roles["data"]["train"] = str(
        write_jsonl(Path(with_roles["run_dir"]).parent / "few.jsonl", sums(4))  # every prompt in every step
    )
    trainer, taken = steps(load(changed(with_roles, "spo")), console)
    tracker = ValueTracker()
    for step in taken:
        batch = step.batch
        keys = batch["example"].tolist()
        torch.testing.assert_close(batch["baseline_scores"], tracker.baseline(keys))
        above = batch["scores"] - batch["baseline_scores"]
        wanted = (above - above.mean()) / above.std()
        torch.testing.assert_close(batch["advantages"][:, 0], wanted, atol=1e-5, rtol=1e-5)
        assert bool((batch["kl"] == 0).all()) == (step.number == 1), "no policy is the one of the step before"
        tracker.update(keys, batch["scores"], batch["kl"])
    assert trainer.states.state_dict() == {"baseline": tracker.state_dict()}


def test_kl_is_the_change_of_the_log_probs_of_the_last_responses(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console
) -> None:
    with_roles["data"]["train"] = str(write_jsonl(Path(with_roles["run_dir"]).parent / "few.jsonl", sums(4)))
    config = load(changed(with_roles, "spo"), "steps=1")
    parts = build(config, console)
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    first = trainer.step().batch
    now, mask = parts.execution.log_probs(first), first["response_mask"]
    moved = (now - first["old_log_probs"]).abs().masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
    wanted = dict(zip(first["example"].tolist(), moved.tolist(), strict=True))
    second = trainer.step().batch
    assert second["kl"].tolist() == pytest.approx([wanted[key] for key in second["example"]], rel=1e-5)
    assert float(second["kl"].min()) > 0


def test_roles_are_compared_with_their_own_average(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console
) -> None:
    trainer, taken = steps(load(changed(with_roles, "roles")), console)
    average = {"odd": 0.0, "even": 0.0}
    for step in taken:
        roles = [row["role"] for row in step.batch["fields"]]
        assert step.batch["baseline_scores"].tolist() == pytest.approx([average[role] for role in roles])
        for role in set(roles):
            own = step.batch["scores"][torch.tensor([other == role for other in roles])]
            average[role] = 0.5 ** len(own) * average[role] + (1 - 0.5 ** len(own)) * float(own.mean())
    assert trainer.states.state_dict()["baseline"]["values"] == pytest.approx(average)
    assert not any(reason == "greedy baseline" for step in taken for _, reason in step.dropped)


def test_the_coefficient_of_the_entropy_follows_the_entropy(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console
) -> None:
    """The tiny model's entropy is below the target of 9 nats: each step adds 0.01, and the update is of that number."""
    _, taken = steps(load(changed(with_roles, "entropy")), console)
    assert [step.metrics["coefficient/loss_terms.0"] for step in taken] == pytest.approx([0.01 * i for i in range(6)])
    assert all(step.metrics["entropy"] < 9 for step in taken)

    fixed = {**ENTROPY, "loss_terms": [{"coefficient": 0.0, "loss": "rlprims.losses.negative_entropy"}]}
    _, without = steps(load(with_roles | {"algorithm": fixed, "steps": 2}), console)
    assert taken[0].metrics["grad_norm"] == without[0].metrics["grad_norm"]
    assert taken[1].metrics["grad_norm"] != without[1].metrics["grad_norm"]


def always(response: str, answer: str) -> dict[str, float]:
    return {"score": float(len(response)), "acc": 1.0}


def when_even(response: str, answer: str) -> dict[str, float]:
    return {"score": float(len(response)), "acc": float(int(answer) % 2 == 0)}


def test_a_prompt_that_is_mastered_is_not_drawn_again(
    load: Callable[..., Config], with_roles: dict[str, Any], console: Console
) -> None:
    with_roles["data"]["pools"] = {"open": (0.0, 1.0), "mastered": (1.0, 0.0)}
    with_roles["algorithm"] = {"preset": "grpo", "kl_coef": 0.0, "group_size": 2}
    with_roles["steps"] = 5
    trainer, taken = steps(load(with_roles | {"verifier": "tests.trainer.test_states.always"}), console)
    drawn = [key for step in taken for key in dict.fromkeys(step.batch["example"].tolist())]
    assert len(drawn) == len(set(drawn)) == 20
    assert [step.metrics["pools/mastered"] for step in taken] == [4, 8, 12, 16, 20]
    with pytest.raises(SamplingExhausted, match=r"data\.pools: count=4, expected at least 1 and at most 0"):
        trainer.step()

    _, taken = steps(load(with_roles | {"verifier": "tests.trainer.test_states.when_even"}), console)
    even = [i for step in taken for i in dict.fromkeys(step.batch["example"][step.batch["acc"].numpy() == 1].tolist())]
    assert len(even) == len(set(even)) > 0
    odd = [i for step in taken for i in dict.fromkeys(step.batch["example"][step.batch["acc"].numpy() == 0].tolist())]
    assert len(odd) == 20 - len(even)  # of five steps of four


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"preset": "grpo", "baseline": "rlprims.advantage.ValueTracker"}}, "does not use"),
        ({"algorithm": {"preset": "spo", "baseline": "rlprims.advantage.remax"}}, r"has no \['update'"),
        ({"algorithm": {**SPO, "loss_terms": [{"coefficient": "rlprims.losses.kl", "loss": "rlprims.losses.kl"}]}},
         "expected a class such as controllers.AdaptiveEntropy"),
        ({"algorithm": {**SPO, "baseline": {"fn": "rlprims.advantage.ValueTracker", "half_life": -1}}}, "half_life=-1"),
    ],
)  # fmt: skip
def test_a_stage_that_is_no_memory_is_refused_before_anything_runs(
    load: Callable[..., Config], settings: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(settings | change)


def test_pools_that_cannot_be_are_refused(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    settings["data"]["pools"] = {"hard": (0.0, -1.0)}
    with pytest.raises(ValueError, match=r"data\.pools: pools=.*, finite, weights >= 0"):
        load(settings)


def test_a_row_without_a_role_says_what_to_write(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings | {"algorithm": ROLES, "prompts_per_generation": None})
    with pytest.raises(ValueError, match=r"takes \['roles'\].*roles needs a field role in every row"):
        steps(config, console)
