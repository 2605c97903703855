"""Conversion of policy losses to functions with verl's signature."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlprims import losses
from rlprims.algorithms import BoundFunction, use
from rlprims.diagnostics import ratio_stats
from rlprims.interop.verl._estimators import configured
from rlprims.masking import zero_outside
from rlprims.types import Totals

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]

AVAILABLE = frozenset({"log_probs", "old_log_probs", "advantages", "response_mask"})
"""The data that verl passes to a policy loss."""

SETTINGS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "dual_clip": "clip_ratio_c"}
SETTINGS |= {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}

AGGREGATIONS: Mapping[str, Callable[..., Tensor]] = {
    fn.__name__.replace("_", "-"): fn
    for fn in (
        *(losses.token_mean, losses.token_sum, losses.seq_mean_token_sum),
        *(losses.seq_mean_token_mean, losses.seq_mean_token_sum_norm),
    )
}


def needed(part: BoundFunction) -> frozenset[str]:
    """The data that ``part`` needs from verl. verl passes one old policy, which also serves as the sampler's policy."""
    both = {"old_log_probs", "rollout_log_probs"}
    return part.needs if both <= part.needs else part.needs - {"rollout_log_probs"}


def policy_loss(
    part: BoundFunction, aggregation: BoundFunction | None = None, *, settings: Mapping[str, str] = SETTINGS
) -> PolicyLoss:
    """``part`` with verl's signature. Without ``aggregation``, verl's ``loss_agg_mode`` determines the mean."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = response_mask.bool()
        data = {
            "log_probs": log_prob,
            "old_log_probs": old_log_prob,
            "rollout_log_probs": old_log_prob,
            "advantages": advantages,
            "response_mask": mask,
        }
        values = {**part.hyperparameters, **configured(part, config, settings)}
        per_token = part.fn(**{name: data[name] for name in part.needs}, **values)
        if rollout_is_weights is not None:
            per_token = per_token * zero_outside(rollout_is_weights, mask)
        bounds = {name: values.get(name) for name in ("clip_low", "clip_high")}
        metrics = ratio_stats(log_prob, old_log_prob, advantages, mask, **bounds)
        step = {} if config is None else config.global_batch_info
        return (
            _aggregate(per_token, mask, aggregation or _named(loss_agg_mode, mask, step), step),
            {f"actor/{name}": float(metric.value()) for name, metric in metrics.items()},
        )

    return loss


def _named(mode: str, mask: Tensor, step: Mapping[str, Any]) -> BoundFunction:
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode is {mode!r}, expected one of {', '.join(AGGREGATIONS)}")
    normed = {"length": step.get("loss_scale_factor") or mask.shape[-1]} if mode.endswith("-norm") else {}
    return use(AGGREGATIONS[mode], **normed)


def _aggregate(per_token: Tensor, mask: Tensor, aggregation: BoundFunction, step: Mapping[str, Any]) -> Tensor:
    """The mean over the whole mini-batch, times ``dp_size``, because verl averages gradients over ``dp_size`` ranks."""
    ranks = step.get("dp_size") or 1
    tokens, sequences = step.get("batch_num_tokens"), step.get("global_batch_size")
    if ranks > 1 and None in (tokens, sequences):
        wanted = "batch_num_tokens and global_batch_size in global_batch_info too"
        raise ValueError(f"dp_size is {ranks}, expected {wanted}")
    local = losses.count_totals(mask)
    totals = Totals(
        tokens=local.tokens if tokens is None else tokens,
        sequences=local.sequences if sequences is None else sequences,
        groups=local.groups,
    )
    objective: Tensor = aggregation({"losses": per_token, "response_mask": mask, "totals": totals})
    return objective * ranks
