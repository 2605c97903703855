"""Policy losses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlprims.corrections import Weights, icepop, importance_weights, opsm, rejection, seq_mask_tis, tis
from rlprims.diagnostics import ratio_stats
from rlprims.filters import high_entropy
from rlprims.layout import sequence_sum
from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.losses import (
    cispo,
    clipped_surrogate,
    decoupled_ppo,
    dppo,
    gmpo,
    gspo,
    gspo_token,
    kl,
    opmd,
    reinforce,
    sapo,
    seq_mean_token_mean,
    token_mean,
    tv_symmetric,
    vespo,
)
from rlprims.ratios import log_ratio
from rlprims.types import Totals
from tests.golden_calls import corrections
from tests.golden_calls.common import (
    Losses,
    Policy,
    aggregate,
    as_one_token,
    full,
    leaf,
    mode_of,
    objective,
    per_token,
    policy_of,
    slope,
    with_gradient,
)
from tests.golden_cases import Answer, Call, Calls, Case

CLIP = {
    "verl": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "trl": ("epsilon_low", "epsilon_high", "delta"),
    "openrlhf": ("clip_eps_low", "clip_eps_high", "dual_clip"),
    "skyrl": ("eps_clip_low", "eps_clip_high", "clip_ratio_c"),
    "slime": ("eps_clip", "eps_clip_high", "eps_clip_c"),
    "nemo_rl": ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"),
    "areal": ("eps_clip", "eps_clip_higher", "c_clip"),
}
"""What each peer calls the bounds of the ratio, and the dual clip."""


def clip_of(c: Case) -> dict[str, float]:
    low, high, _ = CLIP[c.peer]
    return {"clip_low": c.args[low], "clip_high": c.args[high]}


def around_one(c: Case) -> dict[str, float]:
    """The distances from 1, as bounds of the weight itself."""
    low, high, _ = CLIP[c.peer]
    return {"w_min": 1 - c.args[low], "w_max": 1 + c.args[high]}


def ppo(c: Case, p: Policy, *, dual: bool = True) -> Tensor:
    dual_clip = c.args.get(CLIP[c.peer][2]) if dual else None
    return clipped_surrogate(p.log_probs, p.old_log_probs, p.advantages, p.mask, dual_clip=dual_clip, **clip_of(c))


def gradient_of(c: Case, p: Policy) -> Tensor:
    return reinforce(p.log_probs, p.advantages, p.mask)


def sequence_ratio(c: Case, p: Policy) -> Tensor:
    return gspo(p.log_probs, p.old_log_probs, p.advantages, p.mask, **clip_of(c))


def sequence_ratio_per_token(c: Case, p: Policy) -> Tensor:
    return gspo_token(p.log_probs, p.old_log_probs, p.advantages, p.mask, **clip_of(c))


def clipped_weight(c: Case, p: Policy) -> Tensor:
    return cispo(p.log_probs, p.old_log_probs, p.advantages, p.mask, **around_one(c))


def soft_gate(c: Case, p: Policy) -> Tensor:
    taus = {name: c.args[name] for name in ("tau_pos", "tau_neg") if name in c.args}
    if c.peer == "trl":
        taus["tau_neg"] = torch.tensor(1.05).item()  # its default, in float32
    return sapo(p.log_probs, p.old_log_probs, p.advantages, p.mask, **taus)


def weighted(losses: Losses) -> Losses:
    """verl multiplies the correction of its rollout into the losses."""

    def call(c: Case, p: Policy) -> Tensor:
        weights = c.inputs["rollout_is_weights"]
        return losses(c, p) if weights is None else losses(c, p) * weights

    return call


def verl_vanilla(c: Case) -> Answer:
    p = policy_of(c)
    metrics = ratio_stats(p.log_probs, p.old_log_probs, p.advantages, p.mask, **clip_of(c))
    share = metrics["clip_fraction_low"].value() + metrics["clip_fraction_high"].value()
    return {**objective(weighted(ppo))(c), "metric_pg_clipfrac": share}


def verl_dppo(divergence: str) -> Losses:
    def losses(c: Case, p: Policy) -> Tensor:
        """verl has the weight of a token as a constant before its log-prob: another value, the same gradient."""
        low, high, largest = (c.args[name] for name in CLIP["verl"])
        surrogate = dppo(
            p.log_probs,
            p.old_log_probs,
            p.advantages,
            p.mask,
            divergence=divergence,
            threshold_low=low,
            threshold_high=high,
            w_max=largest,
        )
        return surrogate.detach() * torch.where(p.mask, p.log_probs, 0.0)

    return losses


def verl_gmpo(c: Case, p: Policy) -> Tensor:
    """The correction of a response is the geometric mean of its tokens'."""
    losses = gmpo(p.log_probs, p.old_log_probs, p.advantages, p.mask, **clip_of(c))
    weights = c.inputs["rollout_is_weights"]
    if weights is None:
        return losses
    whole = {"level": "sequence", "mean": "geometric", "high": torch.inf}
    return losses * importance_weights(weights.log(), torch.zeros_like(weights), p.mask, **whole).values


