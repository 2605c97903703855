"""Share devices between training ranks and engines."""

from rlprims.execution.ray._rollouts import Rollouts
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._worker_group import WorkerGroup


class Turns:
    """Gives the devices to the training ranks or to the engines. First the other side frees its memory.

    Ranks move their weights and optimizers to the CPU. Engines sleep; after ``level`` 2 they need their weights again.
    If ``level`` is None, ranks and engines have devices of their own, and the methods do nothing.
    """

    def __init__(self, trainers: WorkerGroup, rollouts: Rollouts, level: int | None) -> None:
        self.trainers, self.rollouts, self.level = trainers, rollouts, level
        self.engines_awake = True

    def of_engines(self, *, resend: bool = True) -> None:
        """Give the devices to the engines. With ``resend=False`` the caller sends new weights next."""
        if self.level is None or self.engines_awake:
            return
        self.trainers.call(TrainingWorker.offload).result()
        self.rollouts.wake()
        if resend and self.level == 2:
            self.rollouts.send()
        self.engines_awake = True

    def of_ranks(self) -> None:
        """Give the devices to the training ranks."""
        if self.level is None or not self.engines_awake:
            return
        self.rollouts.sleep(self.level)
        self.trainers.call(TrainingWorker.onload).result()
        self.engines_awake = False
