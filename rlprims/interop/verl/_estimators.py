"""Conversion of estimators to functions with verl's signature."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.advantage import discounted_returns
from rlprims.algorithms import BoundFunction
from rlprims.grouping import dense_ids

Estimator = Callable[..., tuple[Tensor, Tensor]]

AVAILABLE = frozenset({"rewards", "group_ids", "baseline_scores", "response_mask"})
"""The data that verl passes to an estimator whose name is not verl's own."""

SETTINGS = {"gamma": "gamma", "lam": "lam", "normalize_std": "norm_adv_by_std_in_grpo"}


def configured(part: BoundFunction, config: Any, settings: Mapping[str, str]) -> dict[str, Any]:
    """The values in ``config`` for the hyperparameters of ``part``.

    ``settings`` maps names of hyperparameters to names of verl's settings.
    """
    if config is None:
        return {}
    values = {name: config.get(settings[name], None) for name in part.hyperparameters if name in settings}
    return {name: value for name, value in values.items() if value is not None}


def estimator(
    part: BoundFunction, normalization: BoundFunction | None = None, *, settings: Mapping[str, str] = SETTINGS
) -> Estimator:
    """``part`` with verl's signature. The second result, the critic's target, is the discounted return."""

    def estimate(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | Tensor | None = None,
        reward_baselines: Tensor | None = None,
        config: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        mask = response_mask.bool()
        data = {"rewards": token_level_rewards, "response_mask": mask}
        if index is not None:
            data["group_ids"] = dense_ids(index).to(mask.device)
        if reward_baselines is not None:
            data["baseline_scores"] = reward_baselines
        with torch.no_grad():
            advantages = part(data, **configured(part, config, settings))
            if normalization is not None:
                advantages = normalization({**data, "advantages": advantages})
            gamma = 1.0 if config is None else config.get("gamma", 1.0)
            return advantages, discounted_returns(token_level_rewards, mask, gamma=gamma)

    return estimate
