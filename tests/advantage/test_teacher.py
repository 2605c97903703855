"""Advantages of distillation: by hand, against TRL 1.16, and by every response of a tiny policy."""

import pytest
import torch
from torch import Tensor

from rlprims.advantage import grpo, iw_opd, rlsd, teacher_gap
from rlprims.losses import sampled_reverse_kl
from rlprims.rewards import at_last_token
from rlprims.testing import check_advantage
from tests.records import FIRST_OF_TWO, Record
from tests.test_enumeration import MASK, REF, STATES, THETA, expected, gradient, log_probs, of, probabilities

RECORDS = [
    Record("advantage.iw_opd", check_advantage, matters={"gamma": 0.0, "shard": FIRST_OF_TWO}),
    Record("advantage.rlsd", check_advantage, matters={"mix": 0.0, "clip": 0.5}),
    Record("advantage.teacher_gap", check_advantage, matters={"discount": 0.5}),
    Record("advantage.teacher_gap", check_advantage, call={"discount": 0.5}, matters={"shard": FIRST_OF_TWO}),
]

CLOSE = {"rtol": 0, "atol": 1e-12}
M = torch.tensor([[True, True, False, True]])
OLD = torch.tensor([[-2.0, -1.0, 9.0, -3.0]], dtype=torch.float64)
TEACHER = torch.tensor([[-1.0, -3.0, 7.0, -2.5]], dtype=torch.float64)


def numbers(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_a_gap_is_discounted_over_valid_tokens() -> None:
    torch.testing.assert_close(teacher_gap(TEACHER, OLD, M), numbers(1.0, -2.0, 0.0, 0.5))
    torch.testing.assert_close(teacher_gap(TEACHER, OLD, M, discount=0.5), numbers(0.125, -1.75, 0.0, 0.5))


def test_a_teacher_that_agrees_gives_zero() -> None:
    for estimate in (teacher_gap, iw_opd):
        assert not estimate(OLD, OLD, M).any()
    a = numbers(1.0, -1.0, 0.0, 2.0)
    torch.testing.assert_close(rlsd(a, OLD, OLD, M), a)


def test_information_weights_of_trl() -> None:
    """TRL 1.16, IWOPDTrainer._compute_iw_opd_loss on these log-probs: the gradients of its loss by the logits."""
    rollout, teacher = numbers(-1.1, -0.4, -1.8), numbers(-0.8, -2.0, -2.1)
    got = iw_opd(teacher, rollout, torch.ones(1, 3, dtype=torch.bool))
    # −A_t/3 (1 − π_t) is the gradient by the sampled token's logit, −A_t/3 (0 − π_v) by another's
    logits = torch.tensor([0.0662675397, 0.0469915552, 0.4580169536, 1.6932749764, 1.4574549379, 1.9322148600])
    first = logits.double().softmax(-1)[2]
    torch.testing.assert_close(
        got[0, 0] * (first - 1) / 3, torch.tensor(-0.1383380973159979).double(), rtol=1e-7, atol=0
    )
    torch.testing.assert_close(got, numbers(0.45, -1.6 * (1 + 0.5 * 1.9 / 2.2), -0.3 * (1 + 0.5 * 0.3 / 2.2)))


def test_rewards_give_the_sign_and_the_teacher_the_size() -> None:
    """arXiv:2604.03128: λ = 0.5 and ±0.2 keep every factor within 0.9 and 1.1."""
    a, gap = numbers(2.0, -2.0, 2.0, -2.0), numbers(0.1, 0.1, -9.0, -9.0)
    every = torch.ones(1, 4, dtype=torch.bool)
    got = rlsd(a, gap, torch.zeros_like(gap), every)
    up, down = torch.tensor(0.1).double().exp(), torch.tensor(-0.1).double().exp()
    torch.testing.assert_close(got, torch.stack([1 + up, -1 - down, up * 0 + 1.8, up * 0 - 2.2])[None])
    torch.testing.assert_close(rlsd(a, gap, torch.zeros_like(gap), every, mix=0.0), a)


def test_discount_zero_is_the_next_tokens_kl_and_one_the_responses() -> None:
    """Over every response: E[A ∇log π] is −∇KL(π ‖ π_T), of the next token, or of the whole response."""
    teacher, old = log_probs(REF), log_probs(THETA)
    whole = gradient(lambda theta: probabilities(theta) @ (log_probs(theta) - teacher).where(MASK, 0.0).sum(-1), THETA)
    torch.testing.assert_close(of(teacher_gap(teacher, old, MASK, discount=1.0)), -whole, **CLOSE)

    def next_tokens(theta: Tensor) -> Tensor:
        kl = (theta.softmax(-1) * (theta.log_softmax(-1) - REF.log_softmax(-1))).sum(-1)
        return expected(kl[STATES].where(MASK, 0.0), probabilities(THETA))

    torch.testing.assert_close(of(teacher_gap(teacher, old, MASK)), -gradient(next_tokens, THETA), **CLOSE)


def test_a_divergence_over_several_tokens_has_no_expected_gradient_in_an_advantage() -> None:
    """miles#2362: it does not depend on the token that was sampled, so that E[A ∇log π] is 0; as a loss it teaches."""
    divergence = (THETA.softmax(-1) * (THETA.log_softmax(-1) - REF.log_softmax(-1))).sum(-1)[STATES]
    torch.testing.assert_close(of(-divergence), torch.zeros_like(THETA), **CLOSE)
    reward = grpo(at_last_token(torch.arange(7.0).double(), MASK), torch.zeros(7, dtype=torch.int64), MASK)
    torch.testing.assert_close(of(reward - divergence), of(reward), **CLOSE)
    assert of(teacher_gap(log_probs(REF), log_probs(THETA), MASK)).abs().max() > 0.01


def test_the_gap_as_an_advantage_is_the_loss_of_the_gap() -> None:
    x = OLD.clone().requires_grad_()
    sampled_reverse_kl(x, TEACHER, M).sum().backward()
    torch.testing.assert_close(x.grad, -teacher_gap(TEACHER, OLD, M))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: teacher_gap(TEACHER, OLD, M, discount=1.5), r"discount=1.5, expected a number in \[0, 1\]"),
        (lambda: iw_opd(TEACHER, OLD, M, gamma=-1.0), "gamma=-1.0"),
        (lambda: rlsd(OLD, TEACHER, OLD, M, mix=2.0), "mix=2.0"),
        (lambda: rlsd(OLD, TEACHER, OLD, M, clip=1.0), "clip=1.0"),
    ],
)
def test_wrong_numbers(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
