"""See :func:`entropy_from_logits`."""

import torch
from torch import Tensor

from rlprims.logprobs._logits import scores
from rlprims.types import PerToken


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> PerToken:
    """Entropy of softmax(logits / temperature): H = −Σ_j p_j log p_j, with 0 log 0 = 0.

    Computed in row blocks and in float32 whatever the logits' dtype; the gradient is first order.

    Args:
        logits: float (..., V); −inf bans a token.
        temperature: above 0.

    Returns:
        float32 (or float64 if given) in nats, (...), between 0 and log V.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0.

    >>> entropy_from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931])
    """
    no_tokens = torch.empty((*logits.shape[:-1], 0), dtype=torch.int64, device=logits.device)
    return scores(logits, no_tokens, temperature, with_entropies=True)[1]
