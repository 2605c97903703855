"""An option that is not one of the choices is refused, and the message lists them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlprims import batching, corrections, filters, rewards

MASK = torch.ones(2, 3, dtype=torch.bool)
X = torch.zeros(2, 3)
IDS = torch.zeros(2, dtype=torch.int64)

CALLS: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "importance_weights level": (
        lambda x: corrections.importance_weights(X, X, MASK, level=x),
        ["token", "segment", "sequence"],
    ),
    "importance_weights mean": (
        lambda x: corrections.importance_weights(X, X, MASK, mean=x),
        ["product", "geometric"],
    ),
    "importance_weights action": (
        lambda x: corrections.importance_weights(X, X, MASK, action=x),
        ["truncate", "mask"],
    ),
    "rejection estimator": (lambda x: corrections.rejection(X, X, MASK, estimator=x, high=1.0), ["k1", "k2", "k3"]),
    "rejection level": (lambda x: corrections.rejection(X, X, MASK, level=x), ["token", "segment", "sequence"]),
    "rejection statistic": (lambda x: corrections.rejection(X, X, MASK, statistic=x), ["mean", "sum", "max"]),
    "batch_normalized per": (
        lambda x: corrections.batch_normalized(corrections.Weights(X), MASK, per=x),
        ["token", "sequence"],
    ),
    "policy_filtration weights": (
        lambda x: filters.policy_filtration(X[:, 0], IDS, generator=torch.Generator(), weights=x),
        ["pow", "max_min", "max_random"],
    ),
    "policy_filtration over": (
        lambda x: filters.policy_filtration(X[:, 0], IDS, generator=torch.Generator(), over=x),
        ["batch", "group"],
    ),
    "DynamicSampling at_limit": (
        lambda x: filters.DynamicSampling(groups=1, at_limit=x),
        ["error", "smaller_batch"],
    ),
    "kl_penalty estimator": (
        lambda x: rewards.kl_penalty(X, X, X, MASK, kl_coef=0.1, estimator=x),
        ["k1", "k2", "k3", "abs"],
    ),
    "balance method": (lambda x: batching.balance([1, 2], 2, method=x), ["longest_first", "karmarkar_karp"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_option_is_refused_with_the_choices(name: str) -> None:
    call, choices = CALLS[name]
    message = f"{name.split()[1]}='best', expected {' or '.join(map(repr, choices))}"
    with pytest.raises(ValueError, match=re.escape(message)):
        call("best")
    for choice in choices:
        if choice != "geometric":  # of single tokens there is none
            call(choice)
