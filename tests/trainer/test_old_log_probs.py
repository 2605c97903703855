"""The sampler's log-probs in the place of the trainer's: the same run, and refused where they are others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.data_proto import DataProto
from rlprims.runs.steps import train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from rlprims.trainer.update import old_log_probs


@pytest.fixture
def trainer(load: Callable[..., Config], settings: dict[str, Any], console: Console) -> Trainer:
    config = load(
        settings, "recompute_log_probs_every=3", "steps=3", "algorithm.filter=null", "prompts_per_generation=4"
    )
    parts = build(config, console)
    return Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)


def test_between_two_checks_nothing_is_computed(trainer: Trainer) -> None:
    forwards: list[int] = []
    compute = trainer.execution.log_probs

    def counted(batch: DataProto, *, reference: bool = False) -> torch.Tensor:
        forwards.append(trainer.step_number)
        return compute(batch, reference=reference)

    trainer.is_checked = True  # without the comparison of the first step
    trainer.execution.log_probs = counted  # type: ignore[method-assign]
    batches = list[DataProto]()
    train(trainer, [lambda _, step: batches.append(step.batch)])
    assert forwards == [1]
    for batch in batches[1:]:
        assert torch.equal(batch["old_log_probs"], batch["rollout_log_probs"])


def test_old_samples_are_computed_again(trainer: Trainer) -> None:
    batch = trainer.step().batch
    execution = trainer.execution
    expected = execution.log_probs(batch)
    stale = old_log_probs(execution, batch, step=2, every=3)  # the step has moved the weights
    assert torch.equal(stale, expected)
    batch["weights_version"] = torch.full_like(batch["weights_version"], execution.weights_version)
    batch["rollout_log_probs"] = torch.where(batch["response_mask"], expected - 2e-3, 0.0)
    assert torch.equal(old_log_probs(execution, batch, step=2, every=3), batch["rollout_log_probs"])
    assert torch.equal(old_log_probs(execution, batch, step=4, every=3), expected)
    assert torch.equal(old_log_probs(execution, batch, step=4, every=1), expected)


@pytest.mark.parametrize("other", ["execution=ray", "max_staleness=1", "replay=somewhere"])
def test_where_they_are_not_the_same_numbers_it_is_refused(
    load: Callable[..., Config], settings: dict[str, Any], other: str
) -> None:
    with pytest.raises(ValueError, match="recompute_log_probs_every=3 uses the sampler's"):
        load(settings, "recompute_log_probs_every=3", other)
