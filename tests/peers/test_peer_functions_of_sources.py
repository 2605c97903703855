"""``examples/peer_functions_of_sources.py``: each function computes what its trainer does, and the page has its laws.

``PEER_SOURCES`` names the folder of checkouts; without a checkout its tests are skipped.
"""

from collections.abc import Callable
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.laws import PAGE, peers, row
from examples import peer_functions_of_sources as functions
from rlprims import advantage, losses
from tests.peers.test_peer_laws import batch

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
NAMES = {name: x for table in (functions.LOSSES, functions.ESTIMATORS) for x, s in table.items() for name in s.split()}


def function(name: str) -> Callable[..., Tensor]:
    if functions.sources(NAMES[name]) is None:
        pytest.skip(f"no checkout of {NAMES[name]} in PEER_SOURCES")
    return getattr(functions, name)


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask].sum()


def sum_of_means(x: Tensor, mask: Tensor) -> Tensor:
    return len(x) * losses.seq_mean_token_mean(x, mask)


PPO, GSPO, SAPO, CISPO = losses.clipped_surrogate, losses.gspo, losses.sapo, losses.cispo
TOKENS, ROWS = losses.token_mean, losses.seq_mean_token_mean
CLIP, DAPO = {"clip_low": 0.2, "clip_high": 0.2}, {"clip_low": 0.2, "clip_high": 0.28}
FORMULAS: dict[str, tuple[Any, dict[str, float], Any]] = {
    "areal_ppo": (PPO, {}, TOKENS),
    "areal_gspo": (GSPO, CLIP, TOKENS),
    "areal_sapo": (SAPO, {}, TOKENS),
    "nemo_rl_grpo": (PPO, {}, TOKENS),
    "nemo_rl_gspo": (GSPO, CLIP, ROWS),
    "nemo_rl_cispo": (CISPO, {"w_min": 0.8, "w_max": 1.2}, TOKENS),
    "openrlhf_ppo": (PPO, {}, TOKENS),
    "openrlhf_gspo": (GSPO, CLIP, ROWS),
    "open_instruct_dapo": (PPO, DAPO, TOKENS),
    "open_instruct_cispo": (CISPO, {"w_max": 1.28}, TOKENS),
    "skyrl_ppo": (PPO, {}, token_sum),
    "skyrl_gspo": (GSPO, CLIP, token_sum),
    "skyrl_sapo": (SAPO, {}, token_sum),
    "skyrl_cispo": (CISPO, {}, token_sum),
    "slime_ppo": (PPO, DAPO, sum_of_means),
    "slime_gspo": (GSPO, DAPO, sum_of_means),
    "slime_cispo": (CISPO, {"w_min": 0.8, "w_max": 1.28}, sum_of_means),
    "torchtune_grpo": (PPO, {}, TOKENS),
    "unsloth_grpo": (PPO, {}, ROWS),
    "unsloth_bnpo": (PPO, {}, TOKENS),
    "unsloth_dapo": (PPO, {}, TOKENS),
    "unsloth_gspo": (GSPO, CLIP, ROWS),
    "unsloth_cispo": (CISPO, {}, TOKENS),
    "unsloth_sapo": (SAPO, {}, ROWS),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_are_of_the_formula_of_its_name(name: str) -> None:
    loss, (formula, settings, mean) = function(name), FORMULAS[name]
    data = batch()
    scores = data["advantages"][:, 0]
    data["advantages"] = scores[:, None].expand(4, 6).contiguous()
    x = data["log_probs"].requires_grad_()
    given = {**data, "scores": scores} if name.startswith("torchtune") else data
    value = loss(**{key: y for key, y in given.items() if key != "advantages" or given is data})
    expected = mean(formula(**data, **settings), data["response_mask"])
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(y, x)[0] for y in (value, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def one_row(now: list[float], old: list[float], advantages: list[float]) -> dict[str, Tensor]:
    """Log-probs of these probabilities, and a column that is masked."""
    mask = torch.tensor([[*[True] * len(now), False]])
    data = {
        "log_probs": [*map(log, now), 0.0],
        "old_log_probs": [*map(log, old), 0.0],
        "advantages": [*advantages, 9.0],
    }
    return {**{name: torch.tensor([x]) for name, x in data.items()}, "response_mask": mask}


# A trust region of 0.2 drops the second token, whose probability grew by 0.3 for a positive advantage; of 0.1 also the
# third, whose probability grew by 0.15 for a negative one
NOW, OLD, ADVANTAGES = [0.5, 0.6, 0.4], [0.45, 0.3, 0.25], [2.0, 1.0, -1.0]


def test_a_trust_region_drops_tokens_by_the_change_of_their_probability() -> None:
    data = one_row(NOW, OLD, ADVANTAGES)
    kept, other = -2.0 * 0.5 / 0.45, 0.4 / 0.25
    drift = 1e-3 * sum(log(p / q) ** 2 for p, q in zip(NOW, OLD, strict=True))
    assert function("prime_rl_default")(**data).item() == pytest.approx((kept + other + drift) / 3, rel=1e-5)
    assert function("prime_rl_ipo")(**data).item() == pytest.approx((kept + drift) / 3, rel=1e-5)
    assert function("skyrl_dppo")(**data).item() == pytest.approx(kept + other, rel=1e-5)


def test_the_simple_loss_of_torchtune_is_reinforce_on_the_current_policy() -> None:
    data = batch()
    x, scores = data["log_probs"].requires_grad_(), torch.tensor([1.0, -2.0, 0.5, 3.0])
    value = function("torchtune_grpo_simple")(x, data["old_log_probs"], scores, data["response_mask"])
    assert value.item() == pytest.approx(-2.5 / 4)
    mask = data["response_mask"]
    expected = -(scores[:, None] * mask / mask.sum(-1, keepdim=True)) / 4
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], expected)


