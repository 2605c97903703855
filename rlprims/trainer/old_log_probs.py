"""The policy's log-probs before the update: computed, or taken from the sampler."""

from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import Execution

TOLERANCE = 1e-3
"""Nats between a log-prob of the sampler and the trainer's of the same token, above which they are two policies."""


def old_log_probs(execution: Execution, batch: DataProto, *, step: int, every: int) -> Tensor:
    """The policy's log-probs before the update: computed in every ``every``-th step, from the first on.

    Between, they are those that were captured while sampling, unless a row was sampled with other weights. A step that
    computes them compares the two.

    Raises:
        ValueError: they differ by more than :data:`TOLERANCE`.
    """
    sampled: Tensor = batch["rollout_log_probs"]
    same_weights = bool((batch["weights_version"] == execution.weights_version).all())
    if every == 1 or not same_weights:
        return execution.log_probs(batch)
    if (step - 1) % every:
        return sampled
    computed = execution.log_probs(batch)
    gap = float((computed - sampled)[batch["response_mask"]].abs().max())
    if not gap <= TOLERANCE:
        raise ValueError(
            f"step {step}: log-probs of the sampler and of the trainer differ by {gap:.3g} nats, more than "
            f"{TOLERANCE}: set recompute_log_probs: 1"
        )
    return computed
