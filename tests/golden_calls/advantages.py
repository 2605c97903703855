"""Group baselines and whitening."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlprims.advantage import (
    discounted_returns,
    gae,
    gdpo,
    gpg,
    grpo,
    length_adaptive_gae,
    maxrl,
    opo,
    optimal_token_baseline,
    pass_at_k_training,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    td_lambda,
    whiten,
)
from rlprims.grouping import dense_ids, group_centred, group_count, group_mean, group_std
from rlprims.layout import sequence_lengths, sequence_sum, to_tokens
from rlprims.losses import token_sum
from rlprims.masking import masked_mean
from rlprims.rewards import at_last_token, kl_penalty
from tests.golden_calls.common import full
from tests.golden_cases import Answer, Call, Calls, Case


def gae_of(rewards: str, mask: str, lam: str, *, whitened: bool = False) -> Call:
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
            singleton=singleton(c),
        )
    return {"advantages": advantages, "returns": advantages}


def verl_remax(c: Case) -> Answer:
    mask, rewards = c.inputs["response_mask"].bool(), c.inputs["token_level_rewards"]
    return {
        "advantages": remax(rewards, c.inputs["reward_baselines"], mask),
        "returns": discounted_returns(rewards, mask),
    }


def singleton(c: Case) -> str:
    """Where the peer's choice is one of several, it is to keep the reward of a group of one."""
    return "raw" if c.recommend == "either" else "zero"


def verl_estimator(estimate: Callable[..., Tensor], target: Callable[..., Tensor] | None = None) -> Call:
    """verl returns its advantages twice where it has no critic, or a return."""

    def call(c: Case) -> Answer:
        mask = c.inputs["response_mask"].bool()
        advantages = estimate(c, mask)
        return {"advantages": advantages, "returns": advantages if target is None else target(c, mask)}

    return call


def rewards_of(c: Case) -> Tensor:
    return c.inputs["token_level_rewards"]


def ids_of(c: Case) -> Tensor:
    return dense_ids(c.inputs["index"])


def returns_of(c: Case, mask: Tensor) -> Tensor:
    return discounted_returns(rewards_of(c), mask, gamma=c.args.get("gamma", 1.0))


def verl_optimal_token_baseline(align: str) -> Call:
    def estimate(c: Case, mask: Tensor) -> Tensor:
        return optimal_token_baseline(
            rewards_of(c),
            ids_of(c),
            c.inputs["old_log_probs"],
            c.inputs["sum_pi_squared"],
            mask,
            importance_weights=c.inputs["rollout_is_weights"],
            align=align,
            singleton="raw" if c.args["handle_zero_tail"] else "zero",
            eps=c.args["epsilon"],
        )

    return verl_estimator(estimate, returns_of)


def verl_gdpo(c: Case, mask: Tensor) -> Tensor:
    scores = (
        torch.stack([c.inputs[name] for name in c.args["keys"]], 1)
        if "keys" in c.args
        else sequence_sum(rewards_of(c), mask)[:, None]
    )
    return gdpo(
        scores,
        ids_of(c),
        mask,
        weights=tuple(c.args["weights"]) if "weights" in c.args else None,
        normalize_std=c.args.get("norm_adv_by_std_in_grpo", True),
        eps=c.args["epsilon"],
        whiten_over="tokens",
        whiten_eps=1e-10,
        singleton=singleton(c),
    )


def group_statistics(c: Case) -> Answer:
    x, ids = c.inputs["scores"], c.inputs["gidx"]
    first = [ids.tolist().index(i) for i in range(int(ids.max()) + 1)]
    statistics = {"mean": group_mean(x, ids), "std": group_std(x, ids), "count": group_count(ids)}
    return {name: s[first] for name, s in statistics.items()}


def per_response(scores: Tensor, ids: Tensor, estimator: Callable[..., Tensor], **hyperparameters: Any) -> Tensor:
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    return estimator(scores[:, None], ids, mask, **hyperparameters)[:, 0]


def rloo_scores(scores: Tensor, ids: Tensor) -> Tensor:
    return per_response(scores, ids, rloo)


def openrlhf_group(c: Case) -> Answer:
    scores, n, width = c.inputs["rewards"], c.args["n_samples_per_prompt"], c.args["tokens_per_row"]
    ids, mask = torch.arange(len(scores)) // n, torch.ones(len(scores), width, dtype=torch.bool)
    rewards = at_last_token(scores, mask)
    advantages = {
        "rloo": lambda: rloo(rewards, ids, mask),
        "dr_grpo": lambda: grpo(rewards, ids, mask, normalize_std=False),
        "group_norm": lambda: grpo(rewards, ids, mask, eps=1e-9),
        "reinforce_baseline": lambda: reinforce_pp_baseline(rewards, ids, mask, ddof=0),
    }[c.args["estimator"]]()
    return {"advantages": advantages}


