"""Group baselines and whitening."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlprims.advantage import discounted_returns, gae, grpo, remax, rloo, whiten
from rlprims.grouping import dense_ids, group_centred, group_count, group_mean, group_std
from rlprims.losses import (
    token_sum,
)
from rlprims.masking import masked_mean, sequence_lengths, sequence_sum, to_tokens
from rlprims.rewards import at_last_token
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


CALLS: Calls = {
    ("verl", "advantage.gae"): gae_of("token_level_rewards", "response_mask", "lam", whitened=True),
    ("verl", "advantage.grpo"): group_baseline,
    ("verl", "advantage.grpo_vectorized"): group_baseline,
    ("verl", "advantage.grpo_labels"): group_baseline,
    ("verl", "advantage.grpo_labels_dict"): group_baseline,
    ("verl", "advantage.rloo"): group_baseline,
    ("verl", "advantage.rloo_vectorized"): group_baseline,
    ("verl", "advantage.remax"): verl_remax,
    ("verl", "stats.group_mean_std"): group_statistics,
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
    ("slime", "gae_unmasked"): gae_of("rewards", "no mask", "lambd"),
    ("slime", "gae_chunked"): gae_of("rewards", "no mask", "lambd"),
    ("nemo_rl", "nemo_gae"): gae_of("rewards", "mask", "gae_lambda"),
    ("nemo_rl", "nemo_grpo_advantage"): nemo_grpo_advantage,
    ("areal", "areal_masked_normalization"): areal_whiten,
    ("areal", "areal_normalization"): areal_normalization,
}
