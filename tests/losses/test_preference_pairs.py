"""What each loss on pairs promises: numbers by hand, limits, and identities with DPO."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rlprims import losses
from rlprims.losses import bco, bradley_terry, discopop, dpo, exo, f_dpo, hinge, nca, robust_dpo, sppo_hard
from rlprims.testing import check_loss
from tests.records import Record

RECORDS = [
    Record("losses.apo_down", check_loss, matters={"beta": 0.2}),
    Record("losses.apo_zero", check_loss, matters={"beta": 0.2}),
    Record("losses.bco", check_loss, matters={"beta": 0.2}),
    Record("losses.bradley_terry", check_loss, matters={"centering": 0.1}),
    Record("losses.bradley_terry", check_loss, call={"centering": 0.1}),
    Record("losses.discopop", check_loss, matters={"beta": 0.2, "tau": 1.0}),
    Record("losses.exo", check_loss, matters={"beta": 0.2, "label_smoothing": 0.1}),
    Record(
        "losses.f_dpo",
        check_loss,
        call={"divergence": "alpha"},
        matters={"beta": 0.2, "divergence": "js", "alpha": 2.0},
    ),
    Record("losses.f_dpo", check_loss),
    Record("losses.f_dpo", check_loss, call={"divergence": "js"}),
    Record("losses.f_dpo", check_loss, call={"divergence": "reverse_kl"}),
    Record("losses.hinge", check_loss, matters={"beta": 0.2}),
    Record("losses.nca", check_loss, matters={"beta": 0.2}),
    Record("losses.robust_dpo", check_loss, matters={"beta": 0.2, "label_smoothing": 0.2}),
    Record("losses.sppo_hard", check_loss, matters={"beta": 0.2}),
]

PAIRED = ("apo_down", "apo_zero", "bco", "discopop", "exo", "f_dpo", "hinge", "nca", "robust_dpo", "sppo_hard")


def log_ratios(*pairs: tuple[float, float]) -> list[Tensor]:
    """The four arguments, of log-ratios c and r; what the reference has is of no matter."""
    c, r = torch.tensor(pairs, dtype=torch.float64).T
    ref = torch.tensor([-3.0, -7.0], dtype=torch.float64)[:, None].expand(2, len(pairs))
    return [c + ref[0], r + ref[1], ref[0], ref[1]]


def of(name: str, c: float, r: float, **options: Any) -> float:
    loss: Tensor = getattr(losses, name)(*log_ratios((c, r)), **options)
    return loss.item()


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


RANDOM = log_ratios(*(3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0))).tolist())


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("hinge", {"beta": 0.5}, 1 - 0.5 * 1.5),
        (
            "robust_dpo",
            {"beta": 0.5, "label_smoothing": 0.2},
            (-0.8 * math.log(sigma(0.75)) + 0.2 * math.log(sigma(-0.75))) / 0.6,
        ),
        ("nca", {"beta": 0.5}, -math.log(sigma(1.0)) - 0.5 * math.log(sigma(-1.0)) - 0.5 * math.log(sigma(-0.25))),
        ("bco", {"beta": 0.5}, -math.log(sigma(1.0)) - math.log(sigma(-0.25))),
        ("sppo_hard", {"beta": 0.5}, (2.0 - 1) ** 2 + (0.5 + 1) ** 2),
        ("apo_zero", {"beta": 0.5}, 1 - sigma(1.0) + sigma(0.25)),
        ("apo_down", {"beta": 0.5}, sigma(1.0) + 1 - sigma(0.75)),
        (
            "discopop",
            {"beta": 0.5, "tau": 0.5},
            -(1 - sigma(1.5)) * math.log(sigma(0.75)) + sigma(1.5) * math.exp(-0.75),
        ),
        ("f_dpo", {"beta": 0.5, "divergence": "forward_kl"}, -math.log(sigma(0.5 * (math.exp(-0.5) - math.exp(-2.0))))),
        (
            "f_dpo",
            {"beta": 0.5, "divergence": "js"},
            -math.log(sigma(0.5 * (math.log(sigma(2.0)) - math.log(sigma(0.5))))),
        ),
        (
            "f_dpo",
            {"beta": 0.5, "divergence": "alpha", "alpha": 0.25},
            -math.log(sigma(0.5 * (math.exp(-1.5) - math.exp(-0.375)) / -0.75)),
        ),
    ],
)
def test_by_hand(name: str, options: dict[str, Any], expected: float) -> None:
    assert of(name, 2.0, 0.5, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", sorted({*PAIRED} - {"apo_down", "discopop", "sppo_hard"}))
def test_a_pair_in_the_wrong_order_is_pulled_apart(name: str) -> None:
    chosen, rejected, *refs = log_ratios((-0.5, 0.5))
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    up, down = torch.autograd.grad(getattr(losses, name)(chosen, rejected, *refs).sum(), (chosen, rejected))
    assert up < 0 < down


def test_apo_down_lowers_both_and_the_rejected_one_more() -> None:
    chosen, rejected, *refs = log_ratios((0.0, 0.0))
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    loss = losses.apo_down(chosen, rejected, *refs, beta=1.0)
    of_chosen, of_rejected = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert (of_chosen.item(), of_rejected.item()) == (0.0, 0.25)  # σ'(0) − σ'(0), σ'(0)
    assert of("apo_down", 1.0, 0.0) > of("apo_down", 0.5, -0.5)


def test_robust_dpo_of_flipped_labels_is_dpo_of_the_true_ones_on_average() -> None:
    chosen, rejected, ref_chosen, ref_rejected = RANDOM
    true = robust_dpo(*RANDOM, label_smoothing=0.3)
    flipped = robust_dpo(rejected, chosen, ref_rejected, ref_chosen, label_smoothing=0.3)
    torch.testing.assert_close(0.7 * true + 0.3 * flipped, dpo(*RANDOM))
    torch.testing.assert_close(robust_dpo(*RANDOM, label_smoothing=0.0), dpo(*RANDOM))


def test_exo_is_the_reverse_kl_to_the_labels() -> None:
    chosen, rejected, ref_chosen, ref_rejected = RANDOM
    margins = 0.5 * (chosen - ref_chosen - rejected + ref_rejected)
    policy = Categorical(logits=torch.stack([margins, torch.zeros_like(margins)], -1))
    labels = Categorical(probs=torch.tensor([0.9, 0.1], dtype=torch.float64))
    torch.testing.assert_close(exo(*RANDOM, beta=0.5, label_smoothing=0.1), kl_divergence(policy, labels))


def test_bco_is_an_upper_bound_of_dpo_for_every_shift() -> None:
    for shift in torch.linspace(-2, 2, 9, dtype=torch.float64):
        assert (bco(*RANDOM, shift.expand(50)) >= dpo(*RANDOM)).all()
    assert (bco(*RANDOM, torch.zeros(50)) == bco(*RANDOM)).all()
    moved = [RANDOM[0] + 4.0, RANDOM[1] + 4.0, *RANDOM[2:]]  # both rewards by β · 4
    torch.testing.assert_close(bco(*moved, torch.full((50,), 0.4)), bco(*RANDOM), rtol=1e-6, atol=1e-6)


def test_sppo_is_least_at_targets_of_their_own() -> None:
    assert of("sppo_hard", 5.0, -5.0, beta=0.1) == 0.0
    assert sppo_hard(*RANDOM).min() > 0


def test_hinge_has_no_gradient_beyond_its_margin() -> None:
    assert of("hinge", 6.0, -6.0, beta=0.1) == 0.0
    assert hinge(*RANDOM, beta=1e-9).allclose(torch.ones(50, dtype=torch.float64))


def test_discopop_is_logistic_below_and_exponential_above() -> None:
    assert of("discopop", -4.0, 0.0, beta=1.0) == pytest.approx(math.log1p(math.exp(4.0)), rel=1e-9)
    assert of("discopop", 4.0, 0.0, beta=1.0) == pytest.approx(math.exp(-4.0), rel=1e-9)
    assert of("discopop", 0.0, 0.1, beta=1.0) < of("discopop", 0.0, 0.0, beta=1.0)  # not convex: wrong just below 0
    assert math.isfinite(of("discopop", -1e4, 1e4))
    assert discopop(*RANDOM).isfinite().all()


def test_f_dpo_between_its_divergences() -> None:
    torch.testing.assert_close(f_dpo(*RANDOM, divergence="reverse_kl"), dpo(*RANDOM))
    forward = f_dpo(*RANDOM, divergence="forward_kl")
    torch.testing.assert_close(f_dpo(*RANDOM, divergence="alpha", alpha=0.0), forward)
    near_one = f_dpo(*RANDOM, divergence="alpha", alpha=1 + 1e-7)
    torch.testing.assert_close(near_one, dpo(*RANDOM), rtol=1e-6, atol=1e-6)
    assert math.isfinite(of("f_dpo", -1e4, 1e4, divergence="forward_kl"))


def test_nca_keeps_the_chosen_response_up() -> None:
    """DPO does not see it if both log-ratios fall together."""
    assert of("dpo", -3.0, -4.0) == pytest.approx(of("dpo", 1.0, 0.0))
    assert nca(*log_ratios((-3.0, -4.0)), beta=1.0) > nca(*log_ratios((1.0, 0.0)), beta=1.0)


def test_bradley_terry() -> None:
    chosen, rejected = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    margins = torch.tensor([0.25, 1.0], dtype=torch.float64)
    expected = [-math.log(sigma(0.25)) + 0.1 * 1.5**2, -math.log(sigma(-4.0)) + 0.1]
    assert bradley_terry(chosen, rejected, margins, centering=0.1).tolist() == pytest.approx(expected)
    torch.testing.assert_close(bradley_terry(chosen + 7, rejected + 7), bradley_terry(chosen, rejected))
    assert (bradley_terry(chosen + 7, rejected + 7, centering=0.1) > bradley_terry(chosen, rejected)).all()


@pytest.mark.parametrize("name", PAIRED)
def test_the_reference_is_a_constant(name: str) -> None:
    inputs = [x.clone().requires_grad_() for x in RANDOM]
    gradients = torch.autograd.grad(getattr(losses, name)(*inputs).sum(), inputs, allow_unused=True)
    assert [g is None for g in gradients] == [False, False, True, True]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"beta": 0.0}) for name in PAIRED),
        ("robust_dpo", {"label_smoothing": 0.5}),
        ("exo", {"label_smoothing": 0.0}),
        ("discopop", {"tau": 0.0}),
        ("f_dpo", {"alpha": 1}),
        ("f_dpo", {"divergence": "kl"}),
    ],
)
def test_pair_losses_refuse_impossible_options(name: str, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{option}={value!r}, expected"):
        of(name, 1.0, 0.0, **options)


def test_centering_is_not_negative() -> None:
    with pytest.raises(ValueError, match="centering"):
        bradley_terry(torch.ones(1), torch.ones(1), centering=-0.1)
