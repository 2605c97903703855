"""A policy's objective where tokens meet the head in tiles: whether it is a weighted sum over tokens, and of what."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm, policy_losses


def is_token_wise(algorithm: Algorithm, data: Mapping[str, Tensor]) -> bool:
    """Whether the loss of a token is made of that token's data alone: the losses themselves are asked.

    They meet random numbers in the place of the batch's columns, in rows, and as the same tokens in another order
    without rows. A loss that reads entropies is not: in tiles these have no gradient.
    """
    if "entropies" in algorithm.loss_needs:
        return False
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, False]])
    shape, random = data["response_mask"].shape, torch.Generator().manual_seed(0)
    whole = {name: x for name, x in data.items() if name != "response_mask" and x.shape[:1] == shape[:1]}
    columns = {name: _like(x, mask.shape if x.shape == shape else mask.shape[:1], random) for name, x in whole.items()}
    per_token = {name: x[mask].flip(0) for name, x in columns.items() if x.shape == mask.shape}
    log_probs, slope = torch.randn(2, *mask.shape, generator=random)
    ends = torch.tensor([0, int(mask.sum())])
    try:
        rows = _values_and_slopes(algorithm, columns | {"response_mask": mask}, log_probs, slope)
        tokens = _values_and_slopes(
            algorithm,
            per_token | {"response_mask": mask[mask], "cu_seqlens": ends},
            log_probs[mask].flip(0),
            slope[mask].flip(0),
        )
    except Exception:  # whatever is raised by a loss that was not made for tokens without rows
        return False
    return all(torch.allclose(a[mask], b.flip(0)) for a, b in zip(rows, tokens, strict=True))


def token_weights(algorithm: Algorithm, data: Mapping[str, Tensor]) -> Tensor | None:
    """(B, T): what each token's loss counts in the objective; None if that is no weighted sum."""
    zero = torch.zeros(data["response_mask"].shape, device=data["response_mask"].device, requires_grad=True)
    try:
        (weights,) = torch.autograd.grad(algorithm.aggregation({**data, "losses": zero}), zero)
        some = torch.linspace(0.5, 1.5, zero.numel(), device=zero.device).reshape(zero.shape)
        objective = algorithm.aggregation({**data, "losses": some})
    except Exception:  # of an aggregation that reads log-probs, too
        return None
    return weights if torch.allclose((weights * some).sum(), objective, rtol=1e-4, atol=1e-6) else None


def _like(x: Tensor, shape: torch.Size, random: torch.Generator) -> Tensor:
    if x.is_floating_point():
        return torch.randn(shape, generator=random)
    return torch.randint(2, shape, generator=random).to(x.dtype)


def _values_and_slopes(
    algorithm: Algorithm, data: Mapping[str, Tensor], log_probs: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_()
    with torch.enable_grad():
        losses = policy_losses(algorithm, {**data, "log_probs": leaf})
        (slopes,) = torch.autograd.grad((losses * torch.where(data["response_mask"], slope, 0.0)).sum(), leaf)
    return losses.detach(), slopes
