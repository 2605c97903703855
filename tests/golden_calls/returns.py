"""Returns of whole and of packed episodes."""

import torch
from torch import Tensor

from rlprims.advantage import discounted_returns, gae, td_lambda, vtrace, vtrace_returns
from rlprims.rewards import at_last_token, kl_penalty
from tests.golden_calls.common import full, leaf, slope
from tests.golden_cases import Answer, Call, Calls, Case


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


class Episodes:
    """rlax's one row of steps, with the value after each, as packed sequences."""

    def __init__(self, c: Case) -> None:
        self.rewards, discounts = c.inputs["r_t"], c.inputs["discount_t"]
        self.mask, self.gamma = full(self.rewards), float(discounts.max())
        self.cu = packed_by_discount(discounts)
        self.bootstrap = torch.zeros(len(self.cu) - 1, dtype=self.rewards.dtype)
        after = c.inputs["v_t"] if "v_t" in c.inputs else c.inputs["values"][1:]
        self.bootstrap[-1] = after[-1]
        # what stands before the first step is not read by a return
        self.values = c.inputs["v_tm1"] if "v_tm1" in c.inputs else torch.cat([after[:1] * 0, after[:-1]])


def rlax_lambda_returns(c: Case) -> Answer:
    e = Episodes(c)
    r = leaf(e.rewards)
    returns = td_lambda(r, e.values, e.mask, e.cu, e.bootstrap, gamma=e.gamma, lam=c.args["lambda_"])
    return {"returns": returns.detach(), "grad_r": slope(returns, r, c.inputs["cotangent"])}


def rlax_n_step_returns(c: Case) -> Answer:
    """The n steps from each one on are a sequence of their own, of which the first return is asked."""
    r, discounts, after = c.inputs["r_t"], c.inputs["discount_t"], c.inputs["v_t"]
    windows, bootstrap = [], []
    for start in range(len(r)):
        ends = [t for t in range(start, len(r)) if discounts[t] == 0 or t in (start + c.args["n"] - 1, len(r) - 1)]
        windows.append(range(start, ends[0] + 1))
        bootstrap.append(after[ends[0]] if discounts[ends[0]] else after[0] * 0)
    steps = torch.tensor([t for window in windows for t in window])
    cu = torch.tensor([0, *(len(window) for window in windows)]).cumsum(0)
    before = torch.cat([after[:1] * 0, after[:-1]])
    got = td_lambda(
        r[steps],
        before[steps],
        full(r[steps]),
        cu,
        torch.stack(bootstrap),
        gamma=float(discounts.max()),
        lam=c.args["lambda_t"],
    )
    return {"returns": got[cu[:-1]]}


def rlax_vtrace(c: Case) -> Answer:
    e = Episodes(c)
    data = (e.rewards, e.values, c.inputs["rho_tm1"].log(), torch.zeros_like(e.rewards), e.mask, e.cu, e.bootstrap)
    bounds = {"gamma": e.gamma, "lam": c.args["lambda_"], "clip_rho": c.args["clip_rho_threshold"]}
    answer = {"errors": vtrace_returns(*data, **bounds) - e.values}
    if "clip_pg_rho_threshold" in c.args:
        answer["pg_advantage"] = vtrace(*data, clip_pg_rho=c.args["clip_pg_rho_threshold"], **bounds)
        unweighted = vtrace(*data, clip_pg_rho=torch.inf, **bounds) / c.inputs["rho_tm1"]
        answer["q_estimate"] = unweighted + e.values
    return answer


def rlax_corrected_td_errors(c: Case) -> Answer:
    """V-trace without bounds."""
    e = Episodes(c)
    v = c.inputs["values"][:-1]
    bounds = {"clip_rho": torch.inf, "clip_c": torch.inf, "lam": c.args["lambda_"]}
    rho = c.inputs["rho_tm1"].log()
    got = vtrace_returns(e.rewards, v, rho, torch.zeros_like(rho), e.mask, e.cu, e.bootstrap, gamma=e.gamma, **bounds)
    return {"errors": got - v}


