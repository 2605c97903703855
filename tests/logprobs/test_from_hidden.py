"""Log-prob and entropy from hidden states: what the plain product and torch's own distributions give."""

import math

import pytest
import torch
from torch import Tensor

from rlprims.logprobs import from_hidden
from rlprims.testing import check_logits

VOCAB, WIDTH = 13, 5


def inputs(tokens: int, *, vocab: int = VOCAB, width: int = WIDTH, dtype: torch.dtype = torch.float64) -> tuple:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, torch.randint(vocab, (tokens,), generator=generator)


def plain(hidden: Tensor, head: Tensor, token_ids: Tensor, temperature: float = 1.0, soft_cap: float | None = None):
    """All logits at once, in float64."""
    logits = hidden.double() @ head.double().T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    softmax = torch.distributions.Categorical(logits=logits / temperature)
    return softmax.log_prob(token_ids), softmax.entropy()


def test_by_hand() -> None:
    hidden = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    head = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], dtype=torch.float64)
    got = from_hidden(hidden, head, torch.tensor([0, 1]))
    assert got.log_probs.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])
    assert got.entropies.tolist() == pytest.approx([-0.75 * math.log(0.75) - 0.25 * math.log(0.25), math.log(2)])


@pytest.mark.parametrize(("temperature", "soft_cap"), [(1.0, None), (0.6, None), (1.0, 2.0), (1.7, 3.0)])
@pytest.mark.parametrize("read", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_values_and_gradients_of_the_plain_way(
    temperature: float, soft_cap: float | None, read: tuple[float, float]
) -> None:
    hidden, head, token_ids = inputs(40)
    weights = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outcomes = []
    for of in (from_hidden, plain):
        log_probs, entropies = of(hidden, head, token_ids, temperature=temperature, soft_cap=soft_cap)
        loss = sum(share * (weights * x).sum() for share, x in zip(read, (log_probs, entropies), strict=True) if share)
        outcomes.append((log_probs, entropies, *torch.autograd.grad(loss, (hidden, head))))
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_the_derivative() -> None:
    hidden, head, token_ids = inputs(3)
    assert torch.autograd.gradcheck(lambda h, w: from_hidden(h, w, token_ids, temperature=0.8), (hidden, head))
    assert torch.autograd.gradcheck(lambda h, w: from_hidden(h, w, token_ids, soft_cap=2.0), (hidden, head))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_never_rounded_below_float32(dtype: torch.dtype) -> None:
    """Logits of size 30 in bf16 would be 0.06 away. The gradients are rounded like any product in their dtype."""
    hidden, head, token_ids = inputs(64, vocab=3_000, width=64, dtype=dtype)
    with torch.no_grad():
        hidden.mul_(3)
    got, want = from_hidden(hidden, head, token_ids), plain(hidden, head, token_ids)
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine.double(), exact, rtol=2e-6, atol=1e-5)
    slopes = torch.autograd.grad(got.log_probs.sum() + got.entropies.sum(), (hidden, head))
    exact_slopes = torch.autograd.grad(want[0].sum() + want[1].sum(), (hidden, head))
    for slope, exact in zip(slopes, exact_slopes, strict=True):
        assert slope.dtype is dtype
        assert (slope - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm() + 2e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_wide_head_is_the_float64_one(dtype: torch.dtype) -> None:
    hidden, head, token_ids = inputs(64, vocab=3_000, width=256, dtype=dtype)
    head = (head.detach() / 16).requires_grad_()  # logits of about 1
    exact = tuple(x.detach().double().requires_grad_() for x in (hidden, head))
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0))
    got, want = from_hidden(hidden, head, token_ids), plain(*exact, token_ids)
    slopes = torch.autograd.grad((weights * got.log_probs).sum(), (hidden, head))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=1e-5)
    rounding = 2 * torch.finfo(dtype).eps
    for mine, theirs in zip(slopes, torch.autograd.grad((weights * want[0]).sum(), exact), strict=True):
        assert (mine - theirs).norm() <= (rounding + 2e-6) * theirs.norm()


def test_small_gradients_survive_16_bits() -> None:
    """A weight of 1e-4 and probabilities of 1/3000 make 3e-8, which is 0 in float16."""
    hidden, head, token_ids = inputs(64, vocab=3_000, width=32, dtype=torch.float16)
    exact = tuple(x.detach().double().requires_grad_() for x in (hidden, head))
    (slope,) = torch.autograd.grad(1e-4 * from_hidden(hidden, head, token_ids).log_probs.sum(), hidden)
    (want,) = torch.autograd.grad(1e-4 * plain(*exact, token_ids)[0].sum(), exact[0])
    assert (slope - want).norm() <= 5e-3 * want.norm()


def test_autocast_rounds_nothing() -> None:
    hidden, head, token_ids = inputs(16, dtype=torch.float32)
    outcomes = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            log_probs, entropies = from_hidden(hidden, head, token_ids)
        outcomes.append((log_probs, entropies, *torch.autograd.grad(log_probs.sum() + entropies.sum(), hidden)))
    for plainly, under_autocast in zip(*outcomes, strict=True):
        assert torch.equal(plainly, under_autocast)


