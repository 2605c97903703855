"""``max_staleness`` of 2 and more: a bound that is met, groups that are each trained on once, and a resume."""

import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.execution.local import LocalExecution
from rlprims.filters import SamplingExhausted
from rlprims.runs.directory import RunDirectory
from rlprims.trainer.config import Config
from rlprims.trainer.session import resume, start
from tests.trainer.runs import metrics_of
from tests.trainer.test_episodes import history, run
from tests.trainer.test_stream import Shuffled

TIS = {"corrections": ["rlprims.corrections.tis"]}


@pytest.fixture
def flowing(settings: dict[str, Any]) -> dict[str, Any]:
    ours = {"stream": True, "max_staleness": 2, "steps": 5, "algorithm": settings["algorithm"] | TIS}
    return settings | ours | {"data": settings["data"] | {"eval": None}}


@pytest.fixture(params=["responses", "episodes"])
def either(request: pytest.FixtureRequest, flowing: dict[str, Any]) -> dict[str, Any]:
    """A run of responses, or of episodes of up to three turns."""
    if request.param == "responses":
        return flowing
    data = flowing["data"] | {"environment": "tests.trainer.environments.Digits"}
    return flowing | {"data": data, "episode_limits": {"turns": 3}, "verifier": None}


def samples_of(groups: list[DataProto]) -> list[int]:
    return [sample for rows in groups for sample in rows["sample_id"].tolist()]


class OneAtATime(Shuffled):
    """Samples and hands out one part at a time, as if each response took as long as a random number of others."""

    def take(self) -> dict[int, DataProto]:
        number = self.order.choice(list(self._submitted)[:7])
        others, self._submitted = self._submitted, {number: self._submitted[number]}
        answer = super(Shuffled, self).take()
        self._submitted = {part: prompts for part, prompts in others.items() if part != number}
        return answer


@pytest.mark.parametrize("staleness", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_kept_and_each_group_is_trained_on_once(
    load: Callable[..., Config],
    flowing: dict[str, Any],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    staleness: int,
) -> None:
    """Groups are complete in any order, one after another; each sample is that of its number and version."""
    order = random.Random(seed)
    plain = LocalExecution.stream
    monkeypatch.setattr(
        LocalExecution,
        "stream",
        lambda *args, **settings: OneAtATime(plain(*args, **settings).generate, order, versions=True),
    )
    _, steps = run(load(flowing | {"max_staleness": staleness}), console)
    seen, oldest = list[int](), 0.0
    for step in steps:
        groups = step.batch["group"].unique().tolist()
        assert len(groups) == 4
        assert step.surplus == []
        assert step.metrics["groups_sampled"] == 4 + len(step.dropped)
        assert step.metrics["groups_dropped"] == len(step.dropped)
        assert step.metrics["generation_batches"] == -(-step.metrics["groups_sampled"] // 6)
        seen += samples_of([step.batch, *(rows for rows, _ in step.dropped)])
        age = step.number - step.batch["versions"][step.batch["response_mask"]]  # version 1 trains step 1
        oldest = max(oldest, float(age.max()))
        assert age.min() >= 0
        assert step.metrics["staleness_max"] == float((step.number - step.batch["weights_version"]).max())
    assert oldest <= staleness
    assert len(seen) == len(set(seen)), "a sample is trained on, or dropped, once"
    assert sum(len(step.dropped) for step in steps) > 0
    overtaken = [
        min(step.batch["group"].tolist()) < max(earlier.batch["group"].tolist()) for earlier, step in pairwise(steps)
    ]
    assert any(overtaken), "a slow group was overtaken"


@pytest.mark.slow
def test_in_one_process_it_repeats_itself_and_a_resume_repeats_the_rest(
    load: Callable[..., Config], either: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    flowing = either
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flowing["checkpoint"] = {"every": 2}
    assert start(load(flowing, f"run_dir={whole}"), console) == 0
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoints" / "step_000005")
    record = RunDirectory.open(broken)
    assert resume(record, record.config(Config), console) == 0
    assert metrics_of(broken) == metrics_of(whole)


@pytest.mark.slow
def test_a_run_that_is_given_more_steps_is_the_longer_run(
    load: Callable[..., Config], flowing: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    """What was being sampled after the last step begins again."""
    long, short = tmp_path / "long", tmp_path / "short"
    assert start(load(flowing, f"run_dir={long}", "steps=4"), console) == 0
    assert start(load(flowing, f"run_dir={short}", "steps=2"), console) == 0
    record = RunDirectory.open(short)
    assert resume(record, record.config(Config, ["steps=4"]), console) == 0
    ours, theirs = ([line for line in metrics_of(run) if line["kind"] == "train"] for run in (short, long))
    assert ours == theirs


def test_flow_goes_on_after_an_evaluation_and_ends_at_the_limit(
    load: Callable[..., Config], flowing: dict[str, Any], console: Console
) -> None:
    _, steps = run(load(flowing), console)
    assert len(history(steps)) == 5
    flowing["algorithm"] |= {"filter": {"keep": "tests.trainer.verifiers.keep_nothing", "max_generation_batches": 2}}
    with pytest.raises(SamplingExhausted, match=r"0 of 4 groups after 2 generation batches, the limit"):
        run(load(flowing), console)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": False}, "max_staleness: 2 needs stream: true; otherwise use 0 or 1"),
        ({"execution": "ray", "ray": {"colocate": True}}, "without ray.colocate"),
        ({"replay": "somewhere"}, "cannot replay"),
        ({"execution": "ray", "model": {"path": "x", "lora": {"sync": "adapter"}}}, "needs model.lora.sync: merged"),
    ],
)
def test_config_refuses_settings_that_cannot_flow(
    load: Callable[..., Config], flowing: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(flowing | change)


def test_a_resume_with_another_kind_of_schedule_is_refused(
    load: Callable[..., Config], flowing: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    assert start(load(flowing, "steps=2"), console) == 0
    record = RunDirectory.open(tmp_path / "run")
    with pytest.raises(ValueError, match="max_staleness 2 or more cannot be resumed with less"):
        resume(record, record.config(Config, ["max_staleness=0", "steps=3"]), console)


def test_versions_are_those_of_the_batches_weights(
    load: Callable[..., Config], either: dict[str, Any], console: Console
) -> None:
    """In one process a group is sampled as a whole, with the weights of the moment."""
    _, steps = run(load(either), console)
    samples = torch.cat([rows["sample_id"].unique() for s in steps for rows in (s.batch, *(r for r, _ in s.dropped))])
    assert len(samples) == len(samples.unique()), "a sample is trained on, or dropped, once"
    for step in steps:
        assert len(step.batch["group"].unique()) == 4
        assert step.metrics["staleness_max"] <= 2
        of_rows = step.batch["versions"].where(step.batch["response_mask"], step.batch["weights_version"][:, None])
        assert torch.equal(of_rows, step.batch["weights_version"][:, None].expand_as(of_rows))
