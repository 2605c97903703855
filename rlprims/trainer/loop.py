"""The loop, as in the papers: generate, score, filter, shape, log-probs, values, advantage, update, sync.

:class:`rlprims.trainer.collect.Collector` does the first four, :mod:`rlprims.trainer.update` the others. Hooks, which
are called after each step, do everything else in a run: evaluation, checkpoints, progress, logs.
"""

from collections.abc import Sequence
from typing import Any

from rlprims.data_proto import DataProto
from rlprims.execution import Models
from rlprims.runs.metrics import Clock
from rlprims.runs.steps import StepResult
from rlprims.runs.wrong_numbers import first_not_finite
from rlprims.trainer.collect import Collector
from rlprims.trainer.config import Config
from rlprims.trainer.data import Example
from rlprims.trainer.metrics import batch_metrics
from rlprims.trainer.mismatch import disagreements
from rlprims.trainer.scoring.groups import join_groups
from rlprims.trainer.stateful import States
from rlprims.trainer.update import estimate, measure, update


class Trainer:
    """The state of a run and its step. A checkpoint has ``state_dict`` and the state of the execution."""

    def __init__(self, config: Config, execution: Models, tokenizer: Any, examples: Sequence[Example]) -> None:
        self.config, self.execution, self.tokenizer = config, execution, tokenizer
        self.collector = Collector(config, execution, tokenizer, examples)
        self.states = States(config.algorithm)
        self.step_number, self.is_checked = 0, False
        self.generated_tokens = 0

    @property
    def steps(self) -> int:
        return self.config.steps

    def step(self) -> StepResult:
        """One step: a full batch of kept groups, and the updates on it."""
        self.step_number += 1
        clock, config, execution, number = Clock(), self.config, self.execution, self.step_number
        collected = self.collector.take()
        if number < config.steps or config.max_staleness == 1:  # with more steps it goes on as if it had had them
            self.collector.prefetch()
        generated = int(collected.metrics["generated_tokens"])
        self.generated_tokens += generated
        batch = join_groups(collected.groups, pad_token_id=execution.pad_token_id)
        with clock("log_probs"):
            batch = measure(config, execution, self.tokenizer, self.states, batch, step=number)
            for problem in () if self.is_checked else disagreements(config, execution, batch):
                raise ValueError(problem)
            self.is_checked = True
        batch, metrics = estimate(config.algorithm, self.states, batch)
        metrics |= batch_metrics(batch, weights_version=execution.weights_version)
        with clock("update"):
            of_updates, updates = update(config, execution, self.states, batch, step=number)
        with clock("wait"):
            self.collector.wait()
        if number == config.steps:
            self.collector.close()
        with clock("sync"):
            execution.sync_weights()
        metrics |= of_updates | collected.metrics | clock.metrics(generated)
        return StepResult(number, batch, collected.dropped, collected.surplus, metrics, updates)

    def not_finite(self, model: str, batch: DataProto) -> str:
        return first_not_finite(self.execution, self.states.of_this_step, model, batch)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and the groups that wait, by name; call it between two steps."""
        state, groups = self.collector.state_dict()
        counters = {"step_number": self.step_number, "generated_tokens": self.generated_tokens}
        groups = {**groups, "answers": list(self.states.answers.values())}
        return {**counters, **state, "states": self.states.state_dict()}, groups

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        self.step_number, self.generated_tokens = state["step_number"], state["generated_tokens"]
        self.collector.load_state_dict(state, groups)
        self.states.load_state_dict(state["states"], groups.get("answers", []))
