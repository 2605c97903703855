"""A small tabular policy trained by an algorithm, in seconds, for notebooks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm, policy_objective, value_objective
from rlprims.grouping import dense_ids
from rlprims.lab._pipeline import prepare, weighed
from rlprims.lab._tasks import TabularTask
from rlprims.layout import sequence_sum


@dataclass(frozen=True, repr=False)
class Training:
    """The result of a training.

    Attributes:
        algorithm: the name of the algorithm.
        expected: column of the task's score to its exact expectation, before the first step and after each step.
        logits: the policy at the end.
        values: the critic at the end, (P, T, V + 1); 0 if the algorithm has no critic.
    """

    algorithm: str
    expected: dict[str, list[float]]
    logits: Tensor
    values: Tensor

    @property
    def expected_scores(self) -> list[float]:
        return self.expected["score"]

    def __repr__(self) -> str:
        first, last = self.expected_scores[0], self.expected_scores[-1]
        return f"{self.algorithm}: expected score {first:.3f}, after {len(self.expected_scores) - 1} steps {last:.3f}"


def train(
    task: TabularTask,
    algorithm: Algorithm,
    *,
    steps: int = 100,
    learning_rate: float = 0.1,
    logits: Tensor | None = None,
    seed: int = 0,
) -> Training:
    """Train a tabular policy by any algorithm: sample, score, filter, estimate, update; Adam on the logits.

    Groups that the filter drops are not sampled again: such a step trains on the remaining groups. If the algorithm
    needs a critic, it is a table too. The same seed gives the same training.

    Args:
        task: prompts, responses and scores.
        algorithm: any algorithm; each step samples ``group_size`` responses to every prompt.
        steps: the number of training batches.
        learning_rate: Adam's learning rate for policy and critic.
        logits: the initial policy, which is also the reference; uniform by default.
        seed: the seed of samples, mini-batches and random token selections.
    """
    generator = torch.Generator().manual_seed(seed)
    reference = task.uniform() if logits is None else logits.detach().clone()
    policy = reference.clone().requires_grad_()
    critic = torch.zeros(policy.shape[:3], dtype=policy.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([policy, critic], lr=learning_rate)
    controller = algorithm.kl_in_reward.controller({}) if algorithm.kl_in_reward else None
    logits_at = [policy.detach().clone()]
    for _ in range(steps):
        batch = task.sample(policy.detach(), algorithm.group_size, generator)
        where = (batch["group_ids"], batch["responses"])
        batch["ref_log_probs"] = task.log_probs(reference, *where, batch["response_mask"])
        batch["values"] = torch.where(batch["response_mask"], task.lookup(critic.detach(), *where), 0.0)
        batch["prompts"] = batch["group_ids"]
        data = prepare(algorithm, batch, kl_coef=controller.value if controller else 0.0).data
        if controller is not None:
            drift = batch["old_log_probs"] - batch["ref_log_probs"]
            controller.update(float(sequence_sum(drift, batch["response_mask"]).mean()), len(drift))
        rows = len(data["response_mask"])
        for _ in range(algorithm.epochs):
            for part in torch.randperm(rows, generator=generator).tensor_split(algorithm.mini_batches):
                if len(part):
                    optimizer.zero_grad()
                    torch.autograd.backward(_objective(task, algorithm, policy, critic, _rows(data, part), generator))
                    optimizer.step()
        logits_at.append(policy.detach().clone())
    expected = {name: [float(task.expected_score(at, name)) for at in logits_at] for name in task.columns}
    return Training(algorithm.name, expected, logits_at[-1], critic.detach())


def _rows(data: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    part = {name: column[rows] for name, column in data.items()}
    part["group_ids"] = dense_ids(part["group_ids"])
    return part


def _objective(
    task: TabularTask,
    algorithm: Algorithm,
    policy: Tensor,
    critic: Tensor,
    data: dict[str, Tensor],
    generator: torch.Generator,
) -> Tensor:
    prompts, responses, mask = data["prompts"], data["responses"], data["response_mask"]
    update = {
        **data,
        "log_probs": task.log_probs(policy, prompts, responses, mask),
        **task.moments(policy, prompts, responses, mask),
        "new_values": torch.where(mask, task.lookup(critic, prompts, responses), 0.0),
    }
    objective = policy_objective(algorithm, weighed(algorithm, update, generator))
    return objective if algorithm.value_loss is None else objective + value_objective(algorithm, update)