def trl_grpo_advantage(c: Case) -> Answer:
    weights, eps = c.args["reward_weights"], c.args["std_eps"]
    per_reward = c.inputs["rewards_per_func"]
    ids = torch.arange(len(per_reward)) // c.args["num_generations"]
    mask = torch.ones(len(per_reward), 1, dtype=torch.bool)
    if c.args["multi_objective_aggregation"] == "normalize_then_sum":
        known = per_reward.isfinite().all(1)
        scores = torch.where(known[:, None], per_reward, 0.0)
        advantages = gdpo(scores, ids, mask, valid_rows=known, weights=tuple(weights), eps=eps, whiten_eps=eps)
    else:
        scores = per_reward @ torch.tensor(weights)
        known = scores.isfinite()
        advantages = grpo(
            torch.where(known, scores, 0.0)[:, None],
            ids,
            mask,
            valid_rows=known,
            normalize_std=c.args["scale_rewards"] != "none",
            std_over="batch" if c.args["scale_rewards"] == "batch" else "group",
            eps=eps,
        )
    return {"advantages": torch.where(known, advantages[:, 0], 0.0)}


def nemo_grpo_advantage(c: Case) -> Answer:
    a = per_response(
        c.inputs["rewards"],
        by_prompt(c),
        grpo,
        normalize_std=c.args["normalize_rewards"],
        eps=c.args["eps"],
        baseline="leave_one_out" if c.args["use_leave_one_out_baseline"] else "mean",
    )
    return {"advantages": to_tokens(a, c.inputs["mask"].bool())}


def nemo_gae(c: Case) -> Answer:
    """With another λ for the critic it is VAPO."""
    if c.args["gae_lambda_value"] is None:
        return gae_of("rewards", "mask", "gae_lambda")(c)
    mask, v = c.inputs["mask"].bool(), c.inputs["values"]
    rewards, gamma = at_last_token(c.inputs["rewards"], mask), c.args["gae_gamma"]
    advantages = length_adaptive_gae(rewards, v, mask, gamma=gamma, alpha=c.args["length_adaptive_alpha"])
    returns = td_lambda(rewards, v, mask, gamma=gamma, lam=c.args["gae_lambda_value"])
    return {"advantages": whiten(advantages, mask), "returns": returns}


def by_prompt(c: Case) -> Tensor:
    return dense_ids([tuple(p) for p in c.inputs["prompt_ids"].tolist()])


def nemo_reinforce_pp(c: Case) -> Answer:
    mask = c.inputs["mask"].bool()
    rewards = at_last_token(c.inputs["rewards"], mask)
    if c.args["minus_baseline"]:
        return {"advantages": reinforce_pp_baseline(rewards, by_prompt(c), mask, ddof=0)}
    return {"advantages": reinforce_pp(rewards, mask, ddof=0)}


def nemo_gdpo(c: Case) -> Answer:
    mask = c.inputs["mask"].bool()
    scores = torch.stack([c.inputs["reward_a"], c.inputs["reward_b"]], 1)
    return {"advantages": gdpo(scores, by_prompt(c), mask, weights=tuple(c.args["reward_weights"]), whiten_eps=0.0)}


def nemo_baseline_std(c: Case) -> Answer:
    """The baseline by what is left of the reward when it is taken off."""
    s, ids = c.inputs["rewards"], dense_ids([tuple(p) for p in c.inputs["prompts"].tolist()])
    advantages = rloo_scores(s, ids) if c.args["leave_one_out_baseline"] else group_centred(s, ids)
    return {"baseline": s - advantages, "std": group_std(s, ids)}


def slime_reinforce_pp_baseline(c: Case) -> Answer:
    mask, distance = c.inputs["mask"].bool(), c.inputs["kl"]
    scores = to_tokens(c.inputs["rewards"], mask)
    return {"advantages": kl_penalty(scores, distance, torch.zeros_like(distance), mask, kl_coef=c.args["kl_coef"])}


