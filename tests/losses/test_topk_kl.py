"""The KL of K tokens and the rest: by hand, against TRL's, and against that of the whole vocabulary."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlprims.losses import full_kl, topk_kl
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.topk_kl", check_loss, matters={"direction": "reverse"}),
    Record(
        "losses.topk_kl",
        check_loss,
        call={"direction": "reverse"},
        exempt={
            "float32 whatever comes in": "the rest is 1 minus a sum; its gradient divides by what rounding leaves of it"
        },
    ),
]

STUDENT = torch.tensor([[0.4, -1.0, 0.3, 2.0], [1.0, 0.5, -0.5, -2.0]], dtype=torch.float64)[:, None]
TEACHER = torch.tensor([[-0.5, 0.2, 1.0, 0.1], [0.0, 3.0, -1.0, 0.5]], dtype=torch.float64)[:, None]
MASK = torch.ones(2, 1, dtype=torch.bool)
CLOSE = {"rtol": 0, "atol": 1e-12}
BOTH = pytest.mark.parametrize("direction", ["forward", "reverse"])


def of_logits(student: Tensor, k: int, direction: str, teacher: Tensor = TEACHER) -> Tensor:
    """From the teacher's k likeliest tokens."""
    log_q, top = teacher.log_softmax(-1).topk(k, dim=-1)
    return topk_kl(student.log_softmax(-1).gather(-1, top), log_q, MASK[: len(student)], direction=direction)


def gradient(f, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf).sum(), leaf)
    return g


def test_topk_kl_of_one_token_and_the_rest_by_hand() -> None:
    p, q = (torch.tensor([[[x]]], dtype=torch.float64).log() for x in (0.2, 0.6))
    forward = 0.6 * math.log(0.6 / 0.2) + 0.4 * math.log(0.4 / 0.8)
    reverse = 0.2 * math.log(0.2 / 0.6) + 0.8 * math.log(0.8 / 0.4)
    assert topk_kl(p, q, MASK[:1]).item() == pytest.approx(forward)
    assert topk_kl(p, q, MASK[:1], direction="reverse").item() == pytest.approx(reverse)


@pytest.mark.parametrize(
    ("direction", "values"),
    [("forward", [0.7261995393853615, 0.7904401754870172]), ("reverse", [0.6199473035802203, 1.2139299637119865])],
)
def test_trl_1_16_with_its_tail(direction: str, values: list[float]) -> None:
    """add_tail_bucket and compute_divergence of trl.experimental.sdft, k = 2."""
    assert of_logits(STUDENT, 2, direction).flatten().tolist() == pytest.approx(values, abs=1e-12)


@BOTH
def test_topk_kl_of_all_tokens_is_the_whole_divergence(direction: str) -> None:
    want = full_kl(STUDENT, TEACHER, MASK, direction=direction)
    torch.testing.assert_close(of_logits(STUDENT, 4, direction), want, **CLOSE)
    got = gradient(lambda x: of_logits(x, 4, direction), STUDENT)
    torch.testing.assert_close(
        got, gradient(lambda x: full_kl(x, TEACHER, MASK, direction=direction), STUDENT), **CLOSE
    )


@BOTH
def test_the_rest_may_be_two_tokens_in_one(direction: str) -> None:
    """Two tokens lumped together by hand are a vocabulary of three."""

    def lumped(x: Tensor) -> Tensor:
        return torch.cat([x[..., :2], x[..., 2:].logsumexp(-1, keepdim=True)], -1)

    p, q = STUDENT.log_softmax(-1), TEACHER.log_softmax(-1)
    got = topk_kl(p[..., :2], q[..., :2], MASK, direction=direction)
    torch.testing.assert_close(got, full_kl(lumped(STUDENT), lumped(TEACHER), MASK, direction=direction), **CLOSE)
    assert p[..., 2:].exp().sum(-1).min() > 0.05


@BOTH
def test_more_tokens_see_more_and_never_more_than_there_is(direction: str) -> None:
    seen = [of_logits(STUDENT, k, direction) for k in (1, 2, 3, 4)]
    assert (seen[0] > 0).all()
    for fewer, more in pairwise(seen):
        assert (fewer <= more + 1e-12).all()


@BOTH
def test_topk_kl_is_least_where_both_agree(direction: str) -> None:
    torch.testing.assert_close(of_logits(TEACHER, 2, direction), torch.zeros(2, 1).double(), **CLOSE)
    torch.testing.assert_close(
        gradient(lambda x: of_logits(x, 2, direction), TEACHER), torch.zeros_like(TEACHER), **CLOSE
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_students_and_teachers_are_finite(direction: str, dtype: torch.dtype) -> None:
    certain, spread = torch.tensor([[[0.0, -torch.inf]]], dtype=dtype), torch.tensor([[[-1.0, -2.0]]], dtype=dtype)
    for p, q in ((certain, spread), (spread, certain), (certain, certain)):
        assert topk_kl(p, q, MASK[:1], direction=direction).isfinite().all()
        assert gradient(lambda x, q=q: topk_kl(x, q, MASK[:1], direction=direction), p).isfinite().all()


def test_wrong_input_is_refused() -> None:
    x = STUDENT.log_softmax(-1)[..., :2]
    with pytest.raises(ValueError, match="direction"):
        topk_kl(x, x, MASK, direction="both")
    with pytest.raises(ValueError, match=r"teacher_topk_log_probs has shape \(2, 1, 1\)"):
        topk_kl(x, x[..., :1], MASK)
