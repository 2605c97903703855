"""Episodes in the trainer: whole groups, the same run from the same seed, credit by turn, the run of responses."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from rlprims.cli import main
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.environments import Episode, TextRenderer
from rlprims.filters import SamplingExhausted
from rlprims.reports.rollouts import print_rollouts, read_rollouts, write_page
from rlprims.runs.directory import RunDirectory
from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.loop import Trainer
from rlprims.trainer.scoring.columns import outcome_scores, same_widths
from rlprims.trainer.session import build, resume, start
from rlprims.trainer.sources.episodes import EpisodeRunner, episode_rows
from rlprims.trainer.sources.group import Group
from rlprims.trainer.sources.rounds import EpisodeRounds
from rlprims.turns import Turn
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims

ROOT = Path(__file__).parents[2]
RETURNS = {"fn": "rlprims.advantage.discounted_returns", "gamma": 0.5}
DIGITS = "tests.trainer.environments.Digits"


@pytest.fixture
def episodes(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a small run, of episodes."""
    settings["data"]["environment"] = DIGITS
    return settings | {"episode_limits": {"turns": 3}, "verifier": None}


def run(config: Config, console: Console) -> tuple[Trainer, list[StepResult]]:
    parts, steps = build(config, console), list[StepResult]()
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    train(trainer, [lambda _, step: steps.append(step)])
    return trainer, steps


def play(runner: EpisodeRunner, config: Config, groups: list[Group], *, seed: int) -> list[Episode]:
    """The episodes of the groups, in the order of their samples."""
    rounds, ended = EpisodeRounds(runner, config.sampling, seed, until_all_end=False, as_one=False), list[Episode]()
    for group in groups:
        rounds.begin(group)
    while len(ended) < sum(len(group.samples) for group in groups):
        ended += [episode for each in rounds.play() for episode in each.episodes]
    return sorted(ended, key=lambda episode: episode.sample_id)


def history(steps: list[StepResult]) -> list[dict[str, float]]:
    return [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in steps]