class Steps:
    """torchrl's rows of steps, with the value after each, as packed sequences. Truncation is not termination."""

    def __init__(self, c: Case) -> None:
        self.shape = c.inputs["reward"].shape
        done = c.inputs["done"][..., 0].clone()
        done[:, -1] = True
        self.cu = torch.tensor([0, *(done.flatten().nonzero()[:, 0] + 1).tolist()])
        last = self.cu[1:] - 1
        self.rewards, self.values, after = (
            c.inputs[name].flatten() for name in ("reward", "state_value", "next_state_value")
        )
        self.mask, self.gamma = full(self.rewards), c.args["gamma"]
        self.bootstrap = torch.where(c.inputs["terminated"].flatten()[last], 0.0, after[last])
        # what stands before the first step is not read by a return
        self.before = torch.cat([after[:1] * 0, after[:-1]])
        # its critic may say another value after a step than before the next: the reward makes up for that
        inside = full(self.rewards).index_fill(0, last, False)
        gap = torch.where(inside, after - torch.roll(self.values, -1), 0.0)
        self.shifted = self.rewards + self.gamma * gap


def torchrl_td(lam: float | None) -> Call:
    def call(c: Case) -> Answer:
        s = Steps(c)
        lam_ = c.args["lmbda"] if lam is None else lam
        got = td_lambda(s.rewards, s.before, s.mask, s.cu, s.bootstrap, gamma=s.gamma, lam=lam_)
        return {"returns": got.reshape(s.shape)}

    return call


def torchrl_gae(c: Case) -> Answer:
    s = Steps(c)
    a = gae(s.shifted, s.values, s.mask, s.cu, s.bootstrap, gamma=s.gamma, lam=c.args["lmbda"])
    return {"advantage": a.reshape(s.shape), "value_target": (a + s.values).reshape(s.shape)}


def torchrl_vtrace(c: Case) -> Answer:
    s = Steps(c)
    log_probs = [c.inputs[name].flatten() for name in ("log_pi", "log_mu")]
    bounds = {"gamma": s.gamma, "clip_rho": c.args["rho_thresh"], "clip_c": c.args["c_thresh"]}

    def advantages(rewards: Tensor, lam: float) -> Tensor:
        data = (rewards, s.values, *log_probs, s.mask, s.cu, s.bootstrap)
        return vtrace(*data, lam=lam, clip_pg_rho=c.args["rho_thresh"], **bounds)

    target = vtrace_returns(s.shifted, s.values, *log_probs, s.mask, s.cu, s.bootstrap, **bounds)
    # the errors are of the value after a step, the advantage of the value before the next
    back = advantages(s.rewards, 0.0) - advantages(s.shifted, 0.0)
    return {
        "advantage": (advantages(s.shifted, 1.0) + back).reshape(s.shape),
        "value_target": target.reshape(s.shape),
    }


def torchrl_returns(c: Case) -> Answer:
    r, done = c.inputs["reward"][..., 0], c.inputs["done"][..., 0].clone()
    done[:, -1] = True
    cu = torch.tensor([0, *(done.flatten().nonzero()[:, 0] + 1).tolist()])
    returns = discounted_returns(r.flatten(), full(r.flatten()), cu, gamma=c.args["gamma"])
    return {"returns": returns.reshape(c.inputs["reward"].shape)}


def returns_of(mask: str | None, gamma: str) -> Call:
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


CALLS: Calls = {
    ("rlax", "rlax.truncated_gae"): rlax_gae,
    ("rlax", "rlax.discounted_returns"): rlax_returns,
    ("rlax", "rlax.lambda_returns"): rlax_lambda_returns,
    ("rlax", "rlax.n_step_returns"): rlax_n_step_returns,
    ("rlax", "rlax.vtrace"): rlax_vtrace,
    ("rlax", "rlax.vtrace_td_error_and_advantage"): rlax_vtrace,
    ("rlax", "rlax.importance_corrected_td_errors"): rlax_corrected_td_errors,
    ("torchrl", "gae_dones"): torchrl_gae,
    ("torchrl", "gae_dones_vec"): torchrl_gae,
    ("torchrl", "td_lambda_return"): torchrl_td(None),
    ("torchrl", "td0_return"): torchrl_td(0.0),
    ("torchrl", "td1_return"): torchrl_td(1.0),
    ("torchrl", "vtrace_dones"): torchrl_vtrace,
    ("openrlhf", "openrlhf_reward_to_go"): returns_of("action_mask", "gamma"),
    ("slime", "discounted_returns_chunked"): returns_of(None, "discount"),
    ("slime", "slime_rfpp_returns"): slime_rfpp_returns,
    ("torchrl", "reward_to_go"): torchrl_returns,
}
