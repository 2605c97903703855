"""See :class:`Weights`."""

from dataclasses import dataclass

from rlprims.types import PerToken


@dataclass(frozen=True, eq=False)
class Weights:
    """One factor per token for a loss, and which gap between two policies it accounts for.

    ``losses * weights.values`` before the aggregation. A product of two is both; two that account for the same gap are
    refused. A gate, which is 0 or 1, chooses tokens and accounts for nothing.

    A rejected token still counts in the denominators of the aggregations, as in every peer. So that it does not, take
    it out of the mask instead, and count ``totals`` of the new one: ``response_mask & (weights.values > 0)``.

    Args:
        values: float (B, T) or (N,), 0 outside the mask, a constant.
        corrected: the gaps, each as "from->to": the policy that sampled, and the one whose gradient is estimated.

    >>> import torch
    >>> weights = Weights(torch.tensor([[2.0, 0.5]]), frozenset({"rollout->old"}))
    >>> gate = Weights(torch.tensor([[1.0, 0.0]]))
    >>> (weights * gate).values
    tensor([[2., 0.]])
    >>> weights * gate * weights
    Traceback (most recent call last):
    ...
    ValueError: correcting twice: both factors account for rollout->old; keep one of them
    """

    values: PerToken
    corrected: frozenset[str] = frozenset()

    def __mul__(self, other: "Weights") -> "Weights":
        twice = self.corrected & other.corrected
        if twice:
            raise ValueError(f"correcting twice: both factors account for {', '.join(sorted(twice))}; keep one of them")
        return Weights(self.values * other.values, self.corrected | other.corrected)