def verl_geo_mean(c: Case) -> Answer:
    """It takes the mean over all rows, whatever it is asked."""
    p = policy_of(c)
    loss = seq_mean_token_mean(verl_gmpo(c, p), p.mask, totals=Totals(0, len(p.mask), 0))
    return with_gradient(loss, p.log_probs, "grad_log_prob")


def verl_dro(c: Case, p: Policy) -> Tensor:
    return opmd(p.log_probs, p.old_log_probs, p.advantages, p.mask, tau=c.args["dro_beta"], level="token")


def verl_bypass(c: Case) -> Answer:
    """The old policy is the sampler, and the corrections are of now; what is rejected leaves the denominator too."""
    p = policy_of(c)
    gap = {"log_ratio": (p.log_probs - p.old_log_probs).detach(), "response_mask": p.mask}
    plain = {"rollout_is_batch_normalize": False, "rollout_rs_threshold": str(c.args["rollout_rs_threshold"])}
    now = replace(c, inputs=gap, args={**c.args, **plain})
    mask = p.mask if c.args["rollout_rs"] is None else corrections.verl_rejection(now)["modified_mask"].bool()
    kept = replace(p, mask=mask)
    if c.args["loss_type"] == "reinforce":
        losses = gradient_of(c, kept) * corrections.verl_weights(now)["weights"]
    else:
        losses = clipped_surrogate(p.log_probs, p.old_log_probs, p.advantages, mask, dual_clip=3.0)
    return with_gradient(aggregate(mode_of(c), losses, mask, c.args), p.log_probs, "grad_log_prob")


def trl_options(losses: Losses) -> Losses:
    """TRL's selections of tokens, sampler correction and KL penalty, around any of its losses."""

    def call(c: Case, p: Policy) -> Tensor:
        got = losses(c, p)
        if c.args.get("off_policy_mask_threshold"):
            delta = c.args["off_policy_mask_threshold"]
            got = got * opsm(p.log_probs, p.old_log_probs, p.advantages, p.mask, delta=delta).values
        if c.args.get("top_entropy_quantile"):
            got = got * high_entropy(c.inputs["entropies"], p.mask, fraction=c.args["top_entropy_quantile"])
        if c.args.get("vllm_is"):
            got = got * torch.where(p.mask, c.inputs["importance_sampling_ratio"], 0.0)
        if c.args.get("beta"):
            penalty = kl(p.log_probs, c.inputs["ref_per_token_logps"], p.mask)
            if c.args.get("use_bias_correction_kl"):
                penalty = penalty * log_ratio(p.log_probs, p.old_log_probs, p.mask).exp()
            got = got + c.args["beta"] * penalty
        return got

    return call


def trl_surrogate(c: Case, p: Policy) -> Tensor:
    return (sequence_ratio if c.args.get("importance_sampling_level") == "sequence" else ppo)(c, p)


def trl_cispo(c: Case, p: Policy) -> Tensor:
    """Its epsilon is the cap itself."""
    return cispo(p.log_probs, p.old_log_probs, p.advantages, p.mask, w_min=0.0, w_max=c.args["epsilon_high"])


def trl_vespo(c: Case, p: Policy) -> Tensor:
    """The ratio is to the sampler: TRL has the way from its old policy to the sampler's as a weight."""
    sampler = p.old_log_probs
    if c.args.get("vllm_is"):
        sampler = sampler - c.inputs["importance_sampling_ratio"].log()
    return vespo(p.log_probs, sampler, p.advantages, p.mask)


def trl_vespo_gamma(c: Case) -> Answer:
    """The weight is the loss of one log-prob of −1 and an advantage of ±1."""
    mask, ratio = c.inputs["mask"].bool(), c.inputs["log_ratio_per_token"]
    sign = torch.where(c.inputs["advantages"] >= 0, 1.0, -1.0).to(ratio.dtype).expand(ratio.shape)
    losses = vespo(-full(ratio).to(ratio.dtype), -1 - ratio, sign, mask, **c.args)
    phi = losses * sign
    return {"phi": phi.max(-1, keepdim=True).values}