def areal_normalization(c: Case) -> Answer:
    """Its deviation is of what is left when the mean is taken off."""
    scores = c.inputs["x"]
    over = {"group": torch.arange(len(scores)) // c.args["group_size"], "batch": torch.zeros(len(scores)).long()}
    centre = rloo_scores if c.args["mean_leave1out"] else group_centred
    centred = centre(scores, over[c.args["mean_level"]])
    if c.args["std_level"] is None:
        return {"out": centred}
    deviation = group_std(centred, over[c.args["std_level"]], ddof=1 if c.args["std_unbiased"] else 0)
    return {"out": centred / (deviation + c.args["eps"])}


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


def verl_variance(c: Case) -> Answer:
    """The deviation of one group, of all the tokens."""
    x, mask = c.inputs["values"].flatten(), c.inputs["mask"].bool().flatten()
    one = torch.zeros(len(x), dtype=torch.int64)
    return {name: group_std(x, one, mask, ddof=ddof)[0].square() for name, ddof in (("unbiased", 1), ("biased", 0))}


CALLS: Calls = {
    ("verl", "advantage.gae"): gae_of("token_level_rewards", "response_mask", "lam", whitened=True),
    ("verl", "advantage.grpo"): group_baseline,
    ("verl", "advantage.grpo_vectorized"): group_baseline,
    ("verl", "advantage.grpo_labels"): group_baseline,
    ("verl", "advantage.grpo_labels_dict"): group_baseline,
    ("verl", "advantage.rloo"): group_baseline,
    ("verl", "advantage.rloo_vectorized"): group_baseline,
    ("verl", "advantage.remax"): verl_remax,
    ("verl", "advantage.reinforce_plus_plus"): verl_estimator(
        lambda c, mask: reinforce_pp(rewards_of(c), mask, gamma=c.args["gamma"], eps=c.args["whiten_eps"]), returns_of
    ),
    ("verl", "advantage.reinforce_plus_plus_baseline"): verl_estimator(
        lambda c, mask: reinforce_pp_baseline(rewards_of(c), ids_of(c), mask, singleton=singleton(c))
    ),
    ("verl", "advantage.opo"): verl_estimator(
        lambda c, mask: opo(rewards_of(c), ids_of(c), mask, singleton=singleton(c))
    ),
    ("verl", "advantage.gpg"): verl_estimator(
        lambda c, mask: gpg(rewards_of(c), ids_of(c), mask, informative="nonzero_reward", singleton=singleton(c))
    ),
    ("verl", "advantage.grpo_passk"): verl_estimator(
        lambda c, mask: pass_at_k_training(
            rewards_of(c), ids_of(c), mask, normalize_std=c.args["norm_adv_by_std_in_grpo"], eps=c.args["epsilon"]
        )
    ),
    ("verl", "advantage.gdpo"): verl_estimator(verl_gdpo),
    ("verl", "advantage.gdpo_single"): verl_estimator(verl_gdpo),
    ("verl", "advantage.optimal_token_baseline"): verl_optimal_token_baseline("columns"),
    ("verl", "advantage.tir_optimal_token_baseline"): verl_optimal_token_baseline("tokens"),
    ("verl", "stats.group_mean_std"): group_statistics,
    ("verl", "masked.var"): verl_variance,
    ("verl", "masked.mean"): verl_masked_mean,
    ("verl", "masked.whiten"): verl_whiten,
    ("trl", "trl_grpo_advantage"): trl_grpo_advantage,
    ("openrlhf", "openrlhf_gae"): gae_of("rewards", "action_mask", "lambd"),
    ("openrlhf", "openrlhf_group.rloo"): openrlhf_group,
    ("openrlhf", "openrlhf_group.dr_grpo"): openrlhf_group,
    ("openrlhf", "openrlhf_group.group_norm"): openrlhf_group,
    ("openrlhf", "openrlhf_group.reinforce_baseline"): openrlhf_group,
    ("openrlhf", "openrlhf_masked_normalize"): openrlhf_whiten,
    ("skyrl", "skyrl_gae"): gae_of("token_level_rewards", "response_mask", "lambd", whitened=True),
    ("skyrl", "skyrl_rfpp"): verl_estimator(
        lambda c, mask: reinforce_pp(rewards_of(c), mask, gamma=c.args["gamma"]), returns_of
    ),
    ("skyrl", "skyrl_maxrl"): verl_estimator(
        lambda c, mask: maxrl(rewards_of(c), ids_of(c), mask, eps=c.args["epsilon"])
    ),
    ("slime", "slime_rfpp_baseline"): slime_reinforce_pp_baseline,
    ("slime", "gae_unmasked"): gae_of("rewards", "no mask", "lambd"),
    ("slime", "gae_chunked"): gae_of("rewards", "no mask", "lambd"),
    ("nemo_rl", "nemo_gae"): nemo_gae,
    ("nemo_rl", "nemo_grpo_advantage"): nemo_grpo_advantage,
    ("nemo_rl", "nemo_baseline_std"): nemo_baseline_std,
    ("nemo_rl", "nemo_rfpp_advantage"): nemo_reinforce_pp,
    ("nemo_rl", "nemo_gdpo_advantage"): nemo_gdpo,
    ("areal", "areal_masked_normalization"): areal_whiten,
    ("areal", "areal_normalization"): areal_normalization,
}
