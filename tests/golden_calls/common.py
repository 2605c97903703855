"""Gradients, and a peer's aggregation by its name."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlprims.losses import (
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
)
from rlprims.types import Totals
from tests.golden_cases import Answer


def full(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def slope(y: Tensor, x: Tensor, cotangent: Tensor | None = None) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y) if cotangent is None else cotangent, retain_graph=True)[0]


def with_gradient(loss: Tensor, x: Tensor, name: str) -> Answer:
    return {"loss": loss.detach(), name: slope(loss, x)}


def aggregate(mode: str, losses: Tensor, mask: Tensor, args: Mapping[str, Any], rows: int | None = None) -> Tensor:
    """A peer's mode, with the totals that it was told; its rank factor stands outside."""
    ranks = args.get("dp_size", 1)
    tokens, sequences = args.get("batch_num_tokens"), args.get("global_batch_size", rows)
    totals = None
    if tokens is not None or sequences is not None:
        own = int((mask.sum(-1) > 0).sum())
        totals = Totals(
            tokens=mask.sum() if tokens is None else int(tokens),
            sequences=own if sequences is None else int(sequences),
            groups=0,
        )
    if mode == "token-sum":
        return token_sum(losses, mask) * ranks
    if mode == "seq-mean-token-sum-norm":
        length = args.get("loss_scale_factor") or mask.shape[-1]
        return seq_mean_token_sum_norm(losses, mask, totals=totals, length=length) * ranks
    functions = {
        "token-mean": token_mean,
        "seq-mean-token-sum": seq_mean_token_sum,
        "seq-mean-token-mean": seq_mean_token_mean,
    }
    return functions[mode](losses, mask, totals=totals) * ranks