def trl_rloo_loss(c: Case) -> Answer:
    """The ratio of whole responses: each is one token of a batch of width one."""
    x, mask = leaf(c.inputs["per_token_logps"]), c.inputs["completion_mask"].bool()
    whole = sequence_sum(x, mask)[:, None]
    losses = clipped_surrogate(whole, c.inputs["old_logps"][:, None], c.inputs["advantages"][:, None], full(whole))
    return with_gradient(token_mean(losses, full(whole)), x, "grad_log_prob")


def corrected(losses: Losses, weights: Callable[..., Weights]) -> Losses:
    """Times the weights of trainer over sampler."""

    def call(c: Case, p: Policy) -> Tensor:
        return losses(c, p) * weights(p.old_log_probs, sampler_of(c), p.mask, **correction_bounds(c)).values

    return call


def sampler_of(c: Case) -> Tensor:
    names = {"openrlhf": "rollout_log_probs", "nemo_rl": "generation_logprobs", "skyrl": "rollout_logprobs"}
    return c.inputs[names[c.peer]]


def correction_bounds(c: Case) -> dict[str, Any]:
    if c.peer == "openrlhf":
        low, high = c.args["vllm_is_truncated_threshold"]
        return {"low": low, "high": high}
    if c.peer == "nemo_rl":
        low, high = (c.args.get(f"truncated_importance_sampling_ratio{end}") for end in ("_min", ""))
        return {"high": high} if low is None else {"low": low, "high": high}
    level = c.args["off_policy_correction"]["tis_ratio_type"]
    return {"level": level, "high": c.args["off_policy_correction"][f"{level}_tis_ratio_clip_high"]}


def openrlhf_gspo_tis(c: Case, p: Policy) -> Tensor:
    """Under a correction the ratio of a response is to the sampler, and nothing is truncated."""
    return gspo(p.log_probs, sampler_of(c), p.advantages, p.mask, **clip_of(c))


def nemo_penalized(c: Case, p: Policy) -> Tensor:
    """NeMo-RL's KL has a score-function term: gradient only."""
    penalty = kl(p.log_probs, c.inputs["reference_policy_logprobs"], p.mask)
    moved = reinforce(p.log_probs, -penalty, p.mask)
    return ppo(c, p) + c.args["reference_policy_kl_penalty"] * (penalty + moved - moved.detach())


def nemo_on_policy(c: Case, p: Policy) -> Tensor:
    return clipped_surrogate(p.log_probs, p.log_probs.detach(), p.advantages, p.mask)


def skyrl_cispo(c: Case, p: Policy) -> Tensor:
    settings = c.args.get("cispo", {})
    anchor = c.inputs["rollout_logprobs"] if settings.get("cispo_anchor") == "rollout" else p.old_log_probs
    bounds = {
        "w_min": 1 - settings.get("cispo_eps_clip_low", 1.0),
        "w_max": 1 + settings.get("cispo_eps_clip_high", 4.0),
    }
    return cispo(p.log_probs, anchor, p.advantages, p.mask, **bounds)


def skyrl_dppo(c: Case, p: Policy) -> Tensor:
    settings = c.args.get("dppo", {})
    return dppo(
        p.log_probs,
        c.inputs["rollout_logprobs"],
        p.advantages,
        p.mask,
        divergence="kl" if settings.get("dppo_type") == "binary_kl" else "tv",
        # for tv not recorded; what is kept says that they lie in (0.072, 0.105) and (0.129, 0.213)
        threshold_low=settings.get("delta_low", 0.1),
        threshold_high=settings.get("delta_high", 0.2),
    )


def skyrl_rollout_is(c: Case, p: Policy) -> Tensor:
    """REINFORCE, weighed by the ratio to the sampler where it is within the bounds of a clip."""
    low, high = (c.args[name] for name in CLIP["skyrl"][:2])
    return gradient_of(c, p) * icepop(p.log_probs, sampler_of(c), p.mask, low=1 - low, high=1 + high).values


def slime_gspo_kl(c: Case) -> Answer:
    """The loss of an advantage of −1 within wide bounds is the ratio, and the KL minus its logarithm."""
    x, old, mask = c.inputs["log_probs"], c.inputs["old_log_probs"], c.inputs["mask"].bool()
    ratio = gspo(x, old, -full(x).to(x.dtype), mask, clip_low=1.0, clip_high=torch.inf)
    return {"ppo_kl": -torch.where(mask, ratio, 1.0).log()}


