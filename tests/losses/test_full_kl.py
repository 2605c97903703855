"""Divergences of whole distributions: against sums by hand, torch's own, TRL's, and their limits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlprims.losses import full_kl, jsd
from rlprims.testing import check_loss
from tests.records import A_SHARD, Record

RECORDS = [
    Record("losses.full_kl", check_loss, matters={"direction": "forward", "temperature": 0.5, "vocab": A_SHARD}),
    Record("losses.full_kl", check_loss, call={"direction": "forward", "temperature": 0.7}),
    Record("losses.jsd", check_loss, matters={"beta": 0.1, "temperature": 0.5, "vocab": A_SHARD}),
]

STUDENT = torch.tensor([[0.4, -1.0, 0.3, 2.0], [1.0, 0.5, -0.5, -2.0]], dtype=torch.float64)[:, None]
TEACHER = torch.tensor([[-0.5, 0.2, 1.0, 0.1], [0.0, 3.0, -1.0, 0.5]], dtype=torch.float64)[:, None]
MASK = torch.ones(2, 1, dtype=torch.bool)
CLOSE = {"rtol": 0, "atol": 1e-12}
EVERY = pytest.mark.parametrize(
    ("fn", "options"), [(full_kl, {}), (full_kl, {"direction": "forward"}), (jsd, {}), (jsd, {"beta": 0.2})]
)
Divergence = Callable[..., Tensor]


def gradient(fn: Divergence, logits: Tensor, *rest: Tensor, **options: object) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (g,) = torch.autograd.grad(fn(leaf, *rest, **options).sum(), leaf)
    return g


def row(*probabilities: float) -> Tensor:
    return torch.tensor([[probabilities]], dtype=torch.float64).log()


def test_two_events_by_hand() -> None:
    p, q, one = row(0.75, 0.25), row(0.5, 0.5), MASK[:1]
    assert full_kl(p, q, one).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert full_kl(p, q, one, direction="forward").item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    # m = 0.2 q + 0.8 p = (0.7, 0.3)
    of_q, of_p = (
        0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3),
        0.75 * math.log(15 / 14) + 0.25 * math.log(5 / 6),
    )
    assert jsd(p, q, one, beta=0.2).item() == pytest.approx(0.2 * of_q + 0.8 * of_p)


def test_the_gradients_by_hand() -> None:
    """p_j (log p_j / q_j − KL), and p − q."""
    p, q = row(0.75, 0.25), row(0.5, 0.5)
    slope = 0.75 * 0.25 * (math.log(1.5) - math.log(0.5))
    assert gradient(full_kl, p, q, MASK[:1]).flatten().tolist() == pytest.approx([slope, -slope])
    got = gradient(full_kl, p, q, MASK[:1], direction="forward")
    assert got.flatten().tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_full_kl_is_the_divergence_of_torch_distributions(direction: str) -> None:
    def reference(x: Tensor) -> Tensor:
        p, q = torch.distributions.Categorical(logits=x), torch.distributions.Categorical(logits=TEACHER)
        return (
            torch.distributions.kl_divergence(p, q)
            if direction == "reverse"
            else torch.distributions.kl_divergence(q, p)
        )

    torch.testing.assert_close(full_kl(STUDENT, TEACHER, MASK, direction=direction), reference(STUDENT), **CLOSE)
    got = gradient(full_kl, STUDENT, TEACHER, MASK, direction=direction)
    torch.testing.assert_close(got, gradient(reference, STUDENT), **CLOSE)


@pytest.mark.parametrize(
    ("beta", "values", "slopes"),
    [
        (0.1, [0.06519261538, 0.07165257011], [0.00182407048, -0.01343579556, -0.02919163422, 0.0408033593]),
        (0.5, [0.16714785833, 0.21522447104], [-0.00329148399, -0.02530035058, -0.06646843275, 0.09506026731]),
        (0.9, [0.06105511052, 0.09728962772], [-0.00422889309, -0.00792117011, -0.02284106973, 0.03499113293]),
    ],
)
def test_jsd_of_trl_1_16(beta: float, values: list[float], slopes: list[float]) -> None:
    """GKDTrainer.generalized_jsd_loss, no reduction; its gradient of the first row."""
    assert jsd(STUDENT, TEACHER, MASK, beta=beta).flatten().tolist() == pytest.approx(values, abs=1e-10)
    assert gradient(jsd, STUDENT, TEACHER, MASK, beta=beta)[0, 0].tolist() == pytest.approx(slopes, abs=1e-10)


def test_jsd_of_trl_1_16_at_a_temperature() -> None:
    got = jsd(STUDENT, TEACHER, MASK, beta=0.3, temperature=2.0)
    assert got.flatten().tolist() == pytest.approx([0.0402664054, 0.06314657159], abs=1e-10)


def test_the_ends_of_jsd_are_the_two_directions() -> None:
    small = 1e-7
    forward = full_kl(STUDENT, TEACHER, MASK, direction="forward")
    torch.testing.assert_close(jsd(STUDENT, TEACHER, MASK, beta=small) / small, forward, rtol=1e-5, atol=0)
    reverse = full_kl(STUDENT, TEACHER, MASK, direction="reverse")
    torch.testing.assert_close(jsd(STUDENT, TEACHER, MASK, beta=1 - small) / small, reverse, rtol=1e-5, atol=0)


def test_jsd_exchanges_its_arguments_with_beta() -> None:
    there = jsd(STUDENT, TEACHER, MASK, beta=0.3)
    torch.testing.assert_close(jsd(TEACHER, STUDENT, MASK, beta=0.7), there, **CLOSE)
    assert (jsd(TEACHER, STUDENT, MASK, beta=0.3) - there).abs().min() > 1e-3


def test_disjoint_distributions_are_log_two_apart() -> None:
    p, q = row(1.0, 0.0), row(0.0, 1.0)
    assert jsd(p, q, MASK[:1]).item() == pytest.approx(math.log(2))


@EVERY
def test_full_kl_is_zero_with_zero_gradient_at_equality_and_positive_elsewhere(fn: Divergence, options: dict) -> None:
    torch.testing.assert_close(fn(STUDENT, STUDENT, MASK, **options), torch.zeros(2, 1).double(), **CLOSE)
    torch.testing.assert_close(gradient(fn, STUDENT, STUDENT, MASK, **options), torch.zeros_like(STUDENT), **CLOSE)
    assert (fn(STUDENT, TEACHER, MASK, **options) > 0.01).all()


@EVERY
def test_a_shift_of_either_logits_cancels(fn: Divergence, options: dict) -> None:
    want = fn(STUDENT, TEACHER, MASK, **options)
    torch.testing.assert_close(fn(STUDENT + 50, TEACHER - 30, MASK, **options), want, **CLOSE)


@EVERY
def test_the_temperature_divides_both(fn: Divergence, options: dict) -> None:
    want = fn(2 * STUDENT, 2 * TEACHER, MASK, **options)
    torch.testing.assert_close(fn(STUDENT, TEACHER, MASK, temperature=0.5, **options), want, **CLOSE)
    slopes = gradient(fn, STUDENT, TEACHER, MASK, temperature=0.5, **options)
    torch.testing.assert_close(slopes, 2 * gradient(fn, 2 * STUDENT, 2 * TEACHER, MASK, **options), **CLOSE)


@EVERY
@pytest.mark.parametrize(("mine", "its"), [([1], [1]), ([1], []), ([], [1]), ([0, 1], [1, 2]), ([0, 1, 2], [1, 2, 3])])
def test_banned_tokens_are_finite(fn: Divergence, options: dict, mine: list[int], its: list[int]) -> None:
    student, teacher = STUDENT.clone(), TEACHER.clone()
    student[..., mine] = -torch.inf
    teacher[..., its] = -torch.inf
    value = fn(student, teacher, MASK, **options)
    assert (value >= -1e-12).all()
    assert (value <= 100).all()
    slopes = gradient(fn, student, teacher, MASK, **options)
    assert slopes.isfinite().all()
    assert (slopes[..., mine] == 0).all()


@EVERY
def test_a_token_that_both_have_banned_is_absent(fn: Divergence, options: dict) -> None:
    student, teacher = (torch.cat([x, torch.full_like(x[..., :2], -torch.inf)], -1) for x in (STUDENT, TEACHER))
    want = fn(STUDENT, TEACHER, MASK, **options)
    torch.testing.assert_close(fn(student, teacher, MASK, **options), want, **CLOSE)
    slopes = gradient(fn, student, teacher, MASK, **options)
    torch.testing.assert_close(slopes[..., :-2], gradient(fn, STUDENT, TEACHER, MASK, **options), **CLOSE)


@EVERY
def test_a_vocabulary_of_50_000_is_as_exact_as_in_float64(fn: Divergence, options: dict) -> None:
    """Row by row. torch's own log_softmax in float32 is 1e-5 off in the gradient."""
    generator = torch.Generator().manual_seed(0)
    x, y = 3 * torch.randn(2, 3, 4, 50_000, generator=generator)
    mask = torch.rand(3, 4, generator=generator) < 0.8
    got, slopes = fn(x, y, mask, **options), gradient(fn, x, y, mask, **options)
    one = torch.ones(1, 1, dtype=torch.bool)
    for i, j in mask.nonzero().tolist():
        a, b = x[i, j].double()[None, None], y[i, j].double()[None, None]
        assert got[i, j].item() == pytest.approx(fn(a, b, one, **options).item(), rel=2e-5)
        slope = gradient(fn, a, b, one, **options)[0, 0]
        largest = slope.abs().max().item()
        torch.testing.assert_close(slopes[i, j].double(), slope, rtol=2e-5, atol=2e-6 * largest)
    assert (slopes[~mask] == 0).all()


