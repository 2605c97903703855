"""KL, values, log-probs, rewards and filters."""

import torch

from rlprims.controllers import AdaptiveKL, FixedKL
from rlprims.diagnostics import log_perplexity, sampler_mismatch
from rlprims.filters import high_entropy, varied_scores
from rlprims.grouping import dense_ids
from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.losses import kl, reinforce, seq_mean_token_mean, value_loss
from rlprims.rewards import at_last_token, kl_penalty, overlong_penalty
from tests.golden_calls.common import aggregate, full, leaf, slope, with_gradient
from tests.golden_cases import Answer, Call, Calls, Case

ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_of(log_probs: str, ref: str, gradient: str, kind: str, mask: str | None = None) -> Call:
    def call(c: Case) -> Answer:
        x = leaf(c.inputs[log_probs])
        m = full(x) if mask is None else c.inputs[mask].bool()
        name = c.args[kind]
        through = "k2" if name.endswith("+") else None
        got = kl(x, c.inputs[ref], m, value=ESTIMATORS[name.rstrip("+")], gradient=through)
        if c.args.get("score_function_term"):  # NeMo-RL's: gradient only
            moved = reinforce(x, -got, m)
            got = got + moved - moved.detach()
        if c.inputs.get("importance_ratio") is not None:
            got = got * c.inputs["importance_ratio"]
        return {"kl": got.detach(), gradient: slope(got, x, c.inputs.get("cotangent"))}

    return call


def apply_kl_penalty(c: Case) -> Answer:
    mask, old, ref = c.inputs["response_mask"].bool(), c.inputs["old_log_probs"], c.inputs["ref_log_prob"]
    start = c.args["kl_coef"]
    beta = (
        AdaptiveKL(kl_coef=start, target=c.args["target_kl"], horizon=c.args["horizon"])
        if c.args["controller"] == "adaptive"
        else FixedKL(kl_coef=start)
    )
    estimator = ESTIMATORS[c.args["kl_penalty"]]
    rewards = kl_penalty(c.inputs["token_level_scores"], old, ref, mask, kl_coef=beta.value, estimator=estimator)
    current = seq_mean_token_mean(kl(old, ref, mask, value=estimator), mask)
    beta.update(kl=float(current), samples=len(mask))
    return {
        "token_level_rewards": rewards,
        "current_kl": current,
        "beta_used": torch.tensor(start),
        "beta_next": torch.tensor(beta.value, dtype=torch.float64),
    }


def adaptive_kl(c: Case) -> Answer:
    beta = AdaptiveKL(kl_coef=c.args["init_kl_coef"], target=c.args["target_kl"], horizon=c.args["horizon"])
    values = []
    for current, samples in zip(c.inputs["current_kl"].tolist(), c.inputs["n_steps"].tolist(), strict=True):
        beta.update(kl=current, samples=samples)
        values.append(beta.value)
    return {"values": torch.tensor(values, dtype=torch.float64)}


def verl_compute_rewards(c: Case) -> Answer:
    scores, old, ref = (c.inputs[name] for name in ("token_level_scores", "old_log_prob", "ref_log_prob"))
    return {"rewards": kl_penalty(scores, old, ref, full(scores), kl_coef=c.args["kl_ratio"])}


def openrlhf_compute_reward(c: Case) -> Answer:
    mask, distance = c.inputs["action_mask"].bool(), c.inputs["kl"]
    rewards = at_last_token(c.inputs["r"].clamp(*c.args["reward_clip_range"]), mask)
    return {"reward": kl_penalty(rewards, distance, torch.zeros_like(distance), mask, kl_coef=c.args["kl_coef"])}


def value_of(new: str, old: str, target: str, mask: str, clip: str, gradient: str) -> Call:
    def call(c: Case) -> Answer:
        x, m = leaf(c.inputs[new]), c.inputs[mask].bool()
        mode = c.args.get("loss_agg_mode") or (
            "token-mean" if c.args.get("token_level_loss", True) else "seq-mean-token-mean"
        )
        delta = c.args["huber_delta"] if c.args.get("loss_fn_type") == "huber" else None
        losses = value_loss(x, c.inputs[old], c.inputs[target], m, clip=c.args[clip], huber_delta=delta)
        return with_gradient(aggregate(mode, losses, m, c.args), x, gradient)

    return call


def logits_entropy(c: Case) -> Answer:
    logits = leaf(c.inputs["logits"])
    got = entropy_from_logits(logits)
    answer = {"entropy": got.detach()}
    if "cotangent" in c.inputs:
        answer["grad_logits"] = slope(got, logits, c.inputs["cotangent"])
    return answer


def logits_log_probs(tokens: str) -> Call:
    def call(c: Case) -> Answer:
        logits = leaf(c.inputs["logits"])
        temperature = c.args.get("temperature", 1.0)
        got = from_logits(logits, c.inputs[tokens], temperature=temperature)
        return {"logprobs": got.detach(), "grad_logits": slope(got, logits, c.inputs["cotangent"])}

    return call