def slime_opsm(c: Case) -> Answer:
    """slime measures from its old policy."""
    p = policy_of(c)
    kept = opsm(p.log_probs, p.old_log_probs, p.advantages, p.mask, delta=c.args["opsm_delta"])
    return {"opsm_mask": kept.values}


def prime_rl(losses: Losses) -> Call:
    """prime-rl sums a sequence's tokens, and adds the squared log-ratio."""

    def call(c: Case) -> Answer:
        p = policy_of(c)
        got = losses(c, p)
        return {"per_sequence_loss": sequence_sum(got, p.mask).detach(), "grad_logprobs": slope(got, p.log_probs)}

    return call


def prime_penalty(c: Case, p: Policy, tau: float) -> Tensor:
    return 2 * tau * kl(p.log_probs, p.old_log_probs, p.mask, value="k2")


def prime_dppo(c: Case, p: Policy) -> Tensor:
    bounds = {"threshold_low": c.args["dppo_mask_low"], "threshold_high": c.args["dppo_mask_high"]}
    advantages = c.args["adv_tau"] * p.advantages
    return dppo(p.log_probs, p.old_log_probs, advantages, p.mask, **bounds) + prime_penalty(c, p, c.args["kl_tau"])


def prime_ipo(c: Case, p: Policy) -> Tensor:
    advantages = c.args["adv_tau"] * p.advantages
    kept = tv_symmetric(p.log_probs, p.old_log_probs, advantages, p.mask, threshold=c.args["ipo_threshold"])
    return kept + prime_penalty(c, p, c.args["kl_tau"])


def prime_ref_kl(c: Case, p: Policy) -> Tensor:
    """The advantage is the log-ratio to the teacher, and the region is bounded from below, whatever its sign."""
    low = {"threshold_low": c.args["mask_low"], "threshold_high": torch.inf}
    falling = -torch.ones_like(p.log_probs)
    kept = dppo(p.log_probs, p.old_log_probs, falling, p.mask, **low) != 0
    teacher = (c.inputs["ref_logprobs"] - p.log_probs).detach()
    unbounded = dppo(p.log_probs, p.old_log_probs, teacher, p.mask, threshold_low=1.0, threshold_high=1.0)
    return torch.where(kept, unbounded, 0.0) + prime_penalty(c, p, c.args["kl"])


def areal_gate(c: Case, p: Policy) -> Tensor:
    """The weights of the proximal over the behaviour policy, where a rule keeps them."""
    rule, both = c.args["rejection_sampling"], (p.old_log_probs, c.inputs["old_logprobs"])
    bounds = {"high": rule["upper"]} if rule["lower"] is None else {"low": rule["lower"], "high": rule["upper"]}
    if rule["metric"] == "ratio":
        action = "truncate" if rule["action"] == "clamp" else "mask"
        mean = "geometric" if rule["level"] == "sequence" else "product"
        weights = importance_weights(*both, p.mask, level=rule["level"], mean=mean, action=action, **bounds)
    else:
        way = (*reversed(both),) if rule["metric"] == "kl_k3" else both  # its k3 is of the divergence the other way
        estimator = rule["metric"].removeprefix("kl_")
        kept = rejection(*way, p.mask, estimator=estimator, level=rule["level"], statistic=rule["agg"], **bounds)
        return decoupled_ppo(p.log_probs, *both, p.advantages, p.mask, **clip_of(c)) * kept.values
    return ppo(c, p) * weights.values


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


def in_sequences(c: Case) -> str:
    return "seq-mean-token-mean"


