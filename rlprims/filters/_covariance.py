"""The covariance of log-prob and advantage, which drives the entropy of the policy down, token by token."""

from torch import Tensor

from rlprims.masking import masked_mean, zero_outside
from rlprims.types import PerToken, TokenMask


def token_covariance(log_probs: PerToken, advantages: PerToken, mask: TokenMask) -> PerToken:
    """(log π − mean log π)(A − mean A) with the means of all valid tokens (arXiv:2505.22617); any number elsewhere."""

    def centred(x: Tensor) -> Tensor:
        return zero_outside(x, mask) - masked_mean(x, mask)

    return centred(log_probs.detach()) * centred(advantages.detach())