def outcome(*scores: float) -> Tensor:
    """Scores on the last of two tokens."""
    return torch.stack([torch.zeros(len(scores)), torch.tensor(scores)], dim=-1)


# By hand: 4, 1, 1 have the mean 2 and the standard deviation sqrt(3), a group of one has neither. Without the own score
# the means are 1, 2.5, 2.5 and the standard deviations 0 (then the difference stays), sqrt(4.5), sqrt(4.5)
SCORES, GROUPS = outcome(4.0, 1.0, 1.0, 7.0), torch.tensor([5, 5, 5, 2])
BY_HAND = {
    "skyrl_grpo_advantage": [2 / 3**0.5, -1 / 3**0.5, -1 / 3**0.5, 7.0],
    "skyrl_maxrl_advantage": [1.0, -0.5, -0.5, 7.0],
    "nemo_rl_grpo_advantage": [3.0, -1.5 / 4.5**0.5, -1.5 / 4.5**0.5, 0.0],
    "nemo_rl_reinforce_plus_plus": [2 / 1.5**0.5, -1 / 1.5**0.5, -1 / 1.5**0.5, 0.0],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_advantage_of_scores_by_hand(name: str) -> None:
    found = function(name)(SCORES, GROUPS, torch.ones(4, 2, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor(BY_HAND[name])[:, None].expand(4, 2), rtol=1e-5, atol=1e-5)


def test_returns_and_gae_are_sums_over_later_tokens() -> None:
    rewards, mask = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 9.0]]), torch.tensor([[True] * 3, [True, True, False]])
    expected = torch.tensor([[7.0, 6.0, 4.0], [8.0, 5.0, 0.0]])
    torch.testing.assert_close(function("roll_reinforce")(rewards, mask), expected)
    values = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.25, 0.0]])
    gae = advantage.gae(rewards, values, mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(function("roll_gae")(rewards, values, mask), gae)
    whole = torch.ones_like(mask)
    white = advantage.whiten(advantage.gae(rewards, values, whole, gamma=1.0, lam=0.95), whole)
    torch.testing.assert_close(function("skyrl_gae")(rewards, values, whole), white)


def test_a_clamped_ratio_is_finite_and_one_that_is_not_is_infinite() -> None:
    """What the table says of *far log ratios are finite*, by a call: exp(100) is no float32 number."""
    data = one_row([1.0], [exp(-100.0)], [-1.0])
    for name in ("openrlhf_ppo", "skyrl_ppo", "skyrl_sapo", "skyrl_cispo", "skyrl_dppo"):
        assert function(name)(**data).isfinite(), name
    for name in ("areal_ppo", "nemo_rl_grpo", "openrlhf_gspo", "prime_rl_ipo", "slime_ppo", "unsloth_grpo"):
        assert not function(name)(**data).isfinite(), name


def test_a_nan_outside_the_mask_reaches_most_losses() -> None:
    """What the table says of *masked is absent*, by a call: only AReaL's GSPO selects every input by the mask."""
    for name in functions.LOSSES["AReaL"].split() + functions.LOSSES["OpenRLHF"].split():
        data = one_row(NOW, OLD, ADVANTAGES)
        data["log_probs"][0, -1] = torch.nan
        x = data["log_probs"].requires_grad_()
        value = function(name)(**data)
        found = torch.cat([value[None], torch.autograd.grad(value, x)[0][0]])
        assert bool(found.isfinite().all()) == (name == "areal_gspo"), name


@pytest.mark.parametrize("peer", functions.CHECKOUTS)
def test_the_page_has_the_laws_of_today(peer: str) -> None:
    found = next(x for x in peers() if x.name == peer)
    if not found.version:
        pytest.skip(f"no checkout of {peer} in PEER_SOURCES")
    page = PAGE.read_text()
    for kind, names in found.functions.items():
        for name in names:
            assert row(found, name, kind, {}) in page
