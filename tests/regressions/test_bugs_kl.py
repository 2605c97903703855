"""KL estimates: what is summed, and which way round."""

import torch

from rlprims.diagnostics import divergences, ratio_stats
from rlprims.losses import kl, token_sum
from rlprims.rewards import at_last_token, kl_penalty


def test_k8_the_penalty_of_a_response_is_the_sum_over_its_own_tokens() -> None:
    """trl 1b1140aa6: RLOO summed the KL over the wrong axis."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    old, ref = torch.tensor([[[-1.0, 9.0, 9.0], [-1.0, -2.0, -3.0]], [[-2.0, 0.0, 0.0], [-1.5, -2.5, -3.5]]])
    paid = kl_penalty(at_last_token(torch.ones(2), mask), old, ref, mask, kl_coef=0.1)
    torch.testing.assert_close(paid.sum(-1), torch.tensor([1 - 0.1 * 1.0, 1 - 0.1 * 1.5]))


def test_k1_the_kl_term_has_a_gradient() -> None:
    """SkyRL#1340: computed under no_grad, so its coefficient did nothing."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    x = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    token_sum(kl(x, torch.tensor([[-2.0, -1.0]]), mask), mask).backward()
    assert x.grad is not None
    assert (x.grad != 0).all()


def test_r9_the_distance_to_the_old_policy_has_the_sign_of_a_distance() -> None:
    """OpenRLHF feeb0283 took the ratio for its logarithm. With samples of π_old it is E[old − new], 0 or more."""
    old = torch.tensor([[0.9, 0.1]]).log()  # each token as often as the old policy takes it
    new = torch.tensor([[0.5, 0.5]]).log()
    tokens = torch.tensor([[0] * 9 + [1]])
    mask = torch.ones(1, 10, dtype=torch.bool)
    got = divergences(old[0][tokens], new[0][tokens], mask)
    want = 0.9 * torch.log(torch.tensor(1.8)) + 0.1 * torch.log(torch.tensor(0.2))
    torch.testing.assert_close(got["kl_k1"].value(), want)
    a = torch.zeros(1, 10)
    torch.testing.assert_close(ratio_stats(new[0][tokens], old[0][tokens], a, mask)["approx_kl"].value(), want)
