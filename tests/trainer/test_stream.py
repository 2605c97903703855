"""``stream: true`` for responses: a batch that does not depend on which of its groups is ready first."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.execution import BatchStream
from rlprims.execution.local import LocalExecution
from rlprims.filters import SamplingExhausted
from rlprims.trainer.config import Config
from tests.trainer.test_episodes import history, run


@pytest.fixture
def streamed(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"stream": True, "steps": 3, "data": settings["data"] | {"eval": None}}


class Shuffled(BatchStream):
    """Hands out one part at a time, in an order of its own."""

    def __init__(
        self, generate: Callable[[DataProto], DataProto], order: random.Random, *, versions: bool = False
    ) -> None:
        super().__init__(generate, versions=versions)
        self.order = order
        self.complete: dict[int, DataProto] = {}

    def take(self) -> dict[int, DataProto]:
        if self._submitted:
            self.complete |= super().take()
        number = self.order.choice(list(self.complete))
        return {number: self.complete.pop(number)}


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_readiness_changes_nothing(
    load: Callable[..., Config],
    streamed: dict[str, Any],
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    _, expected = run(load(streamed), console)
    order = random.Random(seed)
    in_order = LocalExecution.stream
    monkeypatch.setattr(
        LocalExecution, "stream", lambda *args, **settings: Shuffled(in_order(*args, **settings).generate, order)
    )
    _, steps = run(load(streamed), console)
    assert sum(len(step.dropped) for step in steps) > 0
    for mine, other in zip(history(steps), history(expected), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5, nan_ok=True)  # log-probs round as in other batches
    for ours, theirs in zip(steps, expected, strict=True):
        for name in ("sample_id", "responses", "scores"):
            assert torch.equal(ours.batch[name], theirs.batch[name])
        assert [int(rows["group"][0]) for rows, _ in ours.dropped] == [int(r["group"][0]) for r, _ in theirs.dropped]


def test_the_batch_is_the_first_kept_groups_and_nothing_is_left_over(
    load: Callable[..., Config], streamed: dict[str, Any], console: Console
) -> None:
    """The groups of whole generation batches in their order, without those that such a batch samples beyond it."""
    _, steps = run(load(streamed), console)
    _, (whole, *_) = run(load(streamed | {"stream": False, "steps": 1}), console)
    first = steps[0]
    assert torch.equal(first.batch["responses"], whole.batch["responses"])
    assert torch.equal(first.batch["scores"], whole.batch["scores"])
    begun = 0
    for step in steps:
        kept, gone = step.batch["group"].unique().tolist(), [int(rows["group"][0]) for rows, _ in step.dropped]
        assert len(kept) == 4
        assert step.surplus == []
        assert sorted(kept + gone) == list(range(begun, begun + len(kept) + len(gone)))
        begun += len(kept) + len(gone)
        assert step.metrics["staleness_max"] == 0


def test_stream_ends_at_the_limit_of_batches(
    load: Callable[..., Config], streamed: dict[str, Any], console: Console
) -> None:
    streamed["algorithm"] |= {"filter": {"keep": "tests.trainer.verifiers.keep_nothing", "max_generation_batches": 2}}
    with pytest.raises(SamplingExhausted, match=r"0 of 4 groups after 2 generation batches, the limit\. Of 12 groups"):
        run(load(streamed), console)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"preset": "remax", "group_size": 2}}, "stream: true samples no greedy responses"),
        (
            {"execution": "ray", "ray": {"colocate": True}, "model": {"path": "x", "reward": "y"}},
            "with ray.colocate the reward model waits",
        ),
        ({"execution": "ray", "data": {"train": "x", "pools": {"all": [0.0, 1.0]}}}, "the speed of the engines"),
    ],
)
def test_config_refuses_settings_that_cannot_stream(
    load: Callable[..., Config], streamed: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(streamed | change)
