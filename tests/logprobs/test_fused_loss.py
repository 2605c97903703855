"""The fused loss: the same number and gradient as log-probs first and the loss afterwards."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rlprims import losses
from rlprims.layout import sequence_lengths, to_tokens
from rlprims.logprobs import from_hidden, fused_loss
from rlprims.types import token_wise

ROWS, COLUMNS, WIDTH, VOCAB = 4, 9, 6, 17


def batch(dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    old = -normal(ROWS, COLUMNS).abs() - 2
    return {
        "hidden": normal(ROWS, COLUMNS, WIDTH).requires_grad_(),
        "head_weight": normal(vocab, WIDTH).requires_grad_(),
        "token_ids": torch.randint(vocab, (ROWS, COLUMNS), generator=generator),
        "response_mask": (torch.rand(ROWS, COLUMNS, generator=generator) < 0.6)
        & (torch.arange(ROWS) != 2)[:, None],  # and a row without a token
        "old_log_probs": old,
        "rollout_log_probs": old + 0.1,
        "ref_log_probs": old - 0.1,
        "advantages": normal(ROWS, COLUMNS),
    }


def declared(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss, declared token-wise whether the library declares it already or not."""
    return token_wise(partial(loss))


def sum_of_two(log_probs: Tensor, ref_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, **_) -> Tensor:
    return losses.kl(log_probs, ref_log_probs, response_mask, _["cu_seqlens"]) * 0.1 - log_probs.exp() * advantages


LOSSES: list[tuple[Callable[..., Tensor], list[str]]] = [
    (losses.clipped_surrogate, ["old_log_probs", "advantages"]),
    (partial(losses.clipped_surrogate, clip_high=0.28, dual_clip=3.0), ["old_log_probs", "advantages"]),
    (losses.cispo, ["old_log_probs", "advantages"]),
    (losses.sapo, ["old_log_probs", "advantages"]),
    (losses.gppo, ["old_log_probs", "advantages"]),
    (losses.kl, ["ref_log_probs"]),
    (losses.reinforce, ["advantages"]),
    (losses.nll, []),
    (sum_of_two, ["ref_log_probs", "advantages"]),
]


def two_steps(b: dict[str, Tensor], loss: Callable[..., Tensor], names: list[str], weights: Tensor, **options) -> tuple:
    """All log-probs first, then the loss of the whole padded batch."""
    log_probs = from_hidden(b["hidden"], b["head_weight"], b["token_ids"], **options).log_probs
    data = {name: b[name] for name in names}
    per_token = loss(log_probs=log_probs, response_mask=b["response_mask"], cu_seqlens=None, **data)
    total = (torch.where(b["response_mask"], per_token, 0.0) * weights).sum()
    kept = torch.where(b["response_mask"], log_probs, 0.0)
    return total, kept, *torch.autograd.grad(total, (b["hidden"], b["head_weight"]))


def fused(b: dict[str, Tensor], loss: Callable[..., Tensor], names: list[str], weights: Tensor, **options) -> tuple:
    data = {name: b[name] for name in names}
    first = (b[name] for name in ("hidden", "head_weight", "token_ids"))
    total, log_probs, _ = fused_loss(*first, weights, b["response_mask"], declared(loss), data, **options)
    return total, log_probs, *torch.autograd.grad(total, (b["hidden"], b["head_weight"]))


def each_counts_differently(b: dict[str, Tensor]) -> Tensor:
    return torch.linspace(0.5, 1.5, ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize(("loss", "names"), LOSSES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"soft_cap": 3.0, "temperature": 1.3}])
def test_any_token_wise_loss(loss: Callable[..., Tensor], names: list[str], options: dict[str, float]) -> None:
    b = batch()
    weights = each_counts_differently(b)
    got, want = fused(b, loss, names, weights, **options), two_steps(b, loss, names, weights, **options)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert (got[2] != 0).any()


