"""The critic in training: the values of a batch, and its optimizer step."""

from torch import Tensor

from rlprims.algorithms import Algorithm, value_objective
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, UpdateReport
from rlprims.execution.hf._forward import response_values
from rlprims.execution.hf._micro_batches import Ranks, StepTotals, parts_of
from rlprims.execution.hf._routes import without_routes
from rlprims.execution.hf._scorer import per_token
from rlprims.execution.hf._train_state import TrainState, optimizer_step
from rlprims.types import Metrics


class Critic:
    """A model of values in training."""

    def __init__(self, state: TrainState, model: ModelConfig, ranks: Ranks) -> None:
        self.state, self.model, self.ranks = state, model, ranks

    def values(self, batch: DataProto) -> Tensor:
        """(B, T): the value of the state in which each response token was sampled."""
        return per_token(without_routes(batch), self._values, self.model, self.ranks, packing=False)

    def update(self, batch: DataProto, algorithm: Algorithm, totals: StepTotals) -> UpdateReport:
        """One optimizer step. The loss is this rank's share of that of the whole step."""

        def forward(part: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
            return value_objective(algorithm, {**part, "new_values": self._values(part)}), {}

        rows = without_routes(batch)
        parts = parts_of(rows, self.model, self.ranks, packing=False, together=algorithm.together)
        return optimizer_step(self.state, parts, totals, forward, self.ranks)

    def _values(self, part: dict[str, Tensor]) -> Tensor:
        return response_values(self.state.module, part).float()
