"""See :func:`from_logits_with_entropy`."""

from torch import Tensor

from rlprims.logprobs._from_hidden import LogProbs
from rlprims.logprobs._logits import scores


def from_logits_with_entropy(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> LogProbs:
    """:func:`from_logits` and :func:`entropy_from_logits` in one sweep over the logits, and one in backward.

    Both are of one graph, so that backward through each apart needs ``retain_graph=True``; what no loss reads costs it
    nothing.

    Args:
        logits: float (..., V); −inf bans a token.
        token_ids: int64 (...), in [0, V); or (..., K), then K tokens of each row.
        temperature: above 0.
        inplace_backward: the gradient overwrites the logits; see :func:`from_logits`.

    Returns:
        log_probs like token_ids, entropies (...): float32 (or float64 if given) in nats.

    Raises:
        ValueError: shapes or dtypes that do not fit; temperature <= 0; inplace_backward of a leaf.

    >>> import torch
    >>> from_logits_with_entropy(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([1]))
    LogProbs(log_probs=tensor([-0.6931]), entropies=tensor([0.6931]))
    """
    return LogProbs(*scores(logits, token_ids, temperature, with_entropies=True, inplace_backward=inplace_backward))