def verl_off_policy_metrics(c: Case) -> Answer:
    trainer, sampler, mask = (c.inputs[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask"))
    metrics = sampler_mismatch(trainer, sampler, mask.bool())
    names = {"kl": "k1", "k3_kl": "k3", "chi2_token": "chi2", "chi2_seq": "chi2_sequence"}
    return {
        **{theirs: metrics[f"mismatch_{ours}"].value() for theirs, ours in names.items()},
        "training_log_ppl": log_perplexity(trainer, mask.bool()).value(),
        "rollout_log_ppl": log_perplexity(sampler, mask.bool()).value(),
    }


def sum_pi_squared(c: Case) -> Answer:
    """Σπ² is exp(lse(2z) − 2 lse(z)): of any token, its log-prob at temperature 1 and at 1/2."""
    logits = c.inputs["logits"]
    any_token = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    at = {t: from_logits(logits, any_token, temperature=t) for t in (1.0, 0.5)}
    return {"sum_pi_squared": (2 * at[1.0] - at[0.5]).exp()}


def trl_high_entropy(c: Case) -> Answer:
    mask, fraction = c.inputs["mask"].bool(), max(1 - c.args["threshold_quantile"], 1e-9)
    return {"mask": high_entropy(c.inputs["entropies"], mask, fraction=fraction)}


def overlong_of(longest: str, buffer: str, factor: str) -> Call:
    def call(c: Case) -> Answer:
        lengths = c.inputs["response_lengths"]
        width = max(int(lengths.max()), c.args.get("response_width", 0))
        mask = torch.arange(width) < lengths[:, None]
        penalty = overlong_penalty(
            mask, max_length=c.args[longest], buffer_length=c.args[buffer], penalty_factor=c.args[factor]
        )
        answer = {"penalty": penalty, "overlong_reward": penalty}
        if "scores" in c.inputs:
            answer["reward_tensor"] = at_last_token(c.inputs["scores"] + penalty, mask)
        return {name: x for name, x in answer.items() if name in c.outputs}

    return call


def verl_group_filter(c: Case) -> Answer:
    return {"kept": varied_scores(c.inputs["metric"], dense_ids(c.inputs["uid"]))}


def slime_filter(c: Case) -> Answer:
    groups = c.args["groups"]
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    keep = varied_scores(torch.tensor([s for group in groups for s in group], dtype=torch.float64), ids)
    return {"keep": torch.stack([keep[ids == i].all() for i in range(len(groups))])}


AREAL_VALUE = value_of("value", "old_value", "target_value", "loss_mask", "value_eps_clip", "grad_value")

CALLS: Calls = {
    ("verl", "kl_penalty"): kl_of("logprob", "ref_logprob", "grad_logprob", "kl_penalty"),
    ("verl", "apply_kl_penalty"): apply_kl_penalty,
    ("verl", "adaptive_kl_controller"): adaptive_kl,
    ("verl", "compute_rewards"): verl_compute_rewards,
    ("verl", "dapo_overlong"): overlong_of("max_resp_len", "overlong_buffer_len", "penalty_factor"),
    ("verl", "group_filter"): verl_group_filter,
    ("verl", "value_loss"): value_of("vpreds", "values", "returns", "response_mask", "cliprange_value", "grad_vpreds"),
    ("verl", "entropy_from_logits"): logits_entropy,
    ("verl", "logprobs_from_logits"): logits_log_probs("labels"),
    ("verl", "offpolicy_metrics"): verl_off_policy_metrics,
    ("verl", "sum_pi_squared"): sum_pi_squared,
    ("trl", "trl_high_entropy_mask"): trl_high_entropy,
    ("trl", "entropy_from_logits"): logits_entropy,
    ("trl", "selective_log_softmax"): logits_log_probs("index"),
    ("openrlhf", "openrlhf_overlong"): overlong_of("max_new_tokens", "overlong_buffer_len", "overlong_penalty_factor"),
    ("openrlhf", "openrlhf_compute_reward"): openrlhf_compute_reward,
    ("openrlhf", "openrlhf_approx_kl.k1"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_approx_kl.k2"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_approx_kl.k3"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_value_loss"): value_of(
        "values", "old_values", "returns", "action_mask", "clip_eps", "grad_values"
    ),
    ("slime", "slime_approx_kl.k1"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.k2"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.k3"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.low_var_kl"): kl_of(
        "log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"
    ),
    ("slime", "slime_nonzero_std_filter"): slime_filter,
    ("nemo_rl", "nemo_kl.k1"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_kl.k2"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_kl.k3"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_overlong"): overlong_of(
        "max_response_length", "overlong_buffer_length", "overlong_buffer_penalty"
    ),
    ("areal", "areal_overlong"): overlong_of("max_response_length", "overlong_tokens", "overlong_penalty_factor"),
    ("areal", "areal_value_loss.mse"): AREAL_VALUE,
    ("areal", "areal_value_loss.huber"): AREAL_VALUE,
}
