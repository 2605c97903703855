"""See :func:`weights`."""

from torch import Tensor

from rlprims.diagnostics._moments import moments
from rlprims.diagnostics._tokens import token_max, token_mean
from rlprims.masking import zero_outside
from rlprims.types import EffectiveShare, Metrics


def weights(importance_weights: Tensor, mask: Tensor) -> Metrics:
    """How much of a batch the importance weights leave: per token with its mask, or per sequence with a row mask.

    ``weight_mean``, 1 in expectation if they are a plain ratio; ``weight_max``; ``weight_ess``: (Σw)² / (n Σw²), the
    effective sample size as a share of n; ``weight_chi2``: E[w²] − 1, the χ² divergence of the two policies.

    >>> import torch
    >>> w = torch.tensor([[2.0, 0.0, 9.0]])
    >>> {name: float(m.value()) for name, m in weights(w, torch.tensor([[True, True, False]])).items()}
    {'weight_mean': 1.0, 'weight_max': 2.0, 'weight_ess': 0.5, 'weight_chi2': 1.0}
    """
    w = zero_outside(importance_weights, mask).detach()
    return {
        "weight_mean": token_mean(w, mask),
        "weight_max": token_max(w, mask),
        "weight_ess": moments(EffectiveShare, mask, w),
        "weight_chi2": token_mean(w.square() - 1, mask),
    }