def test_an_environment_of_one_step_is_the_run_of_responses(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    _, responses = run(load(settings), console)
    settings["data"]["environment"] = "tests.trainer.environments.OneTurn"
    _, episodes = run(load(settings | {"verifier": None}), console)
    for a, b in zip(responses, episodes, strict=True):
        for name in ("sample_id", "group", "scores", "shaped_scores", "acc", "ended", "weights_version"):
            assert torch.equal(a.batch[name], b.batch[name]), name
        width = b.batch["responses"].shape[1]
        assert torch.equal(a.batch["responses"][:, :width], b.batch["responses"])
        assert not a.batch["response_mask"][:, width:].any()
        torch.testing.assert_close(a.batch["advantages"][:, :width], b.batch["advantages"])
        torch.testing.assert_close(
            a.batch["rollout_log_probs"][:, :width], b.batch["rollout_log_probs"], atol=1e-5, rtol=1e-5
        )
        assert list(a.batch["response"]) == list(b.batch["response"])
        assert b.metrics.pop("turns", 1) == 1  # a step may live on the surplus alone
        assert b.metrics.pop("tool_calls", 0) == 0
    for a, b in zip(history(responses), history(episodes), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-4)


def test_groups_are_whole_and_no_episode_is_lost(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    trainer, steps = run(load(episodes), console)
    parts = [(step.batch, *(rows for rows, _ in step.dropped)) for step in steps]
    known = [i for batches in parts for rows in batches for i in rows["sample_id"].tolist()]
    known += [i for rows in trainer.collector.surplus for i in rows["sample_id"].tolist()]
    assert sorted(known) == list(range(trainer.collector.prompts.samples))  # these contexts only grow: a row each
    for step in steps:
        batch, mask = step.batch, step.batch["response_mask"]
        assert batch["group"].unique(return_counts=True)[1].tolist() == [3] * 4
        assert not (mask & batch["observation_mask"]).any()
        several = batch["turns"] > 1
        assert batch["observation_mask"][several].any(-1).all()
        assert not batch["advantages"][~mask].any()
        mask = mask & (batch["weights_version"] == step.number)[:, None]  # the surplus is of older weights
        gap = (batch["old_log_probs"] - batch["rollout_log_probs"])[mask]
        assert gap.abs().max() < 1e-4, "the trainer scores the tokens that the sampler saw"
        # What a turn earned is where it was earned, and all of it is the score.
        rewards = batch["rewards"].sum(-1) - (batch["shaped_scores"] - batch["scores"])
        torch.testing.assert_close(rewards, batch["scores"])
        assert step.metrics.get("turns", 2) > 1
    assert any(step.metrics.get("causes/limit: turns", 0) for step in steps)
    assert any((step.batch["ended"] == Ended.TURNS).any() for step in steps)


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_in_any_order_of_time(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    once = history(run(load(episodes, "steps=2"), console)[1])
    assert once == history(run(load(episodes, "steps=2"), console)[1])
    episodes["data"]["environment"] = "tests.trainer.environments.AsyncDigits"
    assert once == history(run(load(episodes, "steps=2"), console)[1])
    assert once != history(run(load(episodes, "steps=2", "seed=1"), console)[1])


def test_the_next_turns_of_all_episodes_are_one_call_and_do_not_depend_on_each_other(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(episodes)
    parts = build(config, console)
    runner = EpisodeRunner(config, parts.execution, parts.tokenizer)
    calls, generate = [], parts.execution.generate

    def counted(prompts: DataProto, *args: Any, **options: Any) -> DataProto:
        calls.append(len(prompts))
        return generate(prompts, *args, **options)

    monkeypatch.setattr(parts.execution, "generate", counted)
    examples = parts.training.rows[:6]
    groups = [Group(i, example, range(10 + 2 * i, 12 + 2 * i)) for i, example in enumerate(examples)]
    together = play(runner, config, groups, seed=3)
    assert calls[0] == 12
    assert calls == [sum(len(e.turns) > turn for e in together) for turn in range(len(calls))]
    alone = play(runner, config, [Group(0, examples[2], range(14, 15))], seed=3)
    assert alone[0].turns == pytest.approx(together[4].turns) or [t.sampled_ids for t in alone[0].turns] == [
        t.sampled_ids for t in together[4].turns
    ]
    drawn = [turn.sampled_ids for episode in together for turn in episode.turns]
    assert len(set(drawn)) > len(together), "turns of one sample are not drawn alike"


def test_an_episode_of_several_rows_counts_once(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rewrites(TextRenderer):
        """Forgets what was said before the newest messages."""

        def delta(self, *args: Any, **options: Any) -> None:
            return None

        def prompt(self, messages: Any, tools: Any) -> list[int]:
            return super().prompt(messages[-1:], tools)

    monkeypatch.setattr("rlprims.trainer.sources.episodes.TextRenderer", Rewrites)
    episodes["algorithm"] = {"preset": "grpo", "group_size": 3, "kl_coef": 0.0, "mini_batches": 2}
    _, steps = run(load(episodes, "steps=2", "sampling.top_k=6", "prompts_per_generation=4"), console)
    for step in steps:
        batch = step.batch
        ids, advantages = batch["trajectory_ids"], batch["advantages"]
        assert len(batch) > len(set(batch["sample_id"].tolist())) == 12
        assert (batch["turns"] == torch.bincount(ids)[ids]).all()
        assert "kept_ids" in batch
        gap = (batch["old_log_probs"] - batch["rollout_log_probs"])[batch["response_mask"]]
        assert gap.abs().max() < 1e-4
        for rollout in range(int(ids.max()) + 1):
            of_rollout = advantages[ids == rollout][batch["response_mask"][ids == rollout]]
            assert (of_rollout == of_rollout[0]).all()
        first = torch.tensor([int((ids == i).nonzero()[0]) for i in range(int(ids.max()) + 1)])
        assert step.metrics["trained_score"] == pytest.approx(float(batch["scores"][first].mean()))
        tokens = float(batch["response_mask"].sum())
        assert step.metrics["length"] == pytest.approx(tokens / len(first))


@pytest.mark.slow
def test_resuming_between_steps_repeats_the_metrics(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(load(episodes, f"run_dir={whole}", "steps=4"), console) == 0
    assert start(load(episodes, f"run_dir={broken}", "steps=2"), console) == 0
    run_directory = RunDirectory.open(broken)
    assert resume(run_directory, run_directory.config(Config, ["steps=4"]), console) == 0

    def trained(path: Path) -> list[dict[str, Any]]:
        return [line for line in metrics_of(path) if line["kind"] == "train"]

    assert trained(broken) == trained(whole)
    last = Path("rollouts") / "step_000004.jsonl"
    assert (whole / last).read_text() == (broken / last).read_text()
    after = [line for line in metrics_of(whole) if line["kind"] == "eval"][-1]
    assert after["sampled/turns"] > 1
    assert 0 <= after["sampled/acc"] <= 1


@pytest.mark.slow
def test_sigkill_in_mid_episode(
    episodes: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    episodes["data"] |= {"environment": "tests.trainer.environments.Killed", "eval": None}
    episodes |= {"steps": 4, "checkpoint": {"every": 1}}
    config, whole, killed = write_config(episodes), tmp_path / "whole", tmp_path / "killed"

    rlprims("train", config, f"run_dir={whole}")
    train = [sys.executable, "-m", "rlprims", "train", str(config), f"run_dir={killed}"]
    died = subprocess.run(train, cwd=ROOT, env={**os.environ, "KILL_AT": "130"}, check=False)
    assert died.returncode == -signal.SIGKILL
    done = len(metrics_of(killed))
    assert 0 < done < 4
    rlprims("resume", killed)
    assert metrics_of(killed) == metrics_of(whole)


@pytest.mark.filterwarnings("ignore:.*Broken")
@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (50, "error: all of the first 16 episodes of {} failed for the same reason, so the run stops here: {}"),
        (1, "error: step 1: none of 12 episodes of {} has a score: 12 Broken.step returned NoneType; {}"),
    ],
)
def test_a_broken_environment_is_blamed_itself(
    episodes: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    batches: int,
    said: str,
) -> None:
    path = "tests.trainer.environments.Broken"
    episodes["data"] |= {"environment": path, "eval": None}
    episodes |= {"prompts_per_step": 4, "prompts_per_generation": 4}
    episodes["algorithm"]["filter"] = {"max_generation_batches": batches}
    assert main(["train", str(write_config(episodes))]) == 2
    told = capsys.readouterr().err
    assert told.startswith(said.format(path, "Broken.step returned NoneType: return Step(messages=[{'role': 'tool'"))
    assert "verifier" not in told


@pytest.mark.slow
def test_a_sick_environment_costs_its_groups_and_is_counted(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    episodes["data"]["environment"] = "tests.trainer.environments.Sick"
    episodes["episode_limits"] = {"turns": 3, "seconds": 0.5}
    with pytest.warns(UserWarning, match=r"Sick: Sick.step raised ValueError: cannot read this") as warned:
        trainer, steps = run(load(episodes, "steps=2", "data.shuffle=false"), console)
    dropped = {str(rows["question"][0]): (rows, reason) for step in steps for rows, reason in step.dropped}
    for question, reason in {
        "0+1=": "a response ended by error",
        "0+2=": "a response ended by error",
        "0+3=": "a response ended by error",
        "0+4=": "a response ended by timeout",
        "0+5=": "a score is not finite",
        "0+7=": "a response ended by error",
    }.items():
        rows, found = dropped[question]
        assert found == reason, question
        assert rows["scores"].isnan().all()
        assert all(rows["failure"])
    assert not dropped["0+1="][0]["response_mask"].any()
    trained = {str(q) for step in steps for q in step.batch["question"]}
    assert trained
    assert not trained & {"0+1=", "0+2=", "0+3=", "0+4=", "0+5=", "0+7="}
    assert all(step.batch["scores"].isfinite().all() for step in steps)
    counted = {name for step in steps for name in step.metrics if name.startswith("causes/")}
    assert {"causes/Sick.reset raised OSError", "causes/Sick.step raised ValueError"} <= counted
    assert {"causes/Sick.step took too long", "causes/Sick.step returned too much"} <= counted
    assert any("return Step(" in str(w.message) for w in warned)
    known = [
        i for step in steps for rows in (step.batch, *(r for r, _ in step.dropped)) for i in rows["sample_id"].tolist()
    ]
    known += [i for rows in trainer.collector.surplus for i in rows["sample_id"].tolist()]
    assert sorted(known) == list(range(trainer.collector.prompts.samples))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "columns"),
    [
        ({"preset": "turn_grpo", "group_size": 3, "epochs": 1}, {"turn_rewards", "turn_ids"}),
        ({"preset": "grpo", "group_size": 3, "kl_coef": 0.0, "advantage": "rlprims.advantage.gigpo"}, {"state_ids"}),
        ({"preset": "reinforce", "group_size": 3, "advantage": RETURNS}, {"turn_ids"}),
        ({"preset": "remax", "group_size": 2}, {"baseline_scores"}),
        ({"preset": "ppo", "group_size": 2}, {"values"}),
    ],
    ids=["turn_grpo", "gigpo", "turn returns", "remax", "ppo"],
)  # fmt: skip
def test_credit_by_turn_works_from_a_config(
    load: Callable[..., Config],
    episodes: dict[str, Any],
    console: Console,
    algorithm: dict[str, Any],
    columns: set[str],
) -> None:
    episodes["algorithm"] = algorithm
    config = load(episodes, "steps=2")
    assert not config.warnings()
    _, steps = run(config, console)
    for step in steps:
        batch = step.batch
        assert columns <= batch.batch.keys()
        assert math.isfinite(step.metrics["loss"])
        mask, turns = batch["response_mask"], batch["turn_ids"]
        earned = batch["turn_rewards"].sum(-1)
        if algorithm["preset"] == "turn_grpo":  # the outcome apart from what the turns earned
            torch.testing.assert_close(batch["rewards"].sum(-1), batch["scores"] - earned)
        else:
            torch.testing.assert_close(batch["rewards"].sum(-1), batch["scores"])
        if algorithm["preset"] == "reinforce":
            for row in range(len(batch)):
                numbers = sorted(set(turns[row][mask[row]].tolist()))
                by_turn = [batch["rewards"][row][turns[row] == turn].sum() for turn in numbers]
                for k, turn in enumerate(numbers):
                    expected = sum(0.5 ** (later - k) * by_turn[later] for later in range(k, len(numbers)))
                    got = batch["advantages"][row][(turns[row] == turn) & mask[row]]
                    torch.testing.assert_close(got, torch.full_like(got, float(expected)))


def test_states_are_the_environments_or_the_conversation(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    def second_states(names: bool) -> tuple[list[Any], list[Any]]:
        episodes["data"]["environment"] = {"fn": DIGITS, "names_states": names}
        config = load(episodes)
        parts = build(config, console)
        runner = EpisodeRunner(config, parts.execution, parts.tokenizer)
        groups = [Group(i, parts.training.rows[i], range(8 * i, 8 * i + 8)) for i in range(2)]
        played = play(runner, config, groups, seed=0)
        rows = runner.rows(groups, played)
        second = (rows["turn_ids"] == 1) & rows["response_mask"]
        found = [int(rows["state_ids"][i][second[i]][0]) for i in range(len(rows)) if second[i].any()]
        answered = [episode for episode in played if len(episode.turns) > 1]
        first = [bytes(e.turns[0].sampled_ids[:1]) if names else e.turns[1].prompt_ids for e in answered]
        return found, first

    for names in (True, False):
        found, labels = second_states(names)
        same = [[a == b for a in found] for b in found]
        assert same == [[a == b for a in labels] for b in labels]


@pytest.mark.slow
def test_recorded_episodes_are_read_shown_and_printed(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    assert start(load(episodes, "steps=1"), console) == 0
    path = Path(episodes["run_dir"])
    rows = read_rollouts(path)
    several = [row for row in rows if len(row.turn_rewards) > 1]
    assert several
    for row in rows:
        assert len(row.turn_ids) == len(row.observed) == len(row.tokens) == len(row.log_probs)
        assert sum(row.turn_rewards.values()) == pytest.approx(row.score, abs=1e-5)
        if row.advantages is not None:
            assert [a is None for a in row.advantages] == row.observed
        assert all(log_prob == 0 for log_prob, read in zip(row.log_probs, row.observed, strict=True) if read)
    page = write_page(path, tmp_path / "page.html").read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    shown = [
        row for step in data["steps"] for group in step["groups"] for row in group["rows"] if len(row["turns"]) > 1
    ]
    assert len(shown) == len(several)
    for row in shown:
        assert [turn["start"] for turn in row["turns"]] == [0, *(turn["stop"] for turn in row["turns"][:-1])]
        assert row["turns"][-1]["stop"] == len(row["tokens"])
        assert row["turns"][0]["read"] == 0 < min(turn["read"] for turn in row["turns"][1:])
    out = Console(file=io.StringIO(), width=120)
    print_rollouts(path, count=100, console=out)
    assert "rewards by turn" in out.file.getvalue()  # type: ignore[attr-defined]


# By hand.


def episode(sample_id: int, turns: list[Turn], *, is_done: bool = True, **options: Any) -> Episode:
    return Episode(sample_id, turns, [turn.prompt_ids for turn in turns], is_done=is_done, **options)


def rows_of(*episodes: Episode) -> DataProto:
    examples = [Example("", [], "", "hand") for _ in episodes]
    tokenizer = tiny.tokenizer()
    return episode_rows(episodes, examples, [0] * len(episodes), tokenizer=tokenizer, pad_token_id=0, version=5)


def test_rows_by_hand() -> None:
    turns = [
        Turn([5, 6], [7], [-0.5], version=2, reward=0.25),
        Turn([5, 6, 7, 8], [9, 1], [-0.1, -0.2], version=3, reward=1.0),
    ]
    rewritten = [turns[0], Turn([4], [9], [-0.3], reward=2.0)]
    cut = episode(3, turns, is_done=False, ended="turns")
    failed = episode(4, [], is_done=False, ended="error", failure="it failed")
    rows = rows_of(episode(1, turns), episode(2, rewritten), cut, failed)
    assert rows["sample_id"].tolist() == [1, 2, 2, 3, 4]
    assert rows["scores"].tolist()[:4] == [1.25, 2.25, 2.25, 1.25]
    assert math.isnan(rows["scores"][4])
    # The reward of the step that ended the episode is its outcome; one that a limit ended has none.
    assert rows["turn_rewards"].tolist() == [
        [0.25, 0.0, 0.0, 0.0], [0.25, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.25, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0],
    ]  # fmt: skip
    assert rows["observation_mask"].long().tolist()[0] == [0, 1, 0, 0]
    assert rows["weights_version"].tolist() == [2, 2, 0, 2, 5]
    assert not rows["response_mask"][4].any()
    assert rows["failure"][4] == "it failed"
    outcomes = outcome_scores(rows["scores"], rows["turn_rewards"], torch.tensor([0, 1, 1, 2, 3]))
    assert outcomes.tolist()[:4] == [1.0, 2.0, 2.0, 0.0]


def test_a_column_with_a_name_of_the_trainers_is_refused() -> None:
    for name in ("scores", "turns", "responses"):
        with pytest.raises(ValueError, match=rf"Step.columns has \['{name}'\], which are the trainer's own names"):
            rows_of(episode(1, [Turn([5], [7], [-0.5])], columns={name: 1.0}))


def test_a_group_in_which_nothing_was_sampled_has_rows() -> None:
    rows = rows_of(*(episode(i, [], is_done=False, ended="error", failure="down") for i in range(2)))
    assert rows["responses"].shape == (2, 1)
    assert not rows["response_mask"].any()


def test_groups_of_other_widths_are_padded_where_their_tokens_are_not() -> None:
    narrow = rows_of(episode(1, [Turn([5], [7], [-0.5])]))
    wide = rows_of(episode(2, [Turn([5, 6, 7], [7, 8], [-0.5, -0.25], extras={"kept": [[7, 8], None]})]))
    a, b = same_widths([narrow, wide], pad_token_id=0)
    assert a["prompts"].tolist() == [[0, 0, 5]]
    assert a["responses"].tolist() == [[7, 0]]
    assert a["attention_mask"].long().tolist() == [[0, 0, 1, 1, 0]]
    assert a["rollout_log_probs"].tolist() == [[-0.5, 0.0]]
    assert a["scores"].shape == (1,)
    assert b is wide


# The config.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.template": "Q: {question}"}, "with data.environment: expected chat, or no template"),
        ({"replay": "somewhere", "replay_scores": True}, "replay_scores is for single responses"),
        ({"data.environment": "tests.trainer.environments.Nobody"}, "cannot import"),
        (
            {"data.environment": "tests.trainer.environments.WithoutStep"},
            r"tests.trainer.environments.WithoutStep has no method step: expected reset\(\), .* returns a Step",
        ),
        ({"data.environment": {"fn": DIGITS, "mosst": 3}}, "no hyperparameter 'mosst': did you mean 'most'?"),
        ({"episode_limits.turns": 0}, "episode_limits.turns"),
    ],
)
def test_config_refuses_settings_that_episodes_cannot_have(
    load: Callable[..., Config], episodes: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    for dotted, value in changes.items():
        section, *rest = dotted.split(".")
        if rest:
            episodes.setdefault(section, {})[rest[0]] = value
        else:
            episodes[section] = value
    with pytest.raises((ValueError, ValidationError), match="(?s)" + message.replace("?", r"\?")):
        load(episodes)


def test_a_row_without_a_field_that_the_environment_takes_is_named(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    episodes["data"]["train"] = str(tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+1="}]))
    with pytest.raises(ValueError, match=r"rows.jsonl:1: tests.trainer.environments.Digits takes \['answer'\]"):
        build(load(episodes), console)


def test_without_acc_the_filter_looks_at_scores_as_of_a_verifier(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    """As a verifier that returns a number alone; any other column that is missing is an error of both."""
    episodes["data"] |= {"environment": "tests.trainer.environments.WithoutAcc", "eval": None}
    dapo = {"preset": "dapo", "group_size": 2, "max_length": 8, "buffer_length": 4}
    dapo["filter"] = {"max_generation_batches": 50}
    config = load(episodes | {"algorithm": dapo, "steps": 1})
    with pytest.warns(UserWarning, match="WithoutAcc gives no column acc: the filter looks at scores"):
        _, (step,) = run(config, console)
    assert "acc" not in step.batch
    assert all(reason.startswith("scores is ") for _, reason in step.dropped)
    dapo["filter"]["metric"] = "depth"
    with pytest.raises(ValueError, match=r"gave no column \['depth'\], which the algorithm reads"):
        run(load(episodes | {"algorithm": dapo, "steps": 1}), console)


DAPO: dict[str, Any] = {
    "preset": "dapo", "group_size": 2, "max_length": 8, "buffer_length": 4, "filter": {"max_generation_batches": 50}
}  # fmt: skip


@pytest.mark.slow
def test_streamed_groups_are_replaced_when_dropped_and_leave_no_surplus(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    """A batch of four groups; each that is dropped is replaced, and nothing is sampled beyond the batch."""
    episodes |= {"algorithm": DAPO, "stream": True, "prompts_per_generation": None, "steps": 2}
    episodes["data"]["eval"] = None
    _, steps = run(load(episodes), console)
    assert sum(len(step.dropped) for step in steps) > 0
    begun = 0
    for step in steps:
        groups = step.batch["group"].unique().tolist()
        gone = [int(rows["group"][0]) for rows, _ in step.dropped]
        assert len(groups) == 4
        assert step.surplus == []
        assert sorted([*groups, *gone]) == list(range(begun, begun + len(groups) + len(gone)))
        begun += len(groups) + len(gone)
        assert step.metrics["groups_sampled"] == len(groups) + len(gone)
        assert step.metrics["surplus"] == 0
    # Each episode is that of the same sample in a run of whole batches: it is a function of (seed, sample, turn).
    _, (whole, *_) = run(load(episodes | {"stream": False, "steps": 1}), console)
    one = {int(row["sample_id"]): row["responses"].tolist() for row in whole.batch.split(1)}
    both = [row for row in steps[0].batch.split(1) if int(row["sample_id"]) in one]
    for row in both:
        wide = row["responses"].flatten().tolist()
        short = one[int(row["sample_id"])][0]
        assert wide[: min(len(wide), len(short))] == short[: min(len(wide), len(short))]


@pytest.mark.slow
def test_groups_that_stream_do_not_depend_on_timing(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console
) -> None:
    episodes |= {"algorithm": DAPO, "stream": True, "steps": 2}
    episodes["data"]["eval"] = None
    twice = []
    for environment in ("AsyncDigits", "Digits"):
        episodes["data"]["environment"] = f"tests.trainer.environments.{environment}"
        twice.append(history(run(load(episodes), console)[1]))
    assert twice[0] == twice[1]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stream_is_sampled_ahead_of_the_update(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, ahead: int
) -> None:
    """All turns of a batch are of one version of the weights: the newest; with ``max_staleness: 1`` the one before."""
    episodes |= {
        "algorithm": DAPO | {"corrections": ["rlprims.corrections.tis"]},
        "stream": True,
        "max_staleness": ahead,
    }
    episodes["data"]["eval"] = None
    _, steps = run(load(episodes, "steps=3"), console)
    versions = [step.batch["versions"][step.batch["response_mask"]].unique().tolist() for step in steps]
    assert versions == [[1], [2 - ahead], [3 - ahead]]
    assert [step.metrics["staleness_max"] for step in steps] == [0, ahead, ahead]
    samples = torch.cat([group["sample_id"].unique() for step in steps for group in groups_of(step)])
    assert len(samples) == len(samples.unique()), "an episode is trained on once"
    assert all(len(step.batch["group"].unique()) == 4 for step in steps)


def groups_of(step: StepResult) -> list[DataProto]:
    return [step.batch, *(rows for rows, _ in step.dropped)]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_that_streams_resumes_alike(
    load: Callable[..., Config], episodes: dict[str, Any], console: Console, tmp_path: Path, ahead: int
) -> None:
    episodes |= {"algorithm": DAPO, "stream": True, "max_staleness": ahead}
    episodes["data"]["eval"] = None
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(load(episodes, f"run_dir={whole}", "steps=3"), console) == 0
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000003")
    record = RunDirectory.open(broken)
    assert resume(record, record.config(Config), console) == 0
    assert metrics_of(broken) == metrics_of(whole)


def test_a_stream_ends_at_its_limit(load: Callable[..., Config], episodes: dict[str, Any], console: Console) -> None:
    never = {**DAPO, "filter": {"keep": "tests.trainer.verifiers.keep_nothing", "max_generation_batches": 2}}
    episodes |= {"algorithm": never, "stream": True, "steps": 1}
    with pytest.raises(SamplingExhausted, match=r"0 of 4 groups after 2 generation batches, the limit\. Of 12 groups"):
        run(load(episodes), console)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"preset": "remax", "group_size": 2}}, "stream: true samples no greedy responses"),
    ],
)
def test_config_refuses_episodes_that_cannot_stream(
    load: Callable[..., Config], episodes: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    changed = {**episodes, **change, "stream": True, "data": {**episodes["data"], **change.get("data", {})}}
    with pytest.raises(ValueError, match=message):
        load(changed)
