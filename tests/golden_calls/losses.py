"""Policy losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlprims.diagnostics import policy_update
from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.losses import (
    clipped_surrogate,
    kl,
    reinforce,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)
from rlprims.masking import sequence_sum, to_tokens
from rlprims.types import Totals
from tests.golden_calls.common import aggregate, full, leaf, slope, with_gradient
from tests.golden_cases import Answer, Call, Calls, Case


def verl_policy_loss(c: Case) -> Answer:
    x, mask = leaf(c.inputs["log_prob"]), c.inputs["response_mask"].bool()
    a, weights = c.inputs["advantages"], c.inputs["rollout_is_weights"]
    answer: dict[str, Tensor] = {}
    if c.primitive == "policy_loss.vanilla":
        clip = {"clip_low": c.args["clip_ratio_low"], "clip_high": c.args["clip_ratio_high"]}
        old = c.inputs["old_log_prob"]
        losses = clipped_surrogate(x, old, a, mask, dual_clip=c.args["clip_ratio_c"], **clip)
        metrics = policy_update(x, old, a, mask, **clip)
        share = metrics["clip_fraction_low"].value() + metrics["clip_fraction_high"].value()
        answer["metric_pg_clipfrac"] = share
    else:
        losses = reinforce(x, a, mask)
    if weights is not None:
        losses = losses * weights
    loss = aggregate(c.args["loss_agg_mode"], losses, mask, c.args)
    return {**with_gradient(loss, x, "grad_log_prob"), **answer}


def ppo(
    log_probs: str,
    old: str,
    mask: str,
    gradient: str,
    clip: tuple[str, str],
    *,
    dual: str | None = None,
    mode: Callable[[Case], str] = lambda c: "token-mean",
    kl_coef: str | None = None,
) -> Call:
    """The peers that take log-probs, old log-probs and advantages per token."""

    def call(c: Case) -> Answer:
        x, m = leaf(c.inputs[log_probs]), c.inputs[mask].bool()
        bounds = {"clip_low": c.args[clip[0]], "clip_high": c.args[clip[1]]}
        dual_clip = c.args.get(dual) if dual else None
        losses = clipped_surrogate(x, c.inputs[old], c.inputs["advantages"], m, dual_clip=dual_clip, **bounds)
        if kl_coef is not None and c.args[kl_coef]:
            penalty = kl(x, c.inputs["reference_policy_logprobs"], m)
            moved = reinforce(x, -penalty, m)  # NeMo-RL's score-function term: gradient only
            losses = losses + c.args[kl_coef] * (penalty + moved - moved.detach())
        return with_gradient(aggregate(mode(c), losses, m, c.args), x, gradient)

    return call


def nemo_reinforce(c: Case) -> Answer:
    x, mask = leaf(c.inputs["next_token_logprobs"]), c.inputs["token_mask"].bool()
    a = c.inputs["advantages"]
    losses = clipped_surrogate(x, x.detach(), a, mask) if "force_on_policy_ratio" in c.args else reinforce(x, a, mask)
    return with_gradient(token_mean(losses, mask), x, "grad_logprobs")


def slime_policy_loss(c: Case) -> Answer:
    x, mask = leaf(c.inputs["log_probs"]), c.inputs["mask"].bool()
    losses = clipped_surrogate(
        x,
        c.inputs["old_log_probs"],
        c.inputs["advantages"],
        mask,
        clip_low=c.args["eps_clip"],
        clip_high=c.args["eps_clip_high"],
        dual_clip=c.args["eps_clip_c"],
    )
    return {"pg_losses": losses.detach(), "grad_log_probs": slope(losses, x)}


def trl_grpo_loss(c: Case) -> Answer:
    x, mask = leaf(c.inputs["per_token_logps"]), c.inputs["completion_mask"].bool()
    a = to_tokens(c.inputs["advantages"], mask)
    clip = {"clip_low": c.args["epsilon_low"], "clip_high": c.args["epsilon_high"], "dual_clip": c.args.get("delta")}
    losses = clipped_surrogate(x, c.inputs["old_per_token_logps"], a, mask, **clip)
    if c.args.get("vllm_is"):
        losses = losses * torch.where(mask, c.inputs["importance_sampling_ratio"], 0.0)
    if c.args.get("beta"):
        losses = losses + c.args["beta"] * kl(x, c.inputs["ref_per_token_logps"], mask)
    every_row = Totals(tokens=0, sequences=len(mask), groups=0)
    loss = {
        "grpo": lambda: seq_mean_token_mean(losses, mask, totals=every_row),
        "bnpo": lambda: token_mean(losses, mask),
        "dapo": lambda: token_mean(losses, mask),
        "dr_grpo": lambda: seq_mean_token_sum_norm(
            losses, mask, totals=every_row, length=c.args["max_completion_length"]
        ),
    }[c.args["loss_type"]]()
    return with_gradient(loss, x, "grad_log_prob")


def trl_rloo_loss(c: Case) -> Answer:
    """The ratio of whole responses: each is one token of a batch of width one."""
    x, mask = leaf(c.inputs["per_token_logps"]), c.inputs["completion_mask"].bool()
    whole = sequence_sum(x, mask)[:, None]
    losses = clipped_surrogate(whole, c.inputs["old_logps"][:, None], c.inputs["advantages"][:, None], full(whole))
    return with_gradient(token_mean(losses, full(whole)), x, "grad_log_prob")


def rlax_clipped_surrogate(c: Case) -> Answer:
    ratio = c.inputs["prob_ratios_t"][None]
    x, a = leaf(ratio.log()), c.inputs["adv_t"][None]
    bounds = {"clip_low": c.args["epsilon"], "clip_high": c.args["epsilon"]}
    loss = token_mean(clipped_surrogate(x, torch.zeros_like(ratio), a, full(ratio), **bounds), full(ratio))
    return {"loss": loss.detach(), "grad_prob_ratios": (slope(loss, x) / ratio)[0]}


def rlax_policy_gradient(c: Case) -> Answer:
    logits = leaf(c.inputs["logits_t"][None])
    a = (c.inputs["adv_t"] * c.inputs["w_t"])[None]
    loss = token_mean(reinforce(from_logits(logits, c.inputs["a_t"][None]), a, full(a)), full(a))
    return {"loss": loss.detach(), "grad_logits": slope(loss, logits)[0]}


def rlax_entropy(c: Case) -> Answer:
    logits = leaf(c.inputs["logits_t"])
    loss = -(c.inputs["w_t"] * entropy_from_logits(logits)).mean()
    return {"loss": loss.detach(), "grad_logits": slope(loss, logits)}


def _openrlhf_mode(c: Case) -> str:
    return "token-mean" if c.args.get("token_level_loss", True) else "seq-mean-token-mean"


_openrlhf_ppo = ppo(
    "log_probs",
    "old_log_probs",
    "action_mask",
    "grad_log_prob",
    ("clip_eps_low", "clip_eps_high"),
    dual="dual_clip",
    mode=_openrlhf_mode,
)
_skyrl_clip = ("eps_clip_low", "eps_clip_high")


def _nemo_ppo(**options: Any) -> Call:
    return ppo(
        "next_token_logprobs",
        "prev_logprobs",
        "token_mask",
        "grad_logprobs",
        ("ratio_clip_min", "ratio_clip_max"),
        kl_coef="reference_policy_kl_penalty",
        **options,
    )


_areal_ppo = ppo(
    "logprobs",
    "proximal_logprobs",
    "loss_mask",
    "grad_logprobs",
    ("eps_clip", "eps_clip_higher"),
    dual="c_clip",
)


CALLS: Calls = {
    ("verl", "policy_loss.vanilla"): verl_policy_loss,
    ("verl", "policy_loss.reinforce"): verl_policy_loss,
    ("verl", "policy_loss.gpg"): verl_policy_loss,
    ("rlax", "rlax.clipped_surrogate_pg_loss"): rlax_clipped_surrogate,
    ("rlax", "rlax.policy_gradient_loss"): rlax_policy_gradient,
    ("rlax", "rlax.entropy_loss"): rlax_entropy,
    ("trl", "trl_grpo_loss.grpo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.bnpo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.dapo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.dr_grpo"): trl_grpo_loss,
    ("trl", "trl_rloo_loss"): trl_rloo_loss,
    ("openrlhf", "openrlhf_policy_loss.ppo"): _openrlhf_ppo,
    ("openrlhf", "openrlhf_policy_loss.ppo_dual"): _openrlhf_ppo,
    ("openrlhf", "openrlhf_policy_loss.ppo_seq"): _openrlhf_ppo,
    ("skyrl", "skyrl_loss.regular"): ppo(
        "log_probs", "old_log_probs", "loss_mask", "grad_log_probs", _skyrl_clip, mode=lambda c: "token-sum"
    ),
    ("skyrl", "skyrl_loss.dual_clip"): ppo(
        "log_probs",
        "old_log_probs",
        "loss_mask",
        "grad_log_probs",
        _skyrl_clip,
        dual="clip_ratio_c",
        mode=lambda c: "token-sum",
    ),
    ("slime", "slime_policy_loss_tokens"): slime_policy_loss,
    ("nemo_rl", "nemo_loss.ppo"): _nemo_ppo(),
    ("nemo_rl", "nemo_loss.ppo_kl"): _nemo_ppo(),
    ("nemo_rl", "nemo_loss.dual"): _nemo_ppo(dual="ratio_clip_c"),
    ("nemo_rl", "nemo_loss.seq"): _nemo_ppo(mode=lambda c: "seq-mean-token-mean"),
    ("nemo_rl", "nemo_loss.reinforce"): nemo_reinforce,
    ("nemo_rl", "nemo_loss.onpolicy"): nemo_reinforce,
    ("areal", "areal_ppo_loss.token"): _areal_ppo,
    ("areal", "areal_ppo_loss.token_dual"): _areal_ppo,
}
