"""Returns of whole and of packed episodes."""

import torch
from torch import Tensor

from rlprims.advantage import discounted_returns, gae
from rlprims.rewards import at_last_token, kl_penalty
from tests.golden_calls.common import full
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
    ("openrlhf", "openrlhf_reward_to_go"): returns_of("action_mask", "gamma"),
    ("slime", "discounted_returns_chunked"): returns_of(None, "discount"),
    ("slime", "slime_rfpp_returns"): slime_rfpp_returns,
    ("torchrl", "reward_to_go"): torchrl_returns,
}
