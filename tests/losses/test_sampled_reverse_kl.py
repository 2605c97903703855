"""A token's log-ratio as its advantage: its sign, and its gradient over a whole vocabulary."""

import torch

from rlprims.losses import full_kl, kl, sampled_reverse_kl
from rlprims.testing import check_loss
from tests.records import DERIVATIVES, SCORE_FUNCTION, Record

RECORDS = [
    Record(
        "losses.sampled_reverse_kl",
        check_loss,
        exempt={**dict.fromkeys(DERIVATIVES, "the log-ratio is a constant by definition"), **SCORE_FUNCTION},
    ),
]

STUDENT = torch.tensor([0.4, -1.0, 0.3, 2.0], dtype=torch.float64)
TEACHER = torch.tensor([-0.5, 0.2, 1.0, 0.1], dtype=torch.float64)
MASK = torch.ones(4, 1, dtype=torch.bool)


def test_a_token_that_the_teacher_prefers_becomes_likelier() -> None:
    x = torch.tensor([[-2.0, -1.0]], requires_grad=True)
    loss = sampled_reverse_kl(x, torch.tensor([[-1.5, -4.0]]), torch.tensor([[True, True]]))
    loss.sum().backward()
    assert loss.tolist() == [[1.0, -3.0]]  # −A log π with A = 0.5 and −3
    assert x.grad.tolist() == [[-0.5, 3.0]]


def test_sampled_reverse_kl_has_the_reverse_kls_mean_gradient() -> None:
    """Every token of the vocabulary, weighed by the student's probability."""
    x = STUDENT.clone().requires_grad_()
    per_token = sampled_reverse_kl(x.log_softmax(-1)[:, None], TEACHER.log_softmax(-1)[:, None], MASK)
    (got,) = torch.autograd.grad((per_token[:, 0] * x.softmax(-1).detach()).sum(), x)
    y = STUDENT.clone().requires_grad_()
    (want,) = torch.autograd.grad(full_kl(y[None, None], TEACHER[None, None], MASK[:1]).sum(), y)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_sampled_reverse_kl_has_the_gradient_of_k2_and_not_its_value() -> None:
    x = torch.tensor([[-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    teacher, mask = torch.tensor([[-1.5, -4.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    one, two = sampled_reverse_kl(x, teacher, mask), kl(x, teacher, mask, value="k2")
    (a,), (b,) = (torch.autograd.grad(loss.sum(), x) for loss in (one, two))
    assert torch.equal(a, b)
    assert one.tolist() == [[1.0, -3.0]]
    assert two.tolist() == [[0.125, 4.5]]
