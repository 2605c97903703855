"""The Jensen-Shannon divergence of K tokens and the rest; and the gated distillation of SDAR."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.losses import jsd, sdar, topk_jsd, topk_kl
from rlprims.testing import check_loss
from tests.records import Record
from tests.test_enumeration import MASK, THETA, gradient, log_probs

RECORDS = [
    Record("losses.topk_jsd", check_loss, matters={"beta": 0.1}),
]

STUDENT = torch.tensor(
    [
        [
            [0.0662675397, 0.0469915552, 0.4580169536, 1.6932749764, 1.4574549379, 1.9322148600],
            [-1.4418139928, 0.7277603479, -1.3131496578, -0.3280001761, -0.1521316235, -2.6909171062],
            [1.7421050312, -0.5239610207, -0.2838789902, 0.4525755021, -1.6677291342, -1.5870322969],
        ]
    ],
    dtype=torch.float64,
)
TEACHER = torch.tensor(
    [
        [
            [-0.5582364888, -0.3366956411, 0.2085945465, -1.7196224129, 0.5389467248, -2.2193864255],
            [-1.6496592184, -1.8868855151, -0.1321346661, -1.5789792694, -0.6541102622, -1.3789137366],
            [-1.4245652246, -0.4275695311, -1.8456131997, -0.3181474535, 1.9777750240, 0.4185424762],
        ]
    ],
    dtype=torch.float64,
)
EVERY = torch.ones(1, 3, dtype=torch.bool)


def at(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.0, [0.6734402613980168, 0.4689296367941247, 1.2676243040647768]),
        (0.3, [0.14792106659893, 0.10276770675059746, 0.25755910991551334]),
        (0.5, [0.1862721099768899, 0.12866104535567535, 0.31564413028598803]),
        (1.0, [1.0684077788727195, 0.6802572755933366, 1.9645846940872833]),
    ],
)
def test_numbers_of_trl(alpha: float, expected: list[float]) -> None:
    """TRL 1.16, compute_topk_self_distillation_loss(distillation_topk=2, distillation_add_tail=True)."""
    ids = STUDENT.topk(2).indices
    rows = at(STUDENT, ids), at(TEACHER, ids), EVERY
    if alpha in (0.0, 1.0):
        got = topk_kl(*rows, direction="reverse" if alpha else "forward")
    else:
        got = topk_jsd(*rows, beta=alpha)
    torch.testing.assert_close(got, torch.tensor([expected], dtype=torch.float64), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_topk_jsd_of_all_tokens_is_the_whole_divergence_and_of_fewer_less(beta: float) -> None:
    whole = jsd(STUDENT, TEACHER, EVERY, beta=beta)
    for k in (1, 3, 6):
        ids = TEACHER.topk(k).indices
        part = topk_jsd(at(STUDENT, ids), at(TEACHER, ids), EVERY, beta=beta)
        assert (part <= whole + 1e-12).all()
    torch.testing.assert_close(part, whole, rtol=1e-9, atol=1e-9)


def test_the_tail_counts() -> None:
    """verl#7855: the student gives the K tokens twice the teacher's mass in the same proportions, and that is seen."""
    student, teacher = torch.tensor([[[0.4, 0.4]]]).log(), torch.tensor([[[0.2, 0.2]]]).log()
    assert float(topk_jsd(student, teacher, torch.ones(1, 1, dtype=torch.bool))) > 0.05


def test_a_truncated_reverse_kl_is_not_clamped_away() -> None:
    """verl#7806: of (0.6, 0.4) and (0.9, 0.1) at K = 1, 0.6 log(0.6/0.9) alone is −0.243, which a clamp makes 0."""
    x = torch.tensor([[[0.6]]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[[0.9]]], dtype=torch.float64).log()
    got = topk_kl(x, teacher, torch.ones(1, 1, dtype=torch.bool), direction="reverse")
    assert float(got.detach()) == pytest.approx(0.311239, abs=1e-6)
    got.sum().backward()
    assert float(x.grad) == pytest.approx(0.6 * math.log(0.6 * 0.1 / (0.9 * 0.4)), rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_the_ends_are_another_function(beta: float) -> None:
    with pytest.raises(ValueError, match="use topk_kl"):
        topk_jsd(STUDENT, TEACHER, EVERY, beta=beta)


def test_the_gate_of_sdar() -> None:
    """arXiv:2605.15155 by hand: gaps 1 and −1 at β = 2 have gates σ(2) and σ(−2), and push both tokens up."""
    x = torch.tensor([[-2.0, -1.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    loss = sdar(x, torch.tensor([[-1.0, -2.0, 3.0]]), mask, beta=2.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.8807971, -0.1192029, 0.0]]))
    loss.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-0.8807971, -0.1192029, 0.0]]))


def test_a_student_that_agrees_is_still_pushed_up() -> None:
    """At π = π_T every gate is ½, and Σ over the samples of −½ ∇log π has mean 0."""
    teacher = log_probs(THETA)
    weights = torch.where(MASK, teacher, 0.0).sum(-1).exp()
    g = gradient(lambda theta: (sdar(log_probs(theta), teacher, MASK).sum(-1) * weights).sum(), THETA)
    torch.testing.assert_close(g, torch.zeros_like(g), rtol=0, atol=1e-12)
