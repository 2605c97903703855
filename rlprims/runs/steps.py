"""Steps of a run, and the functions that are called after each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from rlprims.data_proto import DataProto
from rlprims.execution import UpdateReport


@dataclass
class StepResult:
    """The result of one step."""

    number: int
    batch: DataProto
    """The rows that were trained on, with their advantages."""
    dropped: list[tuple[DataProto, str]]
    """The groups that were not trained on, each with the reason (of a greedy baseline: "greedy baseline")."""
    surplus: list[DataProto]
    """The groups that were sampled with this batch and wait for the next."""
    metrics: dict[str, float] = field(default_factory=dict)
    updates: list[tuple[str, UpdateReport]] = field(default_factory=list)
    """Each with the name of its model."""

    def copy(self) -> "StepResult":
        """A copy with the same tensors. It has its own columns."""
        dropped = [(rows[:], reason) for rows, reason in self.dropped]
        return replace(self, batch=self.batch[:], dropped=dropped, surplus=[rows[:] for rows in self.surplus])


class Stepper(Protocol):
    """What makes the steps of a run."""

    step_number: int

    @property
    def steps(self) -> int:
        """The steps of the whole run."""
        ...

    def step(self) -> StepResult: ...

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups of rows by name; call it between two steps."""
        ...

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None: ...


Hook: TypeAlias = Callable[[Any, StepResult], None]
"""Called with the trainer after each step."""


def train(trainer: Stepper, hooks: Sequence[Hook], *, stop: Callable[[], bool] = lambda: False) -> None:
    """Run steps until the configured number is done, or ``stop`` returns True between two steps."""
    while trainer.step_number < trainer.steps and not stop():
        step = trainer.step()
        for hook in hooks:
            hook(trainer, step)
