"""One ratio for a response: its value, who gets its gradient, and what length does to it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims.losses import gspo, gspo_token, seq_mean_token_mean, seq_mean_token_sum, token_mean
from rlprims.testing import check_loss
from tests.records import DERIVATIVES, SHARED_RATIO, Record, one_more

RECORDS = [
    Record(
        "losses.gspo",
        check_loss,
        matters={"clip_low": 0.5, "clip_high": 0.5, "mean": "product", "all_reduce_rows": one_more},
        exempt=SHARED_RATIO,
    ),
    Record("losses.gspo", check_loss, call={"clip_low": 0.2, "clip_high": 0.2}, exempt=SHARED_RATIO),
    Record("losses.gspo", check_loss, call={"mean": "product"}, exempt=SHARED_RATIO),
    Record(
        "losses.gspo_token",
        check_loss,
        matters={"clip_low": 0.5, "clip_high": 0.5, "all_reduce_rows": one_more},
        exempt=dict.fromkeys(DERIVATIVES, "each token answers for the response's ratio by itself"),
    ),
]

FORMS = [gspo, gspo_token]


def row(*x: float) -> Tensor:
    return torch.tensor([x], dtype=torch.float64)


def losses_and_gradient(form: Callable[..., Tensor], x: Tensor, old: Tensor, a: Tensor, **clip: Any) -> list[float]:
    leaf = x.clone().requires_grad_()
    losses = form(leaf, old, a, torch.ones_like(x, dtype=torch.bool), **clip)
    losses.sum().backward()
    return [*losses.flatten().tolist(), *leaf.grad.flatten().tolist()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # above, A > 0: clipped
        (1.5, -1.0, 1.5, 1.5),
        (0.5, -1.0, 0.8, 0.0),  # below, A < 0: clipped
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_ppos_clip_of_the_geometric_mean(form, ratio: float, advantage: float, loss: float, gradient: float) -> None:
    x = row(math.log(ratio) + 0.7, math.log(ratio) - 0.7)  # the tokens lie far apart, their mean is what counts
    got = losses_and_gradient(form, x, row(0, 0), row(advantage, advantage), clip_low=0.2, clip_high=0.28)
    assert got == pytest.approx([loss, loss, gradient, gradient], abs=1e-12)


def test_the_default_bounds_are_those_of_the_paper() -> None:
    for ratio, loss in ((1.0003, -1.0003), (1.0005, -1.0004)):
        got = losses_and_gradient(gspo, row(math.log(ratio)), row(0), row(1))
        assert got[0] == pytest.approx(loss, abs=1e-9)


def test_advantages_per_token_are_averaged_in_one_form_and_kept_in_the_other() -> None:
    x, a = row(0.0, 0.0), row(3.0, 1.0)
    assert losses_and_gradient(gspo, x, x, a) == pytest.approx([-3, -1, -2, -2])
    assert losses_and_gradient(gspo_token, x, x, a) == pytest.approx([-3, -1, -3, -1])


def test_the_forms_agree_when_the_advantage_is_the_responses() -> None:
    generator = torch.Generator().manual_seed(0)
    old, x = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64) / 10
    mask = torch.rand(4, 6, generator=generator) < 0.7
    a = torch.randn(4, 1, generator=generator, dtype=torch.float64).expand(4, 6)
    found = []
    for form in FORMS:
        leaf = x.clone().requires_grad_()
        loss = seq_mean_token_mean(form(leaf, old, a, mask, clip_low=0.2, clip_high=0.2), mask)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_under_a_token_mean_a_response_weighs_by_its_length() -> None:
    mask = torch.arange(8) < torch.tensor([[2], [8]])
    a = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 8)
    weights = {}
    for mean in (seq_mean_token_mean, token_mean):
        x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
        mean(gspo(x, torch.zeros_like(x), a, mask), mask).backward()
        weights[mean] = x.grad.sum(-1).tolist()
    assert weights[seq_mean_token_mean] == pytest.approx([-0.5, 0.5])
    assert weights[token_mean] == pytest.approx([-0.2, 0.8])


def test_luspo_is_the_sum_over_tokens() -> None:
    """LUSPO (arXiv:2602.05261): the response's loss times its length."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    x = torch.tensor([[0.1, 0.2, 0.3], [-0.1, 9.0, 9.0]])
    losses = gspo(x, torch.zeros(2, 3), torch.ones(2, 3), mask, clip_low=1.0, clip_high=9.0)
    assert seq_mean_token_sum(losses, mask).item() == pytest.approx(-(3 * math.exp(0.2) + math.exp(-0.1)) / 2)


def test_verl_0_9_1() -> None:
    """verl:public:policy_loss.gspo/001, first row; the peer's gspo is the token form."""
    got = losses_and_gradient(
        gspo_token,
        row(-1.361325, -0.609941, -0.001, -0.80166),
        row(-1.368885, -0.387992, -0.122893, -0.714466),
        row(-0.696083, 0.003089, 1.132265, -1.358132),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert got[4:] == pytest.approx([0.665505, -0.002953, -1.082527, 1.298471], abs=2e-6)


def test_nemo_rl() -> None:
    """nemo_rl:public:nemo_loss.gspo/000 (git 7ea279abf), second row of 5; here the gradient goes through the mean."""
    got = losses_and_gradient(
        gspo,
        row(-1.704899, -1.432332, -1.28114, -1.655427),
        row(-1.242289, -1.447026, -1.232759, -1.57124),
        row(-0.541202, 0.01, -1.987509, -0.213648),
        clip_low=0.2,
        clip_high=0.28,
    )
    assert [g / 4 / 5 for g in got[4:]] == pytest.approx([0.029541] * 4, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_is_clamped_and_not_its_tokens(form) -> None:
    x = row(30.0, -30.0 + 2 * math.log(1.1))
    assert losses_and_gradient(form, x, row(0, 0), row(1, 1), clip_high=9.0)[:2] == pytest.approx([-1.1, -1.1])


@pytest.mark.parametrize(
    ("factors", "advantage", "loss", "gradient"),
    [
        ((1.1, 1.0), 1.0, -1.1, -2.2),  # two tokens bear the loss, and each of them moves it in both
        ((1.5, 0.9), 1.0, -1.28, 0.0),  # 1.35 is above 1.28
        ((1.5, 0.8), 1.0, -1.2, -2.4),
        ((0.9, 0.8), -1.0, 0.8, 0.0),  # 0.72 is below 0.8, and the geometric mean would not be
        ((2.0, 2.0), -1.0, 4.0, 8.0),
    ],
)
def test_ppos_clip_of_the_product(factors, advantage: float, loss: float, gradient: float) -> None:
    x = row(*map(math.log, factors))
    got = losses_and_gradient(
        gspo, x, row(0, 0), row(advantage, advantage), clip_low=0.2, clip_high=0.28, mean="product"
    )
    assert got == pytest.approx([loss, loss, gradient, gradient], abs=1e-12)


def test_an_unknown_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="mean='arithmetic', expected 'geometric' or 'product'"):
        gspo(*[row(0.0)] * 3, torch.ones(1, 1, dtype=torch.bool), mean="arithmetic")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("clip", [{"clip_low": 1.5}, {"clip_high": -0.1}])
def test_bounds_that_make_no_sense_are_refused(form, clip: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(clip))):
        losses_and_gradient(form, row(0.0), row(0.0), row(1.0), **clip)
