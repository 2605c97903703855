"""See :func:`from_logits`."""

from typing import Annotated

from torch import Tensor

from rlprims.logprobs._logits import scores


def from_logits(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> Annotated[Tensor, "float, like token_ids"]:
    """Log-probability of the given tokens: log softmax(logits / temperature)[token].

    Computed in row blocks and in float32 whatever the logits' dtype; the gradient is first order. Banned tokens (logit
    −inf) are legal. Divide by the temperature that the sampler used, or the ratio to its log-probs is not 1 on policy.

    Args:
        logits: float (..., V).
        token_ids: int64 (...), in [0, V); or (..., K), then K tokens of each row, as ``losses.topk_kl`` reads.
        temperature: above 0.
        inplace_backward: the gradient overwrites the logits, and no second (..., V) is made. They must not be read
            after backward; where another function's backward would, torch raises.

    Returns:
        float32 (or float64 if given) in nats, like token_ids.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0; inplace_backward of a leaf.

    >>> import torch
    >>> from_logits(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    tensor([-0.6931])
    """
    return scores(logits, token_ids, temperature, inplace_backward=inplace_backward)[0]
