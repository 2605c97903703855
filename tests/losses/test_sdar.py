"""``sdar``: its value, its gate, and where it becomes the reverse KL's."""

import math

import pytest
import torch

from rlprims.losses import sampled_reverse_kl, sdar
from rlprims.testing import check_loss
from tests.records import DERIVATIVES, SCORE_FUNCTION, Record

RECORDS = [
    Record(
        "losses.sdar",
        check_loss,
        matters={"beta": 1.0},
        exempt={**dict.fromkeys(DERIVATIVES, "the gate is a constant by definition"), **SCORE_FUNCTION},
    ),
]
MASK = torch.ones(1, 3, dtype=torch.bool)
TEACHER = torch.tensor([[-1.0, -2.0, -1.5]])


def student() -> torch.Tensor:
    return torch.tensor([[-2.0, -1.0, -1.5]], requires_grad=True)


def test_by_hand() -> None:
    """Gaps 1, -1 and 0 nats; σ(2) = 1 / (1 + e^-2)."""
    gate = 1 / (1 + math.exp(-2))
    x = student()
    loss = sdar(x, TEACHER, MASK, beta=2.0)
    torch.testing.assert_close(loss, torch.tensor([[gate, -(1 - gate), 0.0]]))
    loss.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-gate, -(1 - gate), -0.5]]))


def test_every_gradient_pushes_its_token_up() -> None:
    x = student()
    sdar(x, TEACHER, MASK).sum().backward()
    assert x.grad is not None
    assert (x.grad < 0).all()


def test_with_a_sharp_gate_only_what_the_teacher_prefers_is_imitated() -> None:
    x, y = student(), student()
    sdar(x, TEACHER, MASK, beta=1e4).sum().backward()
    assert x.grad is not None
    assert x.grad[0, :2].tolist() == [-1.0, 0.0]
    sampled_reverse_kl(y, TEACHER, MASK).sum().backward()  # its sign follows the gap, where sdar's does not
    assert y.grad is not None
    assert y.grad[0, 1] > 0


@pytest.mark.parametrize("beta", [0.0, -1.0])
def test_a_gate_without_a_direction_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=rf"beta={beta}, expected a number above 0"):
        sdar(student(), TEACHER, MASK, beta=beta)