VERL = {
    "reinforce": gradient_of,
    "gpg": gradient_of,
    "cispo": clipped_weight,
    "gspo": sequence_ratio_per_token,
    "dppo_tv": verl_dppo("tv"),
    "dppo_kl": verl_dppo("kl"),
    "dro": verl_dro,
}
TRL = {
    "grpo": trl_surrogate,
    "bnpo": trl_surrogate,
    "dapo": trl_surrogate,
    "dr_grpo": trl_surrogate,
    "luspo": trl_surrogate,
    "cispo": trl_cispo,
    "sapo": soft_gate,
}
OPENRLHF = {
    "ppo": ppo,
    "ppo_dual": ppo,
    "ppo_seq": ppo,
    "ppo_tis": corrected(ppo, importance_weights),
    "ppo_icepop": corrected(ppo, icepop),
    "ppo_seq-mask-tis": corrected(ppo, seq_mask_tis),
}
SKYRL = {
    "regular": lambda c, p: ppo(c, p, dual=False),
    "dual_clip": ppo,
    "regular_tis_token": corrected(lambda c, p: ppo(c, p, dual=False), importance_weights),
    "regular_tis_seq": corrected(lambda c, p: ppo(c, p, dual=False), importance_weights),
    "gspo": sequence_ratio_per_token,
    "sapo": soft_gate,
    "cispo": skyrl_cispo,
    "cispo_rollout": skyrl_cispo,
    "dppo_tv": skyrl_dppo,
    "dppo_kl": skyrl_dppo,
    "rollout_is": skyrl_rollout_is,
}
NEMO = {
    "ppo": ppo,
    "ppo_kl": nemo_penalized,
    "dual": ppo,
    "seq": ppo,
    "gspo": sequence_ratio,
    "cispo": clipped_weight,
    "tis": corrected(ppo, tis),
    "icepop": corrected(ppo, icepop),
    "seqmasktis": corrected(ppo, seq_mask_tis),
    "reinforce": gradient_of,
    "onpolicy": nemo_on_policy,
}
AREAL = {
    "areal_ppo_loss.token": ppo,
    "areal_ppo_loss.token_dual": ppo,
    "areal_ppo_loss.sequence": as_one_token(ppo),
    "areal_ppo_loss.sequence_dual": as_one_token(ppo),
    "areal_ppo_loss.token_rs_ratio_token_mask": areal_gate,
    "areal_ppo_loss.token_rs_ratio_token_clamp": areal_gate,
    "areal_ppo_loss.token_rs_ratio_sequence_mask": areal_gate,
    "areal_ppo_loss.token_rs_kl_k2_sequence_mask": areal_gate,
    "areal_ppo_loss.token_rs_kl_k3_token_mask": areal_gate,
    "areal_sapo_loss.token": soft_gate,
    "areal_sapo_loss.sequence": as_one_token(soft_gate),
}

CALLS: Calls = {
    ("verl", "policy_loss.vanilla"): verl_vanilla,
    **{("verl", f"policy_loss.{name}"): objective(weighted(losses)) for name, losses in VERL.items()},
    ("verl", "policy_loss.bypass_mode"): verl_bypass,
    ("verl", "policy_loss.sapo"): objective(weighted(soft_gate), in_sequences),
    ("verl", "policy_loss.geo_mean"): verl_geo_mean,
    **{("trl", f"trl_grpo_loss.{name}"): objective(trl_options(losses)) for name, losses in TRL.items()},
    ("trl", "trl_grpo_loss.vespo"): objective(trl_vespo),
    ("trl", "trl_vespo_gamma"): trl_vespo_gamma,
    ("trl", "trl_rloo_loss"): trl_rloo_loss,
    **{("openrlhf", f"openrlhf_policy_loss.{name}"): objective(losses) for name, losses in OPENRLHF.items()},
    ("openrlhf", "openrlhf_policy_loss.gspo"): objective(sequence_ratio, in_sequences),
    ("openrlhf", "openrlhf_policy_loss.gspo_tis"): objective(openrlhf_gspo_tis, in_sequences),
    **{("skyrl", f"skyrl_loss.{name}"): objective(losses) for name, losses in SKYRL.items()},
    ("slime", "slime_policy_loss_tokens"): per_token(ppo, "pg_losses"),
    ("slime", "slime_cispo_tokens"): per_token(clipped_weight, "pg_losses"),
    ("slime", "slime_gspo_kl"): slime_gspo_kl,
    ("slime", "slime_opsm_mask"): slime_opsm,
    **{("nemo_rl", f"nemo_loss.{name}"): objective(losses) for name, losses in NEMO.items()},
    **{("areal", name): objective(losses) for name, losses in AREAL.items()},
    ("prime_rl", "prime_loss.dppo_kl"): prime_rl(prime_dppo),
    ("prime_rl", "prime_loss.ipo"): prime_rl(prime_ipo),
    ("prime_rl", "prime_loss.ref_kl"): prime_rl(prime_ref_kl),
    ("rlax", "rlax.clipped_surrogate_pg_loss"): rlax_clipped_surrogate,
    ("rlax", "rlax.policy_gradient_loss"): rlax_policy_gradient,
    ("rlax", "rlax.entropy_loss"): rlax_entropy,
}
