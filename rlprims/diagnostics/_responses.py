"""See :func:`responses`, :func:`length_correlation` and :func:`log_perplexity`."""

import torch
from torch import Tensor

from rlprims.diagnostics._moments import moments
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import upcast
from rlprims.types import Correlation, CuSeqlens, Mean, Metrics, PerSequence, PerToken, TokenMask


def responses(scores: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Metrics:
    """``score``: mean raw score; ``length``: mean response length in tokens; ``length_score_correlation``.

    >>> m = torch.tensor([[True, True], [True, False]])
    >>> {name: float(metric.value()) for name, metric in responses(torch.tensor([1.0, 0.0]), m).items()}
    {'score': 0.5, 'length': 1.5, 'length_score_correlation': 1.0}
    """
    lengths = sequence_lengths(response_mask, cu_seqlens)
    rows = torch.tensor(len(scores), device=scores.device)
    return {
        "score": Mean(upcast(scores).sum().detach(), rows),
        "length": Mean(lengths.sum(), rows),
        "length_score_correlation": length_correlation(scores, response_mask, cu_seqlens),
    }


def length_correlation(x: PerSequence, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Correlation:
    """Pearson's correlation of each response's length with its score, or its advantage: whether length pays.

    >>> m = torch.tensor([[True, True], [True, False]])
    >>> length_correlation(torch.tensor([0.0, 1.0]), m).value()
    tensor(-1.)
    """
    lengths = sequence_lengths(response_mask, cu_seqlens).to(upcast(x).dtype)
    return moments(Correlation, torch.ones_like(x, dtype=torch.bool), lengths, x)


def log_perplexity(log_probs: PerToken, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Mean:
    """Mean over responses of −mean over tokens of log π, in nats; ``exp`` of it is the geometric mean perplexity.

    A response without a token is not counted.

    >>> log_perplexity(torch.tensor([[-1.0, -3.0], [-4.0, 9.0]]), torch.tensor([[True, True], [True, False]])).value()
    tensor(3.)
    """
    lengths: Tensor = sequence_lengths(response_mask, cu_seqlens)
    sums = sequence_sum(log_probs.detach(), response_mask, cu_seqlens)
    return Mean((-sums / lengths.clamp(min=1)).sum(), (lengths > 0).sum())
