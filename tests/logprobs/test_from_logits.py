"""Log-probability of the sampled token."""

import math

import pytest
import torch

from rlprims.logprobs import entropy_from_logits, from_logits
from rlprims.testing import check_logits
from tests.records import A_SHARD, Record

RECORDS = [
    Record("logprobs.from_logits", check_logits, matters={"temperature": 0.5, "vocab": A_SHARD}),
    Record("logprobs.from_logits", check_logits, call={"temperature": 0.7}),
    Record(
        "logprobs.from_logits",
        check_logits,
        matters={"inplace_backward": True},
        exempt={"hyperparameters matter": "it says where the gradient is written, not what it is"},
    ),
]


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]], dtype=torch.float64)
    got = from_logits(logits, torch.tensor([1, 0]))
    assert got.tolist() == pytest.approx([math.log(0.75), math.log(0.5)])


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    assert from_logits(logits, torch.tensor([1]), temperature=0.5).item() == pytest.approx(math.log(0.9))


def test_the_gradient_by_hand() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    from_logits(logits, torch.tensor([2]), temperature=0.5).sum().backward()
    assert logits.grad.tolist() == [[-0.5, -0.5, 1.5, -0.5]]


def test_a_banned_token_that_was_sampled_has_no_probability() -> None:
    got = from_logits(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    assert got.item() == -math.inf


def test_many_blocks_equal_one() -> None:
    """2^18 elements a block: with V = 50,000 that is 5 rows, and here are 12."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(12, 50_000, generator=generator)
    tokens = torch.randint(50_000, (12,), generator=generator)
    logits.requires_grad_()
    got = from_logits(logits, tokens)
    weights = torch.randn(12, generator=generator)
    (gradient,) = torch.autograd.grad(got, logits, weights)
    for i in range(12):
        want = logits[i].detach().double().requires_grad_()
        value = want[tokens[i]] - want.logsumexp(0)
        (slope,) = torch.autograd.grad(value, want, weights[i].double())
        assert got[i].item() == pytest.approx(value.item(), rel=1e-6)
        torch.testing.assert_close(gradient[i].double(), slope, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e4])
def test_an_offset_of_all_logits_changes_nothing(offset: float) -> None:
    """A number near its row's largest is subtracted from it exactly; a log-prob stays below 0, an entropy above."""
    generator = torch.Generator().manual_seed(0)
    logits = offset + 8 * torch.randn(64, 1_000, generator=generator)
    tokens = torch.cat([logits[:32].argmax(1), torch.randint(1_000, (32,), generator=generator)])
    got, exact = from_logits(logits, tokens), from_logits(logits.double(), tokens)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=5e-7)
    assert (got <= 0).all()
    entropies = entropy_from_logits(logits)
    torch.testing.assert_close(entropies.double(), entropy_from_logits(logits.double()), rtol=1e-6, atol=5e-7)
    assert (entropies >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_lose_nothing_more(dtype: torch.dtype) -> None:
    """The result is that of the same logits in float64; bf16 arithmetic would be 0.04 nats away."""
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(64, 1_000, generator=generator)).to(dtype)
    tokens = torch.randint(1_000, (64,), generator=generator)
    got, exact = from_logits(logits, tokens), from_logits(logits.double(), tokens)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=0)


def test_the_gradient_has_the_dtype_of_the_logits() -> None:
    logits = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    from_logits(logits, torch.tensor([0, 1])).sum().backward()
    assert logits.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        from_logits(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(3),
        torch.zeros(3, 1, 1).long(),
        torch.tensor([0, -1, 4]),
        torch.tensor([0, 5, 4]),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        from_logits(torch.zeros(3, 5), tokens)


def test_several_tokens_of_each_row() -> None:
    """Each column is what a call with that token gives, and the gradient is the sum of theirs; a token may repeat."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(7, (2, 3, 4), generator=generator)
    tokens[0, 0] = 5
    weights = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    got = from_logits(logits, tokens, temperature=0.7)
    assert got.shape == (2, 3, 4)
    columns = [from_logits(logits, tokens[..., k], temperature=0.7) for k in range(4)]
    assert torch.equal(got, torch.stack(columns, dim=-1))
    (gradient,) = torch.autograd.grad(got, logits, weights)
    (want,) = torch.autograd.grad(sum((c * weights[..., k]).sum() for k, c in enumerate(columns)), logits)
    torch.testing.assert_close(gradient, want, rtol=0, atol=1e-12)


def test_from_logits_of_all_tokens_is_the_whole_softmax() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]], dtype=torch.float64)
    got = from_logits(logits, torch.arange(2).expand(2, 2))
    torch.testing.assert_close(got.exp(), torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64))


def test_in_place_of_a_leaf_is_refused() -> None:
    leaf, tokens = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="leaf"):
        from_logits(leaf, tokens, inplace_backward=True)


def test_a_row_without_a_distribution_is_nan_and_gets_no_gradient() -> None:
    logits = torch.tensor([[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf] * 2, [0.0, 0.0]], requires_grad=True)
    got = from_logits(logits, torch.zeros(4, dtype=torch.int64))
    assert got.isnan().tolist() == [True, True, True, False]
    got.sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.5, -0.5]]


def test_from_logits_has_every_derivative_of_torch() -> None:
    """Twice backward, forward mode, torch.func and vmap; a banned token among the others."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    tokens, banned = torch.tensor([1, 2, 4]), torch.arange(5) == 3

    def of(x: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(banned, -torch.inf)
        return (from_logits(x, tokens, temperature=0.8) - 0.3 * entropy_from_logits(x)).sin().sum()

    assert torch.autograd.gradgradcheck(of, logits)
    (slope,) = torch.autograd.grad(of(logits), logits)
    torch.testing.assert_close(torch.func.grad(of)(logits), slope)
    _, moved = torch.func.jvp(of, (logits,), (torch.ones_like(logits),))
    torch.testing.assert_close(moved, slope.sum())
    mapped = torch.func.vmap(lambda x: from_logits(x, tokens))(torch.stack([logits, 2 * logits]))
    torch.testing.assert_close(mapped[1], from_logits(2 * logits, tokens))


def test_integer_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="logits"):
        from_logits(torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
