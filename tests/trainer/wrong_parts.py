"""Parts of an algorithm that are wrong; named by import path in the tests' configs."""

import torch
from torch import Tensor

from rlprims import advantage, losses


def nan_loss(log_probs: Tensor, advantages: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """NaN in the rows of group 1."""
    per_token = losses.reinforce(log_probs, advantages, response_mask)
    return torch.where(response_mask & (group_ids == 1)[:, None], per_token * torch.nan, per_token)


def nan_if_large(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """NaN in the rows with the largest advantages: those of one right response beside two that are not."""
    per_token = losses.reinforce(log_probs, advantages, response_mask)
    return per_token * torch.where(response_mask & (advantages > 1), torch.nan, 1.0)


def infinite_slope(log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """A finite loss whose gradient is not: the square root at 0."""
    return torch.where(response_mask, (log_probs - log_probs.detach()).abs().sqrt(), 0.0)


def nan_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """NaN in the rows of group 1."""
    found = advantage.grpo(rewards, group_ids, response_mask)
    return torch.where(response_mask & (group_ids == 1)[:, None], torch.nan, found)


def nan_pairs(chosen_log_probs: Tensor, rejected_log_probs: Tensor) -> Tensor:
    return (rejected_log_probs - chosen_log_probs) * torch.nan
