"""Metrics of any numbers per token, and the checks and moments that the other metrics use."""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlprims._described import described
from rlprims.layout import sequence_lengths
from rlprims.masking import check_tokens, zero_outside
from rlprims.types import CuSeqlens, EffectiveShare, ExplainedVariance, Max, Mean, Metrics, Moments, PerToken, TokenMask

Kind = TypeVar("Kind", bound=Moments)


@described
def mean_over_tokens(x: PerToken, response_mask: TokenMask) -> Mean:
    """Mean over the valid tokens, as a metric: for example of entropies or values.

    >>> mean_over_tokens(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value()
    tensor(1.)
    """
    check_like_mask(response_mask, x=x)
    return Mean(zero_outside(x.detach(), response_mask).sum(), response_mask.count_nonzero())


def token_share(tokens: TokenMask, response_mask: TokenMask) -> Mean:
    """The share of valid tokens that are among ``tokens``, a mask."""
    return Mean((response_mask & tokens).count_nonzero(), response_mask.count_nonzero())


@described
def token_max(x: PerToken, response_mask: TokenMask) -> Max:
    """The largest number of the valid tokens; numbers must be at least 0. It is 0 if no token is valid.

    >>> token_max(torch.tensor([[1.0, 9.0]]), torch.tensor([[True, False]])).value()
    tensor(1.)
    """
    check_like_mask(response_mask, x=x)
    valid = zero_outside(x.detach(), response_mask)
    return Max(valid.amax() if valid.numel() else valid.sum())  # amax of an empty batch raises, its sum is 0


@described
def nonfinite(x: PerToken, response_mask: TokenMask) -> Mean:
    """The share of valid tokens whose number is NaN or infinite. The primitives do not remove such numbers.

    >>> nonfinite(torch.tensor([[1.0, torch.nan, torch.nan]]), torch.tensor([[True, True, False]])).value()
    tensor(0.5000)
    """
    check_like_mask(response_mask, x=x)
    return token_share(~x.isfinite(), response_mask)


@described
def rejections(kept: Mapping[str, TokenMask], response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None) -> Metrics:
    """The share of valid tokens that each cause rejects, and the share that any cause rejects.

    ``rejected_<cause>``: the share that this cause rejects; a token may have several causes. ``rejected_sequences``:
    the share of responses without a token left.

    Args:
        kept: a mask for each cause, False where the cause rejects a token: for a correction ``weights.values > 0``.

    >>> m = torch.tensor([[True, True], [True, True]])
    >>> veto, bounds = torch.tensor([[[False, False], [True, True]], [[False, True], [True, True]]])
    >>> {name: float(metric.value()) for name, metric in rejections({"veto": veto, "bounds": bounds}, m).items()}
    {'rejected_veto': 0.5, 'rejected_bounds': 0.25, 'rejected': 0.5, 'rejected_sequences': 0.5}
    """
    check_tokens(response_mask, cu_seqlens, **kept)
    for cause, mask in kept.items():
        if mask.dtype is not torch.bool:
            raise ValueError(f"{cause} has dtype {mask.dtype}, expected torch.bool: True where the token is kept")
    metrics: Metrics = {f"rejected_{cause}": token_share(~mask, response_mask) for cause, mask in kept.items()}
    remaining = response_mask
    for mask in kept.values():
        remaining = remaining & mask
    before, after = sequence_lengths(response_mask, cu_seqlens) > 0, sequence_lengths(remaining, cu_seqlens) > 0
    return {
        **metrics,
        "rejected": token_share(~remaining, response_mask),
        "rejected_sequences": Mean((before & ~after).sum(), before.sum()),
    }


@described
def weight_stats(importance_weights: Tensor, mask: Tensor) -> Metrics:
    """The effective size of a batch under importance weights: per token with its mask, or per sequence with a row mask.

    ``weight_mean``, 1 in expectation if they are a plain ratio; ``weight_max``; ``weight_ess``: (Σw)² / (n Σw²), the
    effective sample size as a share of n; ``weight_chi2``: E[w²] − 1, the χ² divergence of the two policies.

    Args:
        importance_weights: float, like the mask.
        mask: bool (B, T) or (N,) of tokens, or (B,) of sequences.

    >>> w = torch.tensor([[2.0, 0.0, 9.0]])
    >>> {name: float(m.value()) for name, m in weight_stats(w, torch.tensor([[True, True, False]])).items()}
    {'weight_mean': 1.0, 'weight_max': 2.0, 'weight_ess': 0.5, 'weight_chi2': 1.0}
    """
    check_like_mask(mask, "mask", importance_weights=importance_weights)
    w = zero_outside(importance_weights.detach(), mask)
    return {
        "weight_mean": mean_over_tokens(w, mask),
        "weight_max": token_max(w, mask),
        "weight_ess": moments(EffectiveShare, mask, w),
        "weight_chi2": mean_over_tokens(w.square() - 1, mask),
    }


@described
def explained_variance(values: PerToken, returns: PerToken, response_mask: TokenMask) -> ExplainedVariance:
    """1 − Var(R − V) / Var(R) over the valid tokens: 1 for a perfect critic, 0 if it is no better than a constant.

    >>> r = torch.tensor([[1.0, 3.0]])
    >>> explained_variance(r, r, torch.tensor([[True, True]])).value()
    tensor(1.)
    """
    check_like_mask(response_mask, values=values, returns=returns)
    r, v = zero_outside(returns, response_mask), zero_outside(values, response_mask)
    return moments(ExplainedVariance, response_mask, r, r - v)


def check_like_mask(mask: TokenMask, mask_name: str = "response_mask", **tensors: Tensor) -> None:
    """Raise ``ValueError`` unless the mask is bool and every named tensor has its shape."""
    if mask.dtype is not torch.bool:
        raise ValueError(f"{mask_name} has dtype {mask.dtype}, expected torch.bool: pass {mask_name}.bool()")
    shape = tuple(mask.shape)
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {mask_name} has {shape}: expected equal shapes")


def moments(kind: type[Kind], mask: Tensor, *columns: Tensor) -> Kind:
    """Count, means and scatter of the valid samples: one column for each of the K numbers, all shaped like the mask.

    The column's smallest number is subtracted first, so that a constant column has a scatter of exactly 0.
    """
    x = torch.stack([zero_outside(column.detach(), mask).flatten() for column in columns])
    valid = mask.flatten()
    count = valid.sum().to(x.dtype)
    lowest = pad(torch.where(valid, x, torch.inf), (0, 1), value=torch.inf).amin(-1)
    lowest = torch.where(count > 0, lowest, 0.0)
    shifted = torch.where(valid, x - lowest[:, None], 0.0)
    mean = shifted.sum(-1) / count.clamp(min=1)
    centred = torch.where(valid, shifted - mean[:, None], 0.0)
    scatter = (centred[:, None] * centred).sum(-1)  # not a matrix product, whose precision autocast changes
    return kind(count, lowest + mean, scatter)
