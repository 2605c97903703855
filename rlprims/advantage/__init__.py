"""Advantage estimators: rewards in, one advantage per token out.

``rewards`` are per token, shaped, ``(B, T)`` or packed ``(N,)``. Every estimator returns advantages of that shape, 0
outside the mask; a critic's target is one line for the caller, ``returns = advantages + values``.
"""

from rlprims.advantage._gae import gae
from rlprims.advantage._grpo import grpo
from rlprims.advantage._remax import remax
from rlprims.advantage._returns import discounted_returns
from rlprims.advantage._rloo import rloo
from rlprims.advantage._whiten import whiten

__all__ = ["discounted_returns", "gae", "grpo", "remax", "rloo", "whiten"]
