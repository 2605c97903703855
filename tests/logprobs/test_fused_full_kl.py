"""Divergences from hidden states and two heads: those of whole logits. Their memory is in tests/kernels."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.logprobs import fused_full_kl

ROWS, COLUMNS, VOCAB = 3, 5, 17
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
KINDS = ["reverse", "forward", "jsd"]
Data = dict[str, Tensor]


def batch(dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Data:
    """The teacher is narrower than the student. One row has no valid token."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = (torch.rand(ROWS, COLUMNS, generator=generator) < 0.6) & (torch.arange(ROWS) != 1)[:, None]
    return {
        "hidden": normal(ROWS, COLUMNS, 6).requires_grad_(),
        "head_weight": normal(vocab, 6).requires_grad_(),
        "teacher_hidden": normal(ROWS, COLUMNS, 4),
        "teacher_head_weight": normal(vocab, 4),
        "response_mask": mask,
    }


def whole(b: Data, divergence: str, *, soft_cap: Any = None, teacher_soft_cap: Any = None, **options: Any) -> Tensor:
    """From the logits of all tokens."""
    z, y = b["hidden"] @ b["head_weight"].T, b["teacher_hidden"] @ b["teacher_head_weight"].T
    z = z if soft_cap is None else soft_cap * (z / soft_cap).tanh()
    y = y if teacher_soft_cap is None else teacher_soft_cap * (y / teacher_soft_cap).tanh()
    if divergence == "jsd":
        return losses.jsd(z, y, b["response_mask"], **options)
    return losses.full_kl(z, y, b["response_mask"], direction=divergence, temperature=options.get("temperature", 1.0))


def with_slopes(divergence: Callable[..., Tensor], b: Data) -> tuple[Tensor, ...]:
    """The values, and the gradients of a sum in which each token counts differently and not linearly."""
    values = divergence(b)
    weights = torch.linspace(-1, 2, values.numel(), dtype=values.dtype).reshape(values.shape)
    return values, *torch.autograd.grad((values.exp() * weights).sum(), (b["hidden"], b["head_weight"]))


def fused(b: Data, divergence: str, **options: Any) -> Tensor:
    return fused_full_kl(**b, divergence=divergence, **options)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "beta": 0.2}, {"soft_cap": 3.0, "temperature": 1.3}, {"teacher_soft_cap": 2.0}]
)
def test_it_is_the_divergence_of_whole_logits(divergence: str, options: dict[str, float]) -> None:
    b = batch()
    got = with_slopes(partial(fused, divergence=divergence, **options), b)
    want = with_slopes(partial(whole, divergence=divergence, **options), b)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert all((x != 0).any() for x in got)


def test_several_blocks_of_a_tile() -> None:
    """At a vocabulary of 70,000 a block that fits a cache has three tokens."""
    b = batch(vocab=70_000)
    b["response_mask"] = torch.ones_like(b["response_mask"])
    got, want = (with_slopes(partial(f, divergence="forward"), b) for f in (fused, whole))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_two_events_by_hand() -> None:
    """p = (¾, ¼) and q = (½, ½): KL(p ‖ q) = log 2 − H(p), and d KL(q ‖ p) / dz = p − q."""
    one, mask = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[True]])
    student = torch.tensor([[0.75], [0.25]], dtype=torch.float64).log().requires_grad_()
    data = one, student, one, torch.zeros(2, 1, dtype=torch.float64), mask
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert fused_full_kl(*data).item() == pytest.approx(math.log(2) - entropy, abs=1e-12)
    value = fused_full_kl(*data, divergence="forward")
    assert value.item() == pytest.approx(-0.5 * math.log(0.75) - 0.5 * math.log(0.25) - math.log(2), abs=1e-12)
    (slope,) = torch.autograd.grad(value.sum(), student)
    assert slope.flatten().tolist() == pytest.approx([0.25, -0.25])


