"""Corrections of the sampler's gap, and selections of tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from rlprims.corrections import Weights, batch_normalized, importance_weights, opsm, rejection
from rlprims.filters import clip_cov, kl_cov
from rlprims.layout import sequence_sum
from rlprims.losses import clipped_surrogate, kl
from tests.golden_calls.common import Policy, objective
from tests.golden_cases import Answer, Calls, Case


def verl_weights(c: Case) -> Answer:
    x, mask = c.inputs["log_ratio"], c.inputs["response_mask"].bool()
    level, threshold = c.args["rollout_is"], str(c.args["rollout_is_threshold"])
    low, _, high = threshold.rpartition("_")
    bounds: dict[str, Any] = {"low": float(low or 0), "high": float(high), "action": "mask" if low else "truncate"}
    weights = importance_weights(x, torch.zeros_like(x), mask, level=level, **bounds)
    if c.args["rollout_is_batch_normalize"]:
        weights = batch_normalized(weights, mask, per=level)
    return {"weights": weights.values}


def verl_rejection(c: Case) -> Answer:
    """verl's k1 is log(sampler / trainer), so its bounds are those of the reciprocal."""
    x, mask = c.inputs["log_ratio"], c.inputs["response_mask"].bool()
    kept = Weights(mask.to(x.dtype))
    options, thresholds = c.args["rollout_rs"].split(","), c.args["rollout_rs_threshold"].split(",")
    for option, threshold in zip(options, thresholds, strict=True):
        *how, estimator = option.split("_")
        level, statistic = ("token", "mean") if how == ["token"] else ("sequence", how[1])
        low, _, high = threshold.rpartition("_")
        bounds = {"low": 1 / float(high), "high": 1 / float(low)} if estimator == "k1" else {"high": float(high)}
        kept = kept * rejection(
            x, torch.zeros_like(x), mask, estimator=estimator, level=level, statistic=statistic, **bounds
        )
    rejected = mask & (kept.values == 0)
    return {
        "modified_mask": kept.values,
        "masked_fraction": rejected.sum() / mask.sum(),
        "seq_masked_fraction": (sequence_sum(rejected, mask) > 0).double().mean(),
    }


def trl_ratio(c: Case) -> Answer:
    """TRL has a column for all of a response's tokens in its sequence modes, and 1 on padding in the others."""
    trainer, sampler = c.inputs["old_per_token_logps"], c.inputs["sampling_per_token_logps"]
    mask = torch.arange(trainer.shape[1]) < c.inputs["lengths"][:, None]
    level, action = c.args["mode"].split("_")
    weights = importance_weights(
        trainer, sampler, mask, level=level, action=action, low=c.args["clip_min"] or 0.0, high=c.args["clip_max"]
    ).values
    if level == "sequence":
        return {"importance_sampling_ratio": weights[:, :1]}
    return {"importance_sampling_ratio": torch.where(mask, weights, 1.0)}


def trl_off_policy_mask(c: Case) -> Answer:
    """TRL answers for responses, of which empty ones are kept."""
    now, sampler, mask = (c.inputs[name] for name in ("per_token_logps", "sampling_per_token_logps", "mask"))
    mask = mask.bool()
    advantages = c.inputs["advantages"].expand(mask.shape)
    kept = opsm(now, sampler, advantages, mask, delta=c.args["off_policy_threshold"]).values
    return {"keep": torch.where(mask, kept, 1.0).amin(-1, keepdim=True)}


def verl_clip_cov(c: Case, p: Policy) -> Tensor:
    """All candidates are dropped, so that the draw does not matter; verl spares those that PPO clips already."""
    bounds = {"clip_low": c.args["clip_ratio_low"], "clip_high": c.args["clip_ratio_high"]}
    losses = clipped_surrogate(p.log_probs, p.old_log_probs, p.advantages, p.mask, **bounds)
    kept = clip_cov(
        p.log_probs,
        p.advantages,
        p.mask,
        fraction=c.args["clip_cov_ratio"],
        low=c.args["clip_cov_lb"],
        high=c.args["clip_cov_ub"],
        generator=torch.Generator(),
    )
    clipped = losses > -p.advantages * (p.log_probs - p.old_log_probs).exp()
    return _weighed(c, losses * (kept | clipped))


def verl_kl_cov(c: Case, p: Policy) -> Tensor:
    unclipped = clipped_surrogate(p.log_probs, p.old_log_probs, p.advantages, p.mask, clip_low=1.0, clip_high=math.inf)
    chosen = kl_cov(p.log_probs, p.advantages, p.mask, fraction=c.args["kl_cov_ratio"])
    penalty = kl(p.log_probs, p.old_log_probs, p.mask, value="abs")
    return _weighed(c, unclipped + c.args["ppo_kl_coef"] * penalty * chosen)


def _weighed(c: Case, losses: Tensor) -> Tensor:
    weights = c.inputs["rollout_is_weights"]
    return losses if weights is None else losses * weights


CALLS: Calls = {
    ("verl", "rollout_is_weights"): verl_weights,
    ("verl", "rollout_rejection_mask"): verl_rejection,
    ("verl", "policy_loss.clip_cov"): objective(verl_clip_cov),
    ("verl", "policy_loss.kl_cov"): objective(verl_kl_cov),
    ("trl", "vllm_is_ratio"): trl_ratio,
    ("trl", "trl_off_policy_mask"): trl_off_policy_mask,
}