def test_the_gradient_keeps_the_dtype_of_the_logits() -> None:
    assert gradient(full_kl, STUDENT.bfloat16(), TEACHER.bfloat16(), MASK).dtype is torch.bfloat16


@EVERY
def test_the_second_derivative_beside_banned_tokens(fn: Divergence, options: dict) -> None:
    """Finite, 0 for a banned token, and for the others that of the vocabulary without it."""
    student, teacher = (torch.cat([x, torch.full_like(x[..., :1], -torch.inf)], -1) for x in (STUDENT, TEACHER))

    def penalty(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(fn(x, y, MASK, **options).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), x)
        return second

    got, want = penalty(student, teacher), penalty(STUDENT, TEACHER)
    assert (got[..., -1] == 0).all()
    torch.testing.assert_close(got[..., :-1], want, **CLOSE)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_second_derivative_where_only_one_side_has_banned_a_token(direction: str) -> None:
    for banned in (0, 1):
        logits = [STUDENT.clone(), TEACHER.clone()]
        logits[banned][..., 1] = -torch.inf
        x = logits[0].requires_grad_()
        loss = full_kl(x, logits[1], MASK, direction=direction)
        (slope,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all()


def test_the_teacher_gets_no_gradient() -> None:
    x, y = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    jsd(x, y, MASK).sum().backward()
    assert y.grad is None
    assert x.grad is not None


@pytest.mark.parametrize(
    ("fn", "options", "named"),
    [
        (full_kl, {"direction": "backward"}, "direction"),
        (full_kl, {"temperature": 0.0}, "temperature"),
        (jsd, {"beta": 0.0}, "beta"),
        (jsd, {"beta": 1.0}, "beta"),
    ],
)
def test_options_that_make_no_sense_are_refused(fn: Divergence, options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fn(STUDENT, TEACHER, MASK, **options)


def test_two_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits has shape \(2, 1, 4\) and ref_logits has shape \(2, 1, 3\)"):
        full_kl(STUDENT, TEACHER[..., :3], MASK)


def test_rows_that_are_not_the_tokens_are_refused() -> None:
    for rows in (1, 3):
        logits = torch.zeros(rows, 1, 4)
        with pytest.raises(ValueError, match=r"expected both \(2, 1, V\)"):
            full_kl(logits, logits, MASK)


def test_integer_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        full_kl(STUDENT, TEACHER.long(), MASK)
