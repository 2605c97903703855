"""REINFORCE with its baseline moved."""

import torch

from rlprims.losses import asymre, reinforce
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.asymre", check_loss, matters={"shift": 0.0}),
]

LOG_PROBS = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
MASK = torch.ones(1, 2, dtype=torch.bool)


def test_a_negative_shift_favours_good_responses() -> None:
    x = LOG_PROBS.clone().requires_grad_()
    asymre(x, ADVANTAGES, MASK).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-0.6, 0.4]], dtype=torch.float64))


def test_asymre_without_a_shift_is_reinforce() -> None:
    assert torch.equal(asymre(LOG_PROBS, ADVANTAGES, MASK, shift=0.0), reinforce(LOG_PROBS, ADVANTAGES, MASK))


def test_on_policy_the_shift_leaves_the_mean_gradient() -> None:
    """By enumeration of a softmax over three actions."""
    rewards = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    found = []
    for shift in (0.0, -0.1, 5.0):
        logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
        log_probs = logits.log_softmax(-1)
        p = log_probs.detach().exp()
        a = rewards - (p * rewards).sum()
        losses = asymre(log_probs[:, None], a[:, None], torch.ones(3, 1, dtype=torch.bool), shift=shift)
        (losses[:, 0] * p).sum().backward()
        found.append(logits.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-12)