def test_the_gradient_by_hand() -> None:
    """One token, two equal logits, loss 3 log p: d/dz = 3 (½, −½), so the head moves by it times the state."""
    hidden, head = torch.tensor([[2.0]], requires_grad=True), torch.tensor([[1.0], [1.0]], requires_grad=True)
    token, one = torch.tensor([0]), torch.ones(1)
    loss, *_ = fused_loss(hidden, head, token, one, one.bool(), token_wise(lambda log_probs, **_: 3 * log_probs), {})
    loss.backward()
    assert head.grad.tolist() == [[3.0], [-3.0]]
    assert hidden.grad.tolist() == [[0.0]]


@pytest.mark.parametrize(
    "aggregation", [losses.token_mean, losses.seq_mean_token_mean, losses.seq_mean_token_sum, losses.token_sum]
)
def test_the_gradient_of_an_aggregation_is_its_weights(aggregation: Callable[..., Tensor]) -> None:
    b = batch()
    weights = torch.func.grad(aggregation)(torch.zeros(ROWS, COLUMNS, dtype=torch.float64), b["response_mask"])
    loss = losses.clipped_surrogate
    log_probs = from_hidden(b["hidden"], b["head_weight"], b["token_ids"]).log_probs
    want = aggregation(loss(log_probs, b["old_log_probs"], b["advantages"], b["response_mask"]), b["response_mask"])
    got = fused(b, loss, ["old_log_probs", "advantages"], weights)[0]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def test_packed_equals_padded() -> None:
    b = batch()
    mask = b["response_mask"]
    weights = to_tokens(1 / sequence_lengths(mask).clamp(min=1).double(), mask)
    loss, names = losses.clipped_surrogate, ["old_log_probs", "advantages"]
    padded = fused(b, loss, names, weights)
    flat = {name: x if name == "head_weight" else x.detach().flatten(0, 1) for name, x in b.items()}
    flat["hidden"].requires_grad_()
    packed = fused(flat, loss, names, weights.flatten())
    assert torch.equal(packed[0], padded[0])
    for mine, theirs in zip(packed[1:3], padded[1:3], strict=True):
        assert torch.equal(mine, theirs.flatten(0, 1))
    assert torch.equal(packed[3], padded[3])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e38])
def test_masked_is_absent(poison: float) -> None:
    b = batch(torch.float32)
    mask, weights = b["response_mask"], torch.ones(ROWS, COLUMNS)
    loss, names = losses.clipped_surrogate, ["old_log_probs", "advantages"]
    want = fused(b, loss, names, weights)
    for name in ("hidden", *names):
        outside = ~mask[..., None] if name == "hidden" else ~mask
        b[name] = b[name].detach().masked_fill(outside, poison)
    b["hidden"].requires_grad_()
    got = fused(b, loss, names, torch.where(mask, weights, poison))
    for mine, clean in zip(got, want, strict=True):
        assert torch.equal(mine, clean)
    assert (got[1][~mask] == 0).all()
    assert (got[2][~mask] == 0).all()


@pytest.mark.parametrize("tokens", [slice(0, 0), slice(2, 3)])
def test_fused_loss_of_no_valid_token_is_zero_with_gradient_zero(tokens: slice) -> None:
    b = {name: x if name == "head_weight" else x.detach()[tokens] for name, x in batch().items()}
    b["hidden"].requires_grad_()
    got = fused(b, losses.clipped_surrogate, ["old_log_probs", "advantages"], torch.ones_like(b["advantages"]))
    assert all((x == 0).all() for x in got)
    assert got[2].shape == b["hidden"].shape


