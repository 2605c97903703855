"""See :func:`rejections`."""

from collections.abc import Mapping

from rlprims.layout import sequence_lengths
from rlprims.types import CuSeqlens, Mean, Metrics, TokenMask


def rejections(kept: Mapping[str, TokenMask], response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Metrics:
    """The share of valid tokens that each cause rejects, and that any does.

    ``rejected_<cause>`` for each of ``kept``, masks that are False where the cause rejects (of a correction or a
    selection: ``weights.values > 0``); a token may have several.
    ``rejected``: by any of them; ``rejected_sequences``: the share of responses that lost every token.

    >>> import torch
    >>> m = torch.tensor([[True, True], [True, True]])
    >>> veto, bounds = torch.tensor([[[False, False], [True, True]], [[False, True], [True, True]]])
    >>> {name: float(metric.value()) for name, metric in rejections({"veto": veto, "bounds": bounds}, m).items()}
    {'rejected_veto': 0.5, 'rejected_bounds': 0.25, 'rejected': 0.5, 'rejected_sequences': 0.5}
    """
    tokens, left = response_mask.sum(), response_mask
    metrics: Metrics = {}
    for cause, mask in kept.items():
        metrics[f"rejected_{cause}"] = Mean((response_mask & ~mask).sum(), tokens)
        left = left & mask
    before, after = sequence_lengths(response_mask, cu_seqlens) > 0, sequence_lengths(left, cu_seqlens) > 0
    return {
        **metrics,
        "rejected": Mean((response_mask & ~left).sum(), tokens),
        "rejected_sequences": Mean((before & ~after).sum(), before.sum()),
    }