@pytest.mark.parametrize("divergence", KINDS)
def test_packed_equals_padded(divergence: str) -> None:
    b = batch()
    want = with_slopes(partial(fused, divergence=divergence), b)
    flat = {n: x if "head" in n else x.detach().flatten(0, 1) for n, x in b.items()}
    flat["hidden"].requires_grad_()
    ends = COLUMNS * torch.arange(ROWS + 1)
    got = with_slopes(lambda data: fused_full_kl(**data, cu_seqlens=ends, divergence=divergence), flat)  # type: ignore[arg-type]
    for mine, theirs in zip(got, (want[0].flatten(), want[1].flatten(0, 1), want[2]), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_masked_is_absent(poison: float) -> None:
    b = batch(torch.float32)
    want = with_slopes(partial(fused, divergence="jsd"), b)
    for name in ("hidden", "teacher_hidden"):
        b[name] = b[name].detach().masked_fill(~b["response_mask"][..., None], poison)
    b["hidden"].requires_grad_()
    got = with_slopes(partial(fused, divergence="jsd"), b)
    assert all(map(torch.equal, got, want))
    assert (got[0][~b["response_mask"]] == 0).all()


@pytest.mark.parametrize("name", ["hidden", "teacher_hidden"])
def test_a_state_that_is_no_number_gives_nan_and_no_gradient(name: str) -> None:
    b = batch()
    row, column = b["response_mask"].nonzero()[0].tolist()
    b[name] = b[name].detach().clone()
    b[name][row, column, 0] = torch.nan
    values = fused(b | {"hidden": b["hidden"].requires_grad_()}, "reverse")
    assert values.isnan().nonzero().tolist() == [[row, column]]
    slopes = torch.autograd.grad(values.nan_to_num().sum(), (b["hidden"], b["head_weight"]))
    assert all(x.isfinite().all() for x in slopes)
    assert (slopes[0][row, column] == 0).all()


def test_only_the_student_gets_a_gradient_and_nobody_without_grad() -> None:
    b = batch()
    teacher = {n: b[n].clone().requires_grad_() for n in ("teacher_hidden", "teacher_head_weight")}
    fused(b | teacher, "forward").sum().backward()
    assert all(x.grad is None for x in teacher.values())
    assert b["hidden"].grad is not None
    frozen = fused(b | {"head_weight": b["head_weight"].detach()}, "forward")
    torch.testing.assert_close(torch.autograd.grad(frozen.sum(), b["hidden"])[0], b["hidden"].grad, **CLOSE)
    with torch.no_grad():
        assert not fused(b, "forward").requires_grad


def test_every_derivative_of_torch() -> None:
    b = batch()

    def both(divergence: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [b[n].detach().clone().requires_grad_() for n in ("hidden", "head_weight")]
        value = divergence(b | dict(zip(("hidden", "head_weight"), leaves, strict=True)), "jsd").sin().sum()
        slopes = torch.autograd.grad(value, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(x.square().sum() for x in slopes), leaves))

    for got, want in zip(both(fused), both(whole), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    of_head = lambda divergence: torch.func.grad(  # noqa: E731
        lambda w: divergence(b | {"hidden": b["hidden"].detach(), "head_weight": w}, "jsd").sum()
    )
    head = b["head_weight"].detach()
    torch.testing.assert_close(of_head(fused)(head), of_head(whole)(head), **CLOSE)


def test_16_bits_beside_32() -> None:
    """The heads' dtypes may differ. The gradients have those of their arguments."""
    b = batch(torch.float32)
    low = {n: b[n].bfloat16() for n in ("teacher_hidden", "teacher_head_weight")}
    torch.testing.assert_close(fused(b | low, "jsd"), whole(b | {n: x.float() for n, x in low.items()}, "jsd"))
    student = {n: b[n].detach().bfloat16().requires_grad_() for n in ("hidden", "head_weight")}
    exact = {n: x.detach().float().requires_grad_() for n, x in student.items()}
    got = with_slopes(partial(fused, divergence="forward"), b | student)
    want = with_slopes(partial(fused, divergence="forward"), b | exact)
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=2e-2, atol=2e-2)


def test_no_valid_token_and_no_token() -> None:
    b = batch()
    none = with_slopes(partial(fused, divergence="jsd"), b | {"response_mask": torch.zeros(ROWS, COLUMNS).bool()})
    assert all((x == 0).all() for x in none)
    empty = {n: x if "head" in n else x[:0] for n, x in b.items()}
    assert fused(empty, "reverse").shape == (0, COLUMNS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "backward"}, "divergence='backward'"),
        ({"divergence": "jsd", "beta": 1.0}, "beta=1.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"soft_cap": -1.0}, r"^soft_cap=-1.0"),
        ({"teacher_soft_cap": 0.0}, "teacher_soft_cap=0.0"),
        ({"teacher_hidden": torch.zeros(ROWS, 4, 4).double()}, r"teacher_hidden\[..., 0\] has shape \(3, 4\)"),
        ({"hidden": torch.zeros(ROWS, 4, 6).double()}, r"^hidden\[..., 0\] has shape \(3, 4\)"),
        ({"teacher_head_weight": torch.zeros(VOCAB, 5).double()}, r"^teacher_head_weight has shape \(17, 5\)"),
        ({"teacher_head_weight": torch.zeros(4, VOCAB + 1).T.double()}, "17 rows and teacher_head_weight 18"),
        (
            {"teacher_hidden": torch.zeros(ROWS, COLUMNS, 4).long()},
            r"^teacher_hidden has shape \(3, 5, 4\) and dtype torch.int64",
        ),
        ({"response_mask": torch.ones(ROWS, COLUMNS)}, "response_mask has dtype"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_full_kl(**(batch() | changes))
