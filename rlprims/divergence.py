"""Estimates of KL(π ‖ q) from the log-ratio of one sampled token. Schulman 2020, joschu.net/blog/kl-approx.html."""

from typing import Literal, TypeAlias

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0

Estimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]


def estimate_kl(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """With d = log π − log q at a sample of π: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d, abs = |d|.

    k3's input is clamped to ±20, so that every legal log-prob gives a finite value and gradient. verl, OpenRLHF, SkyRL
    and NeMo-RL also cap its output at 10, which takes the gradient away where the drift is largest.

    >>> estimate_kl(torch.tensor([0.0, 1.0]), "k3")
    tensor([0.0000, 0.3679])
    """
    return kl_with_slope(log_ratio, estimator)[0]


def kl_with_slope(log_ratio: Tensor, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """:func:`estimate_kl`, and its derivative in d: 1, d, 1 − exp(−d), sign(d).

    >>> kl_with_slope(torch.tensor([0.0, 1.0]), "k3")
    (tensor([0.0000, 0.3679]), tensor([0.0000, 0.6321]))
    """
    if estimator == "k1":
        return log_ratio, torch.ones_like(log_ratio)
    if estimator == "k2":
        return log_ratio.square() / 2, log_ratio
    if estimator == "k3":
        x = -log_ratio
        near = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        grown = torch.expm1(near)  # exp(x) − 1 − x would be 3 times too large at x = 1e-4 in float32
        return grown - near, -grown * x.clone().eq_(near)
    if estimator == "abs":
        return log_ratio.abs(), log_ratio.sign()
    raise ValueError(f"unknown estimator {estimator!r}: choose 'k1', 'k2', 'k3' or 'abs'")
