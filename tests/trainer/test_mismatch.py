"""Sampler, micro-batch and the row alone have the same numbers, or the run ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AttentionInterface

import rlprims.execution.hf  # noqa: F401  (it registers the attention)
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.mismatch import Bounds, disagreements
from rlprims.trainer.session import build

PACKED_ATTENTION = "rlprims_packed"
PLAIN = {"algorithm": {"preset": "grpo", "kl_coef": 0.0, "group_size": 3}, "prompts_per_generation": None, "steps": 2}
PACKED = r"qwen2: log-probs of a row in a packed micro-batch and alone differ by .* nats .*: try model\.packing: false"


@pytest.fixture
def trainer(load: Callable[..., Config], settings: dict[str, Any], console: Console) -> Callable[..., Trainer]:
    def make(*overrides: str) -> Trainer:
        parts = build(config := load(settings | PLAIN, *overrides), console)
        return Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)

    return make


@pytest.fixture
def wrong_attention() -> Iterator[None]:
    """transformers' own registry has a packed attention whose output is a tenth too large."""
    registered: Any = AttentionInterface()
    right = registered[PACKED_ATTENTION]

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, weights = right(*args, **kwargs)
        return output * (1.1 if kwargs.get("layout") is not None else 1.0), weights

    AttentionInterface.register(PACKED_ATTENTION, wrong)
    yield
    AttentionInterface.register(PACKED_ATTENTION, right)


@pytest.mark.usefixtures("wrong_attention")
@pytest.mark.parametrize("every", [1, 5])
def test_a_wrong_packed_path_ends_the_first_step(trainer: Callable[..., Trainer], every: int) -> None:
    with pytest.raises(ValueError, match=PACKED):
        trainer(f"recompute_log_probs_every={every}").step()


def test_a_healthy_run_is_as_without_the_comparison(trainer: Callable[..., Trainer]) -> None:
    options = ("sampling.top_p=0.9", "sampling.temperature=0.7", "model.lora={}")
    compared, plain = trainer(*options), trainer(*options)
    plain.is_checked = True
    for _ in range(2):
        with_it, without = compared.step().metrics, plain.step().metrics
        assert {k: v for k, v in with_it.items() if not k.startswith("time/")} == {
            k: v for k, v in without.items() if not k.startswith("time/")
        }
    assert compared.is_checked


def test_only_rows_of_the_same_weights_are_compared_with_the_sampler(trainer: Callable[..., Trainer]) -> None:
    runner = trainer("model.packing=false")
    batch, config, execution = runner.step().batch, runner.config, runner.execution
    batch["old_log_probs"] = execution.log_probs(batch)  # the step has moved the weights
    assert list(disagreements(config, execution, batch)) == []
    batch["weights_version"] = torch.full_like(batch["weights_version"], execution.weights_version)
    (found,) = disagreements(config, execution, batch)
    assert "in the sampler and alone differ" in found
    assert found.endswith("try model.max_rows_per_generation: 1")
    batch["old_log_probs"] += 0.01
    assert "in a padded micro-batch and alone" in next(disagreements(config, execution, batch))
    recorded = config.model_copy(update={"replay": Path("run")})
    assert all("padded" in each for each in disagreements(recorded, execution, batch))


def test_a_step_beyond_the_bounds_warns_once_or_ends_the_run(trainer: Callable[..., Trainer], console: Console) -> None:
    runner = trainer()
    hook, step = Bounds(runner.config, console), runner.step()
    hook(runner, step)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    step.metrics |= {"mismatch_max": 0.05, "mismatch_ess": 0.5}
    hook(runner, step)
    hook(runner, step)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("warning: step 1: mismatch_max is 0.05 nats, more than 0.02 and mismatch_ess is 0.5") == 1
    for setting in ({"end_at_mismatch": True}, {"recompute_log_probs_every": 2}):
        with pytest.raises(ValueError, match=r"step 1: mismatch_max is 0\.05 nats"):
            Bounds(runner.config.model_copy(update=setting), console)(runner, step)
    step.metrics["staleness_max"] = 1.0  # one row is of older weights: the others still count, the share does not
    step.batch["weights_version"][0] -= 1
    step.metrics |= {"mismatch_max": 1e-6}
    Bounds(runner.config.model_copy(update={"end_at_mismatch": True}), console)(runner, step)