def test_from_hidden_has_every_derivative_of_torch() -> None:
    """Twice backward, forward mode, torch.func and vmap; the second derivatives are those of finite differences."""
    hidden, head, token_ids = inputs(3)

    def of(h: Tensor, w: Tensor) -> Tensor:
        log_probs, entropies = from_hidden(h, w, token_ids, temperature=0.8, soft_cap=3.0)
        return (log_probs - 0.3 * entropies).sin().sum()

    assert torch.autograd.gradgradcheck(of, (hidden, head))
    slopes = torch.autograd.grad(of(hidden, head), (hidden, head))
    for mine, theirs in zip(torch.func.grad(of, argnums=(0, 1))(hidden, head), slopes, strict=True):
        torch.testing.assert_close(mine, theirs)
    _, moved = torch.func.jvp(lambda h: of(h, head), (hidden,), (torch.ones_like(hidden),))
    torch.testing.assert_close(moved, slopes[0].sum())
    copies = torch.stack([hidden, 2 * hidden])
    mapped = torch.func.vmap(lambda h: from_hidden(h, head, token_ids).log_probs)(copies)
    torch.testing.assert_close(mapped[1], from_hidden(2 * hidden, head, token_ids).log_probs)


def test_a_bf16_head_traces_without_a_break() -> None:
    hidden, head, token_ids = inputs(5, dtype=torch.bfloat16)
    torch.compiler.reset()
    got = torch.compile(from_hidden, backend="eager", fullgraph=True)(hidden, head, token_ids)
    torch.compiler.reset()
    torch.testing.assert_close(tuple(got), tuple(from_hidden(hidden, head, token_ids)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_a_token_outside_the_loss_has_gradient_zero(poison: float) -> None:
    hidden, head, token_ids = inputs(6, dtype=torch.float32)
    read = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.0, 1.0])
    bad = torch.where((read == 0)[:, None], poison, hidden.detach()).requires_grad_()
    for which in ("log_probs", "entropies"):
        want = torch.autograd.grad(getattr(from_hidden(hidden, head, token_ids), which), (hidden, head), read)
        got = torch.autograd.grad(getattr(from_hidden(bad, head, token_ids), which), (bad, head), read)
        assert (got[0][read == 0] == 0).all()
        for mine, clean in zip(got, want, strict=True):
            assert torch.equal(mine, clean)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["log_probs", "entropies"])
def test_the_laws_of_logits(output: str, kernels: str) -> None:
    """Where the head is the identity, the hidden states are the logits."""

    def of_identity(logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, soft_cap: float | None = None):
        head = torch.eye(logits.shape[-1], dtype=logits.dtype)
        return getattr(from_hidden(logits, head, token_ids, temperature=temperature, soft_cap=soft_cap), output)

    exempt = {"banned tokens are legal": "a hidden state of −inf makes every logit NaN; a head bans nothing"}
    if kernels == "0":
        exempt["settings of torch change nothing"] = (
            "the values do not; the backward of a product follows autocast where it runs inside, against torch's advice"
        )
    check_logits(
        of_identity,
        exempt=exempt,
        alternatives={"temperature": 0.5, "soft_cap": 2.0},
    )


def test_any_leading_shape() -> None:
    hidden, head, token_ids = inputs(6)
    flat = from_hidden(hidden, head, token_ids)
    folded = from_hidden(hidden.reshape(2, 3, WIDTH), head, token_ids.reshape(2, 3))
    for a, b in zip(flat, folded, strict=True):
        assert torch.equal(a.reshape(2, 3), b)
    empty = from_hidden(hidden[:0], head, token_ids[:0])
    assert empty.log_probs.shape == empty.entropies.shape == (0,)
    slopes = torch.autograd.grad(empty.log_probs.sum(), (hidden, head))
    assert all((slope == 0).all() for slope in slopes)


def test_a_bias_is_one_more_column() -> None:
    hidden, head, token_ids = inputs(6)
    bias = torch.linspace(-1, 1, VOCAB, dtype=torch.float64)
    wider = torch.cat([hidden, hidden.new_ones(6, 1)], dim=1), torch.cat([head, bias[:, None]], dim=1)
    want = torch.distributions.Categorical(logits=hidden @ head.T + bias).log_prob(token_ids)
    torch.testing.assert_close(from_hidden(*wider, token_ids).log_probs, want, rtol=1e-12, atol=1e-12)


def test_from_hidden_traces_without_a_break() -> None:
    hidden, head, token_ids = inputs(5)
    torch.compiler.reset()
    traced = torch.compile(from_hidden, backend="eager", fullgraph=True)
    outcomes = []
    for of in (traced, from_hidden):
        log_probs, entropies = of(hidden, head, token_ids, temperature=0.9, soft_cap=4.0)
        outcomes.append((log_probs, *torch.autograd.grad(log_probs.sum() - entropies.sum(), (hidden, head))))
    torch.compiler.reset()
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"head_weight": torch.zeros(VOCAB, WIDTH + 1)}, "head_weight"),
        ({"head_weight": torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16)}, "head_weight"),
        ({"hidden": torch.zeros(3, WIDTH, dtype=torch.int64)}, "hidden"),
        ({"token_ids": torch.zeros(4, dtype=torch.int64)}, "token_ids"),
        ({"token_ids": torch.zeros(3)}, "token_ids"),
    ],
)
def test_from_hidden_refuses_shapes_that_do_not_fit(changes: dict, named: str) -> None:
    right = {
        "hidden": torch.zeros(3, WIDTH),
        "head_weight": torch.zeros(VOCAB, WIDTH),
        "token_ids": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=named):
        from_hidden(**right | changes)
