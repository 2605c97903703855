"""Groups of earlier batches in a batch: bounds, draws, a run's books, a resume, and the gradient by enumeration."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims import algorithms, lab
from rlprims.data_proto import DataProto
from rlprims.layout import sequence_sum
from rlprims.runs.directory import RunDirectory
from rlprims.runs.records import read_rollouts
from rlprims.runs.steps import StepResult
from rlprims.trainer.config import Config
from rlprims.trainer.old_groups import OldGroups, OldGroupsConfig, old_group_metrics
from rlprims.trainer.scoring.columns import by_group
from rlprims.trainer.scoring.groups import join_groups
from rlprims.trainer.session import resume, start
from tests import tiny
from tests.test_enumeration import (
    CLOSE,
    MASK,
    POLICY_GRADIENT,
    RESPONSES,
    SCORES,
    THETA,
    gradient,
    log_probs,
    probabilities,
    random_table,
)
from tests.trainer.runs import metrics_of
from tests.trainer.shared_cluster import rlprims
from tests.trainer.test_episodes import history, run

TIS = {"corrections": ["rlprims.corrections.tis"]}
OLD = {"share": 0.5, "max_age": 2, "capacity": 5}


def group(number: int, *versions: int) -> DataProto:
    """A group whose rows were begun by these weights."""
    tensors = {"group": torch.full((len(versions),), number), "weights_version": torch.tensor(versions)}
    return DataProto.from_dict(tensors=tensors)


def numbers(groups: Sequence[DataProto]) -> list[int]:
    return [int(rows["group"][0]) for rows in groups]


class TestTheBuffer:
    @pytest.mark.parametrize(
        ("share", "groups", "count"),
        [(0.0, 8, 0), (0.01, 8, 1), (0.25, 8, 2), (0.25, 7, 1), (0.3, 10, 3), (0.29, 100, 29), (0.99, 4, 3)],
    )
    def test_a_share_is_rounded_down_but_to_one_at_least(self, share: float, groups: int, count: int) -> None:
        assert OldGroupsConfig(share=share).count(groups) == count

    def test_no_group_is_used_beyond_the_age(self) -> None:
        """By the oldest of its rows: groups 0 and 3 are of version 1, and 3 updates old for version 4."""
        buffer = OldGroups(OldGroupsConfig(share=0.9, max_age=2, capacity=9), in_batch=9, seed=0)
        buffer.add([group(0, 1, 1), group(1, 2, 2), group(2, 3, 3), group(3, 4, 1)])
        drawn = buffer.draw(version=3)
        assert sorted(numbers(drawn)) == [0, 1, 2, 3]
        assert {int(rows["group"][0]): rows["group_age"].tolist() for rows in drawn} == {
            0: [2.0, 2.0],
            1: [1.0, 1.0],
            2: [0.0, 0.0],
            3: [2.0, 2.0],
        }
        assert sorted(numbers(buffer.draw(version=4))) == [1, 2]
        assert sorted(numbers(buffer.groups)) == [1, 2], "the others have left"
        assert buffer.draw(version=6) == []

    def test_beyond_the_capacity_the_oldest_leave(self) -> None:
        buffer = OldGroups(OldGroupsConfig(share=0.5, capacity=3), in_batch=4, seed=0)
        buffer.add([group(0, 1), group(1, 2)])
        buffer.add([group(2, 1), group(3, 3)])
        assert numbers(buffer.groups) == [2, 1, 3]
        assert all("group_age" not in rows for rows in buffer.groups)

    def test_draws_are_by_seed_and_version_each_group_once_and_even(self) -> None:
        def drawn(seed: int, version: int) -> list[int]:
            buffer = OldGroups(OldGroupsConfig(share=0.5, max_age=9999), in_batch=4, seed=seed)
            buffer.add([group(number, 1) for number in range(5)])
            return numbers(buffer.draw(version))

        assert drawn(3, 7) == drawn(3, 7)
        draws = [drawn(0, version) for version in range(1, 2001)]
        assert len({tuple(each) for each in draws}) == 10, "all pairs of 5"
        assert draws[:50] != [drawn(1, version) for version in range(1, 51)]
        counts = Counter(number for each in draws for number in set(each))
        assert all(abs(count - 800) < 5 * (2000 * 0.4 * 0.6) ** 0.5 for count in counts.values())
        assert sum(counts.values()) == 4000, "each at most once in a batch"

    def test_without_a_share_nothing_is_kept(self) -> None:
        buffer = OldGroups(OldGroupsConfig(), in_batch=4, seed=0)
        buffer.add([group(0, 1)])
        assert (buffer.groups, buffer.draw(1)) == ([], [])

    def test_metrics_of_ages_and_weights(self) -> None:
        """Weights 2 and 1/4 of two old tokens: mean 9/8, ESS (9/8)² / ((4 + 1/16) / 2); the new row has no say."""
        ratios = torch.tensor([[9.0, 9.0], [2.0, 7.0], [0.25, 7.0]])
        columns = {
            "rollout_log_probs": torch.zeros(3, 2),
            "old_log_probs": ratios.log(),
            "response_mask": torch.tensor([[True, True], [True, False], [True, False]]),
            "group_age": torch.tensor([torch.nan, 1.0, 4.0]),
        }
        found = old_group_metrics(DataProto.from_dict(tensors=columns))
        names = ("weight", "ess", "age", "age_max")
        expected = (1.125, 1.125**2 / (4.0625 / 2), 2.5, 4.0)
        assert found == pytest.approx({f"old_groups/{name}": x for name, x in zip(names, expected, strict=True)})
        del columns["group_age"]
        assert old_group_metrics(DataProto.from_dict(tensors=columns)) == {}


class TestTheGradient:
    """Groups of two responses of another policy, each with its probability: all 49 are trained on again."""

    SAMPLER = random_table(1)
    PAIRS = torch.tensor(list(product(range(len(RESPONSES)), repeat=2)))

    def groups(self, sampler: torch.Tensor, *, first: int, version: int) -> list[DataProto]:
        columns = {"rollout_log_probs": log_probs(sampler), "response_mask": MASK, "shaped_scores": SCORES}
        columns["response"] = torch.arange(len(RESPONSES))
        labels = {"weights_version": torch.tensor([version] * 2)}
        return [
            DataProto.from_dict(
                tensors={**{k: x[pair] for k, x in columns.items()}, **labels, "group": torch.tensor([first + i] * 2)}
            )
            for i, pair in enumerate(self.PAIRS)
        ]

    def of(self, correction: dict[str, Any], *, with_new: bool = False) -> torch.Tensor:
        """The expected gradient of the objective for all old groups, or for as many old and new ones."""
        algorithm = algorithms.rloo().replace(
            group_size=2, corrections=[{"fn": "rlprims.corrections.importance_weights", **correction}]
        )
        buffer = OldGroups(OldGroupsConfig(share=0.5, capacity=49), in_batch=98, seed=0)
        buffer.add(self.groups(self.SAMPLER, first=0, version=1))
        old = buffer.draw(version=3)
        assert len(old) == 49
        batch = join_groups([*(self.groups(THETA, first=49, version=3) if with_new else []), *old])
        assert len(by_group(batch)) == len(old) * (1 + with_new), "no two groups have one number"
        is_old = batch["weights_version"] == 1
        of_old, of_new = (probabilities(table)[batch["response"]] for table in (self.SAMPLER, THETA))
        chance = torch.where(is_old, of_old, of_new)
        pair = chance.view(-1, 2).prod(-1).repeat_interleave(2) / 2 / (1 + with_new)
        data = dict(batch.batch.items()) | {"group_ids": batch["group"]}
        data["old_log_probs"] = log_probs(THETA)[batch["response"]]
        data |= algorithms.estimate_advantages(algorithm, data)
        data |= algorithms.token_weights(algorithm, data, generator=torch.Generator())
        (part,) = algorithms.objective_parts(algorithm)

        def objective(theta: torch.Tensor) -> torch.Tensor:
            losses = part.losses(data | {"log_probs": log_probs(theta)[batch["response"]]})
            return -(sequence_sum(losses, data["response_mask"]) * pair).sum()

        return gradient(objective, THETA)

    @pytest.mark.parametrize("with_new", [False, True])
    def test_it_is_that_of_new_groups_if_the_weights_are_not_truncated(self, with_new: bool) -> None:
        got = self.of({"level": "sequence", "high": float("inf")}, with_new=with_new)
        torch.testing.assert_close(got, POLICY_GRADIENT, **CLOSE)

    def test_truncated_or_without_weights_it_is_not(self) -> None:
        truncated = self.of({"level": "sequence", "high": 1.0})
        unweighted = self.of({"level": "sequence", "low": 1.0, "high": 1.0})
        for other in (truncated, unweighted):
            assert (other - POLICY_GRADIENT).abs().max() > 0.01


DIGITS = {"environment": "tests.trainer.environments.Digits"}
GRPO = {"preset": "grpo", "group_size": 3, **TIS}
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "surplus and filter": ({}, ()),
    "rounds": ({"algorithm": GRPO, "prompts_per_generation": None}, ()),
    "a stream": ({"stream": True, "prompts_per_generation": None}, ()),
    "one ahead": ({"algorithm": GRPO, "prompts_per_generation": None, "max_staleness": 1}, ("old_groups.max_age=3",)),
    "episodes": ({"verifier": None, "episode_limits": {"turns": 3}, "environment": True, "algorithm": GRPO}, ()),
    "truncated": ({"algorithm": GRPO}, ("sampling.top_p=0.8", "sampling.top_k=12")),
    "critic": ({"algorithm": {"preset": "ppo", "group_size": 2, "mini_batches": 2, "epochs": 2, **TIS}}, ()),
    "greedy baseline": ({"algorithm": {"preset": "remax", "group_size": 2, **TIS}}, ()),
    "experts": ({"algorithm": GRPO, "mixture": True}, ()),
    "pools": ({"algorithm": GRPO}, ("data.pools={open: [0.0, 1.0], easy: [0.9, 0.2]}",)),
    "left out": (
        {"algorithm": GRPO, "verifier": "tests.trainer.verifiers.raises_on_some"},
        ("unscored=leave_out",),
    ),
}


@pytest.fixture
def of_kind(settings: dict[str, Any], load: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    def make(kind: str, *overrides: str) -> Config:
        changes, options = KINDS[kind]
        changes = dict(changes)
        data, model = settings["data"] | {"eval": None}, dict(settings["model"])
        if changes.pop("environment", False):
            data |= DIGITS
        if changes.pop("mixture", False):
            path = tiny.save_mixture(tmp_path / "mixture", norm_topk_prob=True)
            model |= {"path": str(path), "replay_routes": True}
        algorithm = {"algorithm": settings["algorithm"] | TIS}
        values = settings | algorithm | changes | {"data": data, "model": model, "old_groups": OLD, "steps": 5}
        return load(values, *options, *overrides)

    return make


def check_books(config: Config, steps: list[StepResult]) -> int:
    """Every group of every batch is new or a copy of one that was trained on; returns the number of old ones."""
    trained, waiting, most = dict[int, DataProto](), 0, config.old_groups.count(4)
    for step in steps:
        groups, metrics = by_group(step.batch), step.metrics
        assert len(groups) == len(step.batch["group"].unique()) == 4
        assert len(step.batch["sample_id"].unique()) == 4 * config.algorithm.group_size
        old = {number: rows for number, rows in groups.items() if number in trained}
        assert len(old) == metrics["old_groups"] <= most
        usable = [
            number for number, rows in trained.items()
            if step.number - int(rows["weights_version"].min()) <= config.old_groups.max_age
        ]  # fmt: skip
        assert len(old) == min(most, len(usable), config.old_groups.capacity), "none is missing"
        assert waiting + metrics["groups_sampled"] == 4 - len(old) + metrics["groups_dropped"] + metrics["surplus"]
        assert config.prompts_per_generation is not None or metrics["surplus"] == 0
        waiting, ages = metrics["surplus"], list[float]()
        for number, rows in old.items():
            first = trained[number]
            width = first["responses"].shape[1]
            for name in ("responses", "rollout_log_probs", "response_mask", "versions", "scores", "shaped_scores"):
                if name in first:
                    was, now = first[name], rows[name]
                    assert torch.equal(now if now.dim() < 2 else now[:, :width], was), name
            assert torch.equal(rows["weights_version"], first["weights_version"])
            assert not torch.equal(rows["old_log_probs"][:, :width], first["old_log_probs"]), "of today's weights"
            ages += [step.number - float(first["weights_version"].min())] * len(rows)
            assert rows["group_age"].tolist() == ages[-len(rows) :]
        if old:
            assert metrics["old_groups/age"] == pytest.approx(sum(ages) / len(ages))
            assert 0 < metrics["old_groups/age_max"] == max(ages) <= config.old_groups.max_age
            assert metrics["old_groups/age_max"] <= metrics["staleness_max"]
            assert 0 < metrics["old_groups/ess"] < 1 - 1e-6
        new = {number: rows for number, rows in groups.items() if number not in old}
        assert all(rows["group_age"].isnan().all() for rows in new.values() if "group_age" in rows)
        trained |= new
    return sum(int(step.metrics["old_groups"]) for step in steps)


@pytest.mark.parametrize("kind", KINDS)
def test_the_books_of_a_run(of_kind: Callable[..., Config], console: Console, kind: str) -> None:
    config = of_kind(kind)
    trainer, steps = run(config, console)
    assert check_books(config, steps) >= 4
    assert steps[0].metrics["old_groups"] == 0
    assert "old_groups/age" not in steps[0].metrics
    assert len(trainer.collector.old_groups.groups) <= config.old_groups.capacity
    tokens = sum(float(step.metrics["generated_tokens"]) for step in steps)
    assert steps[-1].metrics["generated_tokens_total"] == tokens


def test_a_share_of_0_is_a_run_without_old_groups(of_kind: Callable[..., Config], console: Console) -> None:
    off = ("old_groups.share=0", "old_groups.max_age=1")
    trainer, steps = run(of_kind("surplus and filter", *off), console)
    assert all(not [name for name in step.metrics if name.startswith("old_groups")] for step in steps)
    assert all("group_age" not in step.batch for step in steps)
    assert trainer.collector.old_groups.groups == []
    _, others = run(of_kind("surplus and filter"), console)
    assert history(others)[0] == history(steps)[0] | {"old_groups": 0}, "the first batch has none yet"
    sampled = [sum(step.metrics["groups_sampled"] for step in each) for each in (others, steps)]
    assert sampled[0] < sampled[1], "that is what they are for"


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("surplus and filter", 2),
        ("one ahead", 2),
        pytest.param("episodes", 4, marks=pytest.mark.slow),
        pytest.param("experts", 4, marks=pytest.mark.slow),
        pytest.param("truncated", 2, marks=pytest.mark.slow),
        pytest.param("a stream", 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_whole_run_line_by_line(
    of_kind: Callable[..., Config],
    console: Console,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    ends: int,
) -> None:
    monkeypatch.setattr("rlprims.trainer.session.draw_curves", lambda runs, out: out)  # the slowest part of it
    config, broken = of_kind(kind), tmp_path / "broken"
    assert start(config, console) == 0
    shutil.copytree(config.run_dir, broken)
    for step in {2, 4, 5} - {ends}:
        if step > ends:
            shutil.rmtree(broken / "checkpoints" / f"step_{step:06d}")
    run = RunDirectory.open(broken)
    assert resume(run, run.config(Config, []), console) == 0
    assert metrics_of(broken) == metrics_of(config.run_dir)
    assert sum(line["old_groups"] for line in metrics_of(broken) if line["step"] > ends) > 0
    for step in range(1, 6):
        name = f"rollouts/step_{step:06d}.jsonl"
        assert (broken / name).read_text() == (config.run_dir / name).read_text()


def test_records_say_which_groups_are_old_and_they_are_loaded_once(
    of_kind: Callable[..., Config], console: Console
) -> None:
    config = of_kind("rounds")
    assert start(config, console) == 0
    seen, again = set[int | None](), 0
    for step in range(1, 6):
        rows = read_rollouts(config.run_dir, step)
        assert {row.status for row in rows} == {"trained"}
        for row in rows:
            assert (row.columns.get("group_age") is not None) == (row.sample_id in seen)
            again += row.sample_id in seen
        seen |= {row.sample_id for row in rows}
    assert again > 0
    loaded = lab.load_run(config.run_dir, range(1, 6))
    assert len(loaded) == len(seen)
    assert loaded["group_ids"].bincount().tolist() == [3] * (len(seen) // 3)
    last = lab.load_run(config.run_dir, 5)
    assert len(last) == 12, "one step has all that it trained"
    assert last["group_age"].isfinite().sum() == 6


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.corrections=[]", "old_groups.share: 0.5 needs importance weights, not in dapo: add "
         "corrections: [rlprims.corrections.tis], or use a loss that reads rollout_log_probs"),
        ("prompts_per_step=1", "share: 0.5 of prompts_per_step: 1 leaves no group to sample: use more prompts"),
        ("old_groups.capacity=1", "old_groups.share: 0.5 is 2 groups, and old_groups.capacity: 1 is fewer"),
        ("old_groups={share: 0.5, max_age: 1}", None),
        ("max_staleness=1", None),
        ("replay=somewhere", "old_groups.share: 0.5 trains on samples of this run: leave out either it or replay"),
        ("recompute_log_probs_every=2", "recompute_log_probs_every=2 uses the sampler's log-probs as the trainer's: it "
         "needs execution: local, max_staleness: 0, no replay and no old_groups; use 1"),
        ("old_groups.share=1", "old_groups.share: Input should be less than 1"),
        ("old_groups.age=1", "unknown"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(of_kind: Callable[..., Config], override: str, line: str | None) -> None:
    if line is None:
        assert of_kind("surplus and filter", override).old_groups.share == 0.5
        return
    with pytest.raises(ValueError, match=r"config\.yaml") as refused:
        of_kind("surplus and filter", override)
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("max_staleness=1", "old_groups.max_age=1"), "needs old_groups.max_age above max_staleness: 1, got 1"),
        (("max_staleness=2", "stream=true"), "needs max_staleness: 0 or 1, got 2: groups that go on through updates"),
        (
            ("algorithm={preset: spo, corrections: [rlprims.corrections.tis]}",),
            "twice in algorithm.baseline: leave out one",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    of_kind: Callable[..., Config], overrides: tuple[str, ...], line: str
) -> None:
    with pytest.raises(ValueError, match=r"old_groups\.share: 0\.5") as refused:
        of_kind("surplus and filter", *overrides)
    assert line in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_loss_that_reads_the_samplers_log_probs_is_a_correction(of_kind: Callable[..., Config]) -> None:
    assert of_kind("rounds", "algorithm={preset: dppo, group_size: 3}").old_groups.share == 0.5


@pytest.mark.ray
@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.release)])
def test_on_ray_the_metrics_are_those_of_one_process(
    of_kind: Callable[..., Config], tmp_path: Path, ahead: int
) -> None:
    """Also after a resume: the kept groups are in the checkpoint."""
    options = {"training_workers": 2, "rollout_workers": 1, "engine": "hf"}
    where = ("execution=ray", f"ray={json.dumps(options)}", "optimizer={lr: 1.0e-4, eps: 1.0e-4}")
    config = of_kind("rounds", f"max_staleness={ahead}", f"old_groups.max_age={2 + ahead}", *where, "steps=4")
    path = tmp_path / "written.yaml"
    path.write_text(config.to_yaml())
    rlprims("train", path, f"run_dir={tmp_path / 'local'}", "execution=local")
    rlprims("train", path, f"run_dir={tmp_path / 'ray'}", "steps=2")
    (tmp_path / "ray" / ".lock").unlink()  # this process holds it still
    rlprims("resume", tmp_path / "ray", "steps=4")
    pairs = list(zip(metrics_of(tmp_path / "ray"), metrics_of(tmp_path / "local"), strict=True))
    for ours, theirs in pairs:
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    assert [theirs["old_groups"] for _, theirs in pairs] == [0, 2, 2, 2]