def test_parts_of_a_batch_sum_to_the_whole() -> None:
    b = batch()
    loss, names = losses.clipped_surrogate, ["old_log_probs", "advantages"]
    weights = b["response_mask"] / b["response_mask"].sum()
    whole = fused(b, loss, names, weights)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: x if name == "head_weight" else x[rows] for name, x in b.items()}
        parts.append(fused(part, loss, names, weights[rows]))
    for whole_is, at in ((whole[0], 0), (whole[3], 3)):
        torch.testing.assert_close(parts[0][at] + parts[1][at], whole_is, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "value", "gradient"),
    [(torch.bfloat16, 1e-6, 8e-3), (torch.float16, 1e-6, 1e-3), (torch.float32, 1e-6, 1e-6)],
)
def test_against_float64_of_the_same_numbers(dtype: torch.dtype, value: float, gradient: float) -> None:
    """The loss has float32's accuracy whatever comes in; a gradient that of its own dtype."""
    loss, names = partial(losses.clipped_surrogate, clip_low=1.0, clip_high=9.0), ["old_log_probs", "advantages"]
    low = batch(dtype)
    exact = {n: x.detach().double() if x.is_floating_point() else x for n, x in low.items()}
    for name in ("hidden", "head_weight"):
        exact[name].requires_grad_()
    weights = torch.ones(ROWS, COLUMNS)
    got, want = fused(low, loss, names, weights), two_steps(exact, loss, names, weights.double())
    assert got[0].dtype is torch.float32
    torch.testing.assert_close(got[0].double(), want[0], rtol=value, atol=value)
    torch.testing.assert_close(got[1].double(), want[1], rtol=value, atol=value)
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        assert mine.dtype is dtype
        assert (mine - theirs).norm() <= gradient * theirs.norm()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "soft_cap": 2.0}])
def test_entropies_are_those_of_from_hidden(options: dict[str, float]) -> None:
    b = batch()
    mask, first = b["response_mask"], tuple(b[name] for name in ("hidden", "head_weight", "token_ids"))
    got = fused_loss(*first, mask / mask.sum(), mask, declared(losses.nll), {}, **options).entropies
    assert not got.requires_grad
    torch.testing.assert_close(got, torch.where(mask, from_hidden(*first, **options).entropies.detach(), 0.0))


def test_frozen_parts_get_no_gradient() -> None:
    b = batch()
    weights, loss, names = each_counts_differently(b), losses.clipped_surrogate, ["old_log_probs", "advantages"]
    want = fused(b, loss, names, weights)
    data = {name: b[name] for name in names}
    for frozen, at in (("head_weight", 2), ("hidden", 3)):
        part = b | {frozen: b[frozen].detach()}
        first = (part[name] for name in ("hidden", "head_weight", "token_ids"))
        total, *_ = fused_loss(*first, weights, b["response_mask"], declared(loss), data)
        (got,) = torch.autograd.grad(total, b["hidden" if frozen == "head_weight" else "head_weight"])
        assert torch.equal(got, want[at])


def test_fused_loss_without_gradient_is_the_value_alone() -> None:
    b = batch()
    weights, loss, names = each_counts_differently(b), losses.clipped_surrogate, ["old_log_probs", "advantages"]
    want = fused(b, loss, names, weights)
    first = [b[name] for name in ("hidden", "head_weight", "token_ids")]
    with torch.no_grad():
        got = fused_loss(*first, weights, b["response_mask"], declared(loss), {name: b[name] for name in names})
    assert not got.loss.requires_grad
    assert torch.equal(got.loss, want[0])
    assert torch.equal(got.log_probs, want[1])


def test_the_loss_is_scaled_by_what_comes_after_it() -> None:
    b = batch()
    weights, loss, names = each_counts_differently(b), losses.reinforce, ["advantages"]
    want = fused(b, loss, names, weights)
    first = [b[name] for name in ("hidden", "head_weight", "token_ids")]
    total, *_ = fused_loss(*first, weights, b["response_mask"], declared(loss), {name: b[name] for name in names})
    got = torch.autograd.grad(-3 * total, (b["hidden"], b["head_weight"]))
    for mine, theirs in zip(got, want[2:], strict=True):
        torch.testing.assert_close(mine, -3 * theirs, rtol=1e-12, atol=0)


def test_a_second_backward_is_refused(kernels: str) -> None:
    if kernels == "0":
        pytest.skip("the formula keeps what it needs")
    b = batch()
    first = [b[name] for name in ("hidden", "head_weight", "token_ids")]
    weights = each_counts_differently(b)
    total, *_ = fused_loss(*first, weights, b["response_mask"], declared(losses.nll), {})
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice, expected once"):
        total.backward()


