"""Which call of ours each recorded case is. A call takes the case and answers by the names of the peer's outputs."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from golden_cases import Case
from torch import Tensor

from rlprims.advantage import discounted_returns, gae, grpo, remax, rloo, whiten
from rlprims.controllers import AdaptiveKL, FixedKL
from rlprims.diagnostics import policy_update
from rlprims.filters import nonzero_range
from rlprims.grouping import dense_ids, group_centred, group_count, group_mean, group_std
from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.losses import (
    clipped_surrogate,
    kl,
    prompt_token_mean,
    reinforce,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    token_sum,
    value,
)
from rlprims.masking import masked_mean, sequence_lengths, sequence_sum, to_tokens
from rlprims.rewards import at_last_token, kl_penalty, overlong_penalty
from rlprims.types import Totals

Answer = Mapping[str, Tensor]


def full(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def slope(y: Tensor, x: Tensor, cotangent: Tensor | None = None) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y) if cotangent is None else cotangent, retain_graph=True)[0]


def with_gradient(loss: Tensor, x: Tensor, name: str) -> Answer:
    return {"loss": loss.detach(), name: slope(loss, x)}


# Aggregation


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


def agg_loss(c: Case) -> Answer:
    x = leaf(c.inputs["loss_mat"])
    return with_gradient(
        aggregate(c.args["loss_agg_mode"], x, c.inputs["loss_mask"].bool(), c.args), x, "grad_loss_mat"
    )


def agg_loss_microbatch(c: Case) -> Answer:
    x, mask, cuts = c.inputs["loss_mat"], c.inputs["loss_mask"].bool(), c.args["cuts"]
    parts = [aggregate(c.args["loss_agg_mode"], x[a:b], mask[a:b], c.args) for a, b in pairwise(cuts)]
    return {
        "loss_whole": aggregate(c.args["loss_agg_mode"], x, mask, c.args),
        "loss_parts": torch.stack(parts).reshape(c.outputs["loss_parts"].shape),
    }


def skyrl_advantage_scaling(c: Case) -> Answer:
    """SkyRL scales advantages so that a sum is the mean: by the gradient of our mean."""
    mask, losses = c.inputs["loss_mask"].bool(), leaf(c.inputs["advantages"])
    bounds = c.args["prompt_boundaries"]
    ids = torch.tensor([i for i, (a, b) in enumerate(bounds) for _ in range(b - a)])
    loss = {
        "token_mean": lambda: token_mean(losses, mask),
        "sequence_mean": lambda: seq_mean_token_mean(losses, mask, totals=Totals(0, len(mask), 0)),
        "seq_mean_token_sum_norm": lambda: seq_mean_token_sum_norm(
            losses, mask, totals=Totals(0, len(mask), 0), length=c.args["max_seq_len"]
        ),
        "prompt_mean": lambda: prompt_token_mean(losses, ids, mask),
    }[c.args["loss_reduction"]]()
    return {"scaled": slope(loss, losses) * c.inputs["advantages"]}


# Advantages


def gae_of(rewards: str, mask: str, lam: str, *, whitened: bool = False) -> Callable[[Case], Answer]:
    def call(c: Case) -> Answer:
        r, v = c.inputs[rewards], c.inputs["values"]
        m = c.inputs[mask].bool() if mask in c.inputs else full(v)
        r = at_last_token(r, m) if r.dim() == 1 else r
        gamma = c.args.get("gamma", c.args.get("gae_gamma"))
        advantages = gae(r, v, m, gamma=gamma, lam=c.args[lam])
        returns = torch.where(m, advantages + v, 0.0)
        return {"advantages": whiten(advantages, m) if whitened else advantages, "returns": returns}

    return call


def group_baseline(c: Case) -> Answer:
    mask, index = c.inputs["response_mask"].bool(), c.inputs["index"]
    rewards, ids = c.inputs["token_level_rewards"], dense_ids(index)
    if "rloo" in c.primitive:
        advantages = rloo(rewards, ids, mask)
    else:
        advantages = grpo(
            rewards,
            ids,
            mask,
            normalize_std=c.args["norm_adv_by_std_in_grpo"],
            ddof=c.args.get("std_ddof", 1),
            eps=c.args["epsilon"],
            singleton="raw" if c.recommend == "either" else "zero",
        )
    return {"advantages": advantages, "returns": advantages}


def verl_remax(c: Case) -> Answer:
    mask, rewards = c.inputs["response_mask"].bool(), c.inputs["token_level_rewards"]
    return {
        "advantages": remax(rewards, c.inputs["reward_baselines"], mask),
        "returns": discounted_returns(rewards, mask),
    }


def group_statistics(c: Case) -> Answer:
    x, ids = c.inputs["scores"], c.inputs["gidx"]
    first = [ids.tolist().index(i) for i in range(int(ids.max()) + 1)]
    statistics = {"mean": group_mean(x, ids), "std": group_std(x, ids), "count": group_count(ids)}
    return {name: s[first] for name, s in statistics.items()}


def per_response(scores: Tensor, ids: Tensor, estimator: Callable[..., Tensor], **hyperparameters: Any) -> Tensor:
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return estimator(scores[:, None], ids, mask, **hyperparameters)[:, 0]


def openrlhf_group(c: Case) -> Answer:
    scores, n, width = c.inputs["rewards"], c.args["n_samples_per_prompt"], c.args["tokens_per_row"]
    ids, mask = torch.arange(len(scores)) // n, torch.ones(len(scores), width, dtype=torch.bool)
    rewards = at_last_token(scores, mask)
    advantages = {
        "rloo": lambda: rloo(rewards, ids, mask),
        "dr_grpo": lambda: grpo(rewards, ids, mask, normalize_std=False),
        "group_norm": lambda: grpo(rewards, ids, mask, eps=1e-9),
        "reinforce_baseline": lambda: whiten(grpo(rewards, ids, mask, normalize_std=False), mask, ddof=0),
    }[c.args["estimator"]]()
    return {"advantages": advantages}


def trl_grpo_advantage(c: Case) -> Answer:
    weights = torch.tensor(c.args["reward_weights"])
    scores = c.inputs["rewards_per_func"] @ weights
    known = scores.isfinite()
    scores = torch.where(known, scores, 0.0)
    ids = torch.arange(len(scores)) // c.args["num_generations"]
    by_group = c.args["scale_rewards"] == "group"
    advantages = per_response(
        scores,
        ids,
        lambda r, i, m, **h: grpo(r, i, m, valid_rows=known, **h),
        normalize_std=by_group,
        eps=c.args["std_eps"],
    )
    if c.args["scale_rewards"] == "batch":
        advantages = advantages / (group_std(scores, torch.zeros_like(ids), known) + c.args["std_eps"])
    return {"advantages": torch.where(known, advantages, 0.0)}


def nemo_grpo_advantage(c: Case) -> Answer:
    ids = dense_ids([tuple(p) for p in c.inputs["prompt_ids"].tolist()])
    if c.args["use_leave_one_out_baseline"]:
        a = per_response(c.inputs["rewards"], ids, rloo)
    else:
        a = per_response(
            c.inputs["rewards"], ids, grpo, normalize_std=c.args["normalize_rewards"], ddof=1, eps=c.args["eps"]
        )
    return {"advantages": to_tokens(a, c.inputs["mask"].bool())}


def areal_normalization(c: Case) -> Answer:
    scores = c.inputs["x"]
    ids = torch.arange(len(scores)) // c.args["group_size"]
    ddof = 1 if c.args["std_unbiased"] else 0
    centred = per_response(scores, ids, rloo) if c.args["mean_leave1out"] else group_centred(scores, ids)
    spread_of = {"group": ids, "batch": torch.zeros_like(ids)}.get(c.args["std_level"])
    if spread_of is None:
        return {"out": centred}
    return {"out": centred / (group_std(scores, spread_of, ddof=ddof) + c.args["eps"])}


# Statistics


def verl_masked_mean(c: Case) -> Answer:
    x, mask = c.inputs["values"], c.inputs["mask"].bool()
    sums = sequence_sum(x, mask)
    return {
        "all": masked_mean(x, mask),
        "axis1": sums / sequence_lengths(mask).clamp(min=1),
        "sum_all": token_sum(x, mask),
        "sum_axis1": sums,
    }


def verl_whiten(c: Case) -> Answer:
    x, mask = c.inputs["values"], c.inputs["mask"].bool()
    whitened = whiten(x, mask, ddof=c.args["ddof"], eps=c.args["eps"])
    if not c.args["shift_mean"]:
        whitened = torch.where(mask, whitened + masked_mean(x, mask), 0.0)
    return {"whitened": whitened}


def openrlhf_whiten(c: Case) -> Answer:
    x, mask = c.inputs["tensor"], c.inputs["mask"].bool()
    rows = [whiten(x[i : i + 1], mask[i : i + 1], ddof=0, eps=1e-30) for i in range(len(x))]
    return {"out": torch.cat(rows)}


def areal_whiten(c: Case) -> Answer:
    return {"out": whiten(c.inputs["x"], c.inputs["mask"].bool(), ddof=1 if c.args["unbiased"] else 0, eps=0.0)}


# Returns


def packed_by_discount(discounts: Tensor) -> Tensor:
    """rlax ends an episode by a discount of 0."""
    ends = [i + 1 for i, d in enumerate(discounts.tolist()) if d == 0 or i == len(discounts) - 1]
    return torch.tensor([0, *ends])


def rlax_gae(c: Case) -> Answer:
    r, discounts, values = c.inputs["r_t"], c.inputs["discount_t"], c.inputs["values"]
    cu = packed_by_discount(discounts)
    bootstrap = torch.zeros(len(cu) - 1, dtype=r.dtype)
    bootstrap[-1] = values[-1]
    gamma = float(discounts.max())
    return {"advantage": gae(r, values[:-1], full(r), cu, bootstrap, gamma=gamma, lam=c.args["lambda_"])}


def rlax_returns(c: Case) -> Answer:
    r, discounts = c.inputs["r_t"], c.inputs["discount_t"]
    cu = packed_by_discount(discounts)
    bootstrap = torch.zeros(len(cu) - 1, dtype=r.dtype)
    bootstrap[-1] = c.inputs["v_t"][-1]
    return {"returns": discounted_returns(r, full(r), cu, bootstrap, gamma=float(discounts.max()))}


def torchrl_returns(c: Case) -> Answer:
    r, done = c.inputs["reward"][..., 0], c.inputs["done"][..., 0].clone()
    done[:, -1] = True
    cu = torch.tensor([0, *(done.flatten().nonzero()[:, 0] + 1).tolist()])
    returns = discounted_returns(r.flatten(), full(r.flatten()), cu, gamma=c.args["gamma"])
    return {"returns": returns.reshape(c.inputs["reward"].shape)}


def returns_of(mask: str | None, gamma: str) -> Callable[[Case], Answer]:
    def call(c: Case) -> Answer:
        r = c.inputs["rewards"]
        return {
            "returns": discounted_returns(r, full(r) if mask is None else c.inputs[mask].bool(), gamma=c.args[gamma])
        }

    return call


def slime_rfpp_returns(c: Case) -> Answer:
    mask = c.inputs["mask"].bool()
    distance = c.inputs["kl"]
    rewards = at_last_token(c.inputs["rewards"], mask)
    rewards = kl_penalty(rewards, distance, torch.zeros_like(distance), mask, kl_coef=c.args["kl_coef"])
    return {"returns": discounted_returns(rewards, mask, gamma=c.args["gamma"])}


# Policy losses


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
) -> Callable[[Case], Answer]:
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


# KL, values, logits, rewards, filters

ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def kl_of(log_probs: str, ref: str, gradient: str, kind: str, mask: str | None = None) -> Callable[[Case], Answer]:
    def call(c: Case) -> Answer:
        x = leaf(c.inputs[log_probs])
        m = full(x) if mask is None else c.inputs[mask].bool()
        name = c.args[kind]
        through = "k2" if name.endswith("+") else None
        got = kl(x, c.inputs[ref], m, value=ESTIMATORS[name.rstrip("+")], gradient=through)
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


def value_of(new: str, old: str, target: str, mask: str, clip: str, gradient: str) -> Callable[[Case], Answer]:
    def call(c: Case) -> Answer:
        x, m = leaf(c.inputs[new]), c.inputs[mask].bool()
        mode = c.args.get("loss_agg_mode") or (
            "token-mean" if c.args.get("token_level_loss", True) else "seq-mean-token-mean"
        )
        losses = value(x, c.inputs[old], c.inputs[target], m, clip=c.args[clip])
        return with_gradient(aggregate(mode, losses, m, c.args), x, gradient)

    return call


def logits_entropy(c: Case) -> Answer:
    logits = leaf(c.inputs["logits"])
    got = entropy_from_logits(logits)
    answer = {"entropy": got.detach()}
    if "cotangent" in c.inputs:
        answer["grad_logits"] = slope(got, logits, c.inputs["cotangent"])
    return answer


def logits_log_probs(tokens: str) -> Callable[[Case], Answer]:
    def call(c: Case) -> Answer:
        logits = leaf(c.inputs["logits"])
        temperature = c.args.get("temperature", 1.0)
        got = from_logits(logits, c.inputs[tokens], temperature=temperature)
        return {"logprobs": got.detach(), "grad_logits": slope(got, logits, c.inputs["cotangent"])}

    return call


def overlong_of(longest: str, buffer: str, factor: str) -> Callable[[Case], Answer]:
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
    return {"kept": nonzero_range(c.inputs["metric"], dense_ids(c.inputs["uid"]))}


def slime_filter(c: Case) -> Answer:
    groups = c.args["groups"]
    ids = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    keep = nonzero_range(torch.tensor([s for group in groups for s in group], dtype=torch.float64), ids)
    return {"keep": torch.stack([keep[ids == i].all() for i in range(len(groups))])}


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


def _nemo_ppo(**options: Any) -> Callable[[Case], Answer]:
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

CALLS: dict[tuple[str, str], Callable[[Case], Answer]] = {
    ("verl", "advantage.gae"): gae_of("token_level_rewards", "response_mask", "lam", whitened=True),
    ("verl", "advantage.grpo"): group_baseline,
    ("verl", "advantage.grpo_vectorized"): group_baseline,
    ("verl", "advantage.grpo_labels"): group_baseline,
    ("verl", "advantage.grpo_labels_dict"): group_baseline,
    ("verl", "advantage.rloo"): group_baseline,
    ("verl", "advantage.rloo_vectorized"): group_baseline,
    ("verl", "advantage.remax"): verl_remax,
    ("verl", "stats.group_mean_std"): group_statistics,
    ("verl", "policy_loss.vanilla"): verl_policy_loss,
    ("verl", "policy_loss.reinforce"): verl_policy_loss,
    ("verl", "policy_loss.gpg"): verl_policy_loss,
    ("verl", "agg_loss"): agg_loss,
    ("verl", "agg_loss_microbatch"): agg_loss_microbatch,
    ("verl", "masked.mean"): verl_masked_mean,
    ("verl", "masked.whiten"): verl_whiten,
    ("verl", "kl_penalty"): kl_of("logprob", "ref_logprob", "grad_logprob", "kl_penalty"),
    ("verl", "apply_kl_penalty"): apply_kl_penalty,
    ("verl", "adaptive_kl_controller"): adaptive_kl,
    ("verl", "compute_rewards"): verl_compute_rewards,
    ("verl", "dapo_overlong"): overlong_of("max_resp_len", "overlong_buffer_len", "penalty_factor"),
    ("verl", "group_filter"): verl_group_filter,
    ("verl", "value_loss"): value_of("vpreds", "values", "returns", "response_mask", "cliprange_value", "grad_vpreds"),
    ("verl", "entropy_from_logits"): logits_entropy,
    ("verl", "logprobs_from_logits"): logits_log_probs("labels"),
    ("rlax", "rlax.truncated_gae"): rlax_gae,
    ("rlax", "rlax.discounted_returns"): rlax_returns,
    ("rlax", "rlax.clipped_surrogate_pg_loss"): rlax_clipped_surrogate,
    ("rlax", "rlax.policy_gradient_loss"): rlax_policy_gradient,
    ("rlax", "rlax.entropy_loss"): rlax_entropy,
    ("trl", "trl_grpo_advantage"): trl_grpo_advantage,
    ("trl", "trl_grpo_loss.grpo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.bnpo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.dapo"): trl_grpo_loss,
    ("trl", "trl_grpo_loss.dr_grpo"): trl_grpo_loss,
    ("trl", "trl_rloo_loss"): trl_rloo_loss,
    ("trl", "entropy_from_logits"): logits_entropy,
    ("trl", "selective_log_softmax"): logits_log_probs("index"),
    ("openrlhf", "openrlhf_gae"): gae_of("rewards", "action_mask", "lambd"),
    ("openrlhf", "openrlhf_reward_to_go"): returns_of("action_mask", "gamma"),
    ("openrlhf", "openrlhf_group.rloo"): openrlhf_group,
    ("openrlhf", "openrlhf_group.dr_grpo"): openrlhf_group,
    ("openrlhf", "openrlhf_group.group_norm"): openrlhf_group,
    ("openrlhf", "openrlhf_group.reinforce_baseline"): openrlhf_group,
    ("openrlhf", "openrlhf_masked_normalize"): openrlhf_whiten,
    ("openrlhf", "openrlhf_overlong"): overlong_of("max_new_tokens", "overlong_buffer_len", "overlong_penalty_factor"),
    ("openrlhf", "openrlhf_compute_reward"): openrlhf_compute_reward,
    ("openrlhf", "openrlhf_approx_kl.k1"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_approx_kl.k2"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_approx_kl.k3"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_estimator"),
    ("openrlhf", "openrlhf_policy_loss.ppo"): _openrlhf_ppo,
    ("openrlhf", "openrlhf_policy_loss.ppo_dual"): _openrlhf_ppo,
    ("openrlhf", "openrlhf_policy_loss.ppo_seq"): _openrlhf_ppo,
    ("openrlhf", "openrlhf_value_loss"): value_of(
        "values", "old_values", "returns", "action_mask", "clip_eps", "grad_values"
    ),
    ("skyrl", "skyrl_gae"): gae_of("token_level_rewards", "response_mask", "lambd", whitened=True),
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
    ("skyrl", "skyrl_advantage_scaling"): skyrl_advantage_scaling,
    ("slime", "gae_unmasked"): gae_of("rewards", "no mask", "lambd"),
    ("slime", "gae_chunked"): gae_of("rewards", "no mask", "lambd"),
    ("slime", "discounted_returns_chunked"): returns_of(None, "discount"),
    ("slime", "slime_policy_loss_tokens"): slime_policy_loss,
    ("slime", "slime_approx_kl.k1"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.k2"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.k3"): kl_of("log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"),
    ("slime", "slime_approx_kl.low_var_kl"): kl_of(
        "log_probs", "log_probs_base", "grad_log_probs", "kl_loss_type", "mask"
    ),
    ("slime", "slime_nonzero_std_filter"): slime_filter,
    ("slime", "slime_rfpp_returns"): slime_rfpp_returns,
    ("nemo_rl", "nemo_gae"): gae_of("rewards", "mask", "gae_lambda"),
    ("nemo_rl", "nemo_grpo_advantage"): nemo_grpo_advantage,
    ("nemo_rl", "nemo_kl.k1"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_kl.k2"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_kl.k3"): kl_of("logprobs", "logprobs_reference", "grad_logprobs", "kl_type"),
    ("nemo_rl", "nemo_loss.ppo"): _nemo_ppo(),
    ("nemo_rl", "nemo_loss.ppo_kl"): _nemo_ppo(),
    ("nemo_rl", "nemo_loss.dual"): _nemo_ppo(dual="ratio_clip_c"),
    ("nemo_rl", "nemo_loss.seq"): _nemo_ppo(mode=lambda c: "seq-mean-token-mean"),
    ("nemo_rl", "nemo_loss.reinforce"): nemo_reinforce,
    ("nemo_rl", "nemo_loss.onpolicy"): nemo_reinforce,
    ("nemo_rl", "nemo_overlong"): overlong_of(
        "max_response_length", "overlong_buffer_length", "overlong_buffer_penalty"
    ),
    ("areal", "areal_masked_normalization"): areal_whiten,
    ("areal", "areal_normalization"): areal_normalization,
    ("areal", "areal_overlong"): overlong_of("max_response_length", "overlong_tokens", "overlong_penalty_factor"),
    ("areal", "areal_ppo_loss.token"): _areal_ppo,
    ("areal", "areal_ppo_loss.token_dual"): _areal_ppo,
    ("areal", "areal_value_loss.mse"): value_of(
        "value", "old_value", "target_value", "loss_mask", "value_eps_clip", "grad_value"
    ),
    ("torchrl", "reward_to_go"): torchrl_returns,
}