def test_fused_loss_has_every_derivative_of_torch() -> None:
    """A gradient penalty, and torch.func: those of the loss in two steps."""
    b = batch()
    mask, weights = b["response_mask"], each_counts_differently(b)
    loss = token_wise(lambda log_probs, **_: log_probs.exp())

    def in_one(h: Tensor, w: Tensor) -> Tensor:
        return fused_loss(h, w, b["token_ids"], weights, mask, loss, {}, temperature=0.8).loss.sin()

    def in_two(h: Tensor, w: Tensor) -> Tensor:
        softmax = torch.distributions.Categorical(logits=h @ w.T / 0.8)
        return (softmax.log_prob(b["token_ids"]).exp() * weights)[mask].sum().sin()

    penalties = []
    for of in (in_one, in_two):
        slopes = torch.autograd.grad(
            of(b["hidden"], b["head_weight"]), (b["hidden"], b["head_weight"]), create_graph=True
        )
        penalty = sum(x.square().sum() for x in slopes)
        penalties.append(torch.autograd.grad(penalty, (b["hidden"], b["head_weight"])))
    for mine, theirs in zip(*penalties, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    for of_func in (torch.func.grad(in_one), torch.func.jacfwd(in_one)):
        got = of_func(b["hidden"], b["head_weight"]).detach()
        torch.testing.assert_close(got, torch.func.grad(in_two)(b["hidden"], b["head_weight"]).detach())


def test_fused_loss_traces_without_a_break() -> None:
    b = batch()
    first = [b[name] for name in ("hidden", "head_weight", "token_ids")]
    loss = partial(token_wise(lambda log_probs, advantages, scale, **_: -scale * log_probs * advantages), scale=2.0)
    outcomes = []
    torch.compiler.reset()
    for of in (torch.compile(fused_loss, backend="eager", fullgraph=True), fused_loss):
        data = {"advantages": b["advantages"]}
        total, log_probs, _ = of(*first, each_counts_differently(b), b["response_mask"], loss, data)
        outcomes.append((total, log_probs, *torch.autograd.grad(total, first[:2])))
    torch.compiler.reset()
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [losses.gspo, partial(losses.gspo, clip_low=0.1), lambda log_probs, **_: log_probs])
def test_a_loss_that_is_not_declared_token_wise_is_refused(loss: Callable[..., Tensor]) -> None:
    b = batch()
    first = (b[name] for name in ("hidden", "head_weight", "token_ids", "advantages", "response_mask"))
    with pytest.raises(ValueError, match=r"whole sequences.*token_wise"):
        fused_loss(*first, loss, {})


def test_a_partial_of_a_declared_loss_is_declared() -> None:
    b = batch()
    first = [b[name] for name in ("hidden", "head_weight", "token_ids", "advantages", "response_mask")]
    loss = partial(partial(token_wise(lambda log_probs, scale, **_: scale * log_probs)), scale=2.0)
    got = fused_loss(*first, loss, {}).loss
    log_probs = from_hidden(*first[:3]).log_probs
    torch.testing.assert_close(got, 2 * (log_probs * first[3])[first[4]].sum())


@pytest.mark.parametrize("name", ["weights", "response_mask", "advantages"])
def test_fused_loss_refuses_data_that_are_not_per_token(name: str) -> None:
    b = batch() | {"weights": torch.ones(ROWS, COLUMNS)}
    b[name] = b[name][:, :-1]
    first = (b[n] for n in ("hidden", "head_weight", "token_ids", "weights", "response_mask"))
    with pytest.raises(ValueError, match=name):
        fused_loss(*first, declared(losses.reinforce), {"advantages": b["advantages"]})


def test_a_loss_that_is_a_scalar_already_is_refused() -> None:
    b = batch()
    first = (b[n] for n in ("hidden", "head_weight", "token_ids", "advantages", "response_mask"))
    with pytest.raises(ValueError, match="one number for each token"):
        fused_loss(*first, token_wise(lambda log_probs, **_: log_probs.mean()), {})
    with pytest.raises(ValueError, match=r"torch\.bool"):
        fused(b | {"response_mask": b["response_mask"].float()}, losses.nll, [], b["advantages"])
