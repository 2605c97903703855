"""The load-balancing loss: against transformers' function, by hand, and summed over micro-batches."""

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlprims.losses import count_totals, load_balance, token_mean
from rlprims.testing import check_loss
from tests.records import STATISTICS_OF_THE_BATCH, Record

COUNTS = torch.tensor([[5.0, 1.0, 0.0, 2.0, 3.0, 3.0, 2.0], [1.0, 1.0, 4.0, 4.0, 2.0, 2.0, 2.0]])
EXEMPT = {**STATISTICS_OF_THE_BATCH, "wrong shapes are refused": "without counts, any number of experts is right"}
RECORDS = [
    Record(
        "losses.load_balance",
        check_loss,
        matters={"top_k": 1, "form": "switch", "expert_counts": COUNTS},
        exempt=EXEMPT,
    ),
    Record("losses.load_balance", check_loss, call={"form": "switch"}, exempt=EXEMPT),
]

LAYERS, EXPERTS = 3, 5
ALL = torch.ones(1, 6, dtype=torch.bool)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def counts(logits: Tensor, mask: Tensor, top_k: int) -> Tensor:
    chosen = logits.topk(top_k).indices
    return torch.stack([chosen[mask][:, i].flatten().bincount(minlength=EXPERTS) for i in range(LAYERS)])


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_it_is_that_of_transformers_with_its_attention_mask(top_k: int) -> None:
    mask = torch.arange(7) >= torch.tensor([[3], [0], [6], [1]])
    logits = random(4, 7).float().requires_grad_()
    theirs = load_balancing_loss_func(tuple(x.flatten(0, 1) for x in logits.unbind(-2)), EXPERTS, top_k, mask.long())
    ours = token_mean(load_balance(logits, mask, top_k=top_k), mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for mine, other in zip(*(torch.autograd.grad(x, logits) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)


def test_one_layer_and_two_experts_by_hand() -> None:
    """Three of four tokens prefer the first expert: f = (¾, ¼), P = ((3 · 0.8 + 0.4) / 4, ...) = (0.7, 0.3)."""
    p = torch.tensor([0.8, 0.8, 0.8, 0.4], dtype=torch.float64)
    logits = torch.stack([p, 1 - p], -1).log()[None, :, None]
    loss = token_mean(load_balance(logits, ALL[:, :4], top_k=1), ALL[:, :4])
    assert float(loss) == pytest.approx(2 * (0.75 * 0.7 + 0.25 * 0.3))


@pytest.mark.parametrize(("form", "minimum"), [("mixtral", 2.0), ("switch", float(LAYERS))])
def test_alike_experts_give_the_known_number_and_unlike_ones_more(form: str, minimum: float) -> None:
    """Token t of five goes to experts t and t + 1, with almost all of its probability."""
    sure = torch.eye(5, dtype=torch.float64) + torch.eye(5, dtype=torch.float64).roll(1, 1)
    even = (30 * sure)[None, :, None].expand(1, 5, LAYERS, 5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    assert float(token_mean(load_balance(even, mask, form=form), mask)) == pytest.approx(minimum)
    flat = torch.zeros_like(even)
    assert float(token_mean(load_balance(flat, mask, form=form), mask)) == pytest.approx(minimum)
    uneven = even[:, :1].expand(1, 5, LAYERS, 5)  # two of five experts get all tokens: f P is 5 / 2 as large
    assert float(token_mean(load_balance(uneven, mask, form=form), mask)) == pytest.approx(2.5 * minimum)


def test_switch_adds_up_layers_and_mixtral_joins_them() -> None:
    """Two layers that send all tokens to different experts: each is as uneven as can be, both together are even."""
    logits = torch.tensor([[30.0, 0.0], [0.0, 30.0]], dtype=torch.float64).expand(1, 6, 2, 2)
    values = {form: token_mean(load_balance(logits, ALL, top_k=1, form=form), ALL) for form in ("switch", "mixtral")}
    assert float(values["switch"]) == pytest.approx(2 + 2)
    assert float(values["mixtral"]) == pytest.approx(1)


@pytest.mark.parametrize("form", ["mixtral", "switch"])
def test_micro_batches_sum_to_the_step(form: str) -> None:
    """Values and gradients, with the step's counts and totals. Means of their own losses (trl#6083) differ."""
    mask = torch.arange(9) < torch.tensor([[9], [2], [0], [5], [7]])
    logits = random(5, 9).requires_grad_()
    step = {"expert_counts": counts(logits, mask, 2), "form": form}
    whole = token_mean(load_balance(logits, mask, form=form), mask)
    (expected,) = torch.autograd.grad(whole, logits)
    parts = [[0, 3], [1], [2, 4]]
    shares = [
        token_mean(load_balance(logits[rows], mask[rows], **step), mask[rows], totals=count_totals(mask))
        for rows in parts
    ]
    torch.testing.assert_close(sum(shares), whole, rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad(sum(shares), logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert float(got[mask].abs().min()) > 0
    alone = [token_mean(load_balance(logits[rows], mask[rows], form=form), mask[rows]).detach() for rows in parts]
    assert abs(float(torch.stack(alone).mean() - whole.detach())) > 0.01


def test_a_step_against_the_gradient_evens_the_load() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 64, 8, generator=generator) + 1
    router = torch.nn.Linear(8, EXPERTS, bias=False)
    torch.nn.init.normal_(router.weight, generator=generator)
    mask, optimizer = torch.ones(1, 64, dtype=torch.bool), torch.optim.SGD(router.parameters(), lr=0.1)
    largest = []
    for _ in range(100):
        logits = router(hidden)[:, :, None]
        largest.append(float(logits.topk(2).indices.flatten().bincount(minlength=EXPERTS).max()))
        optimizer.zero_grad()
        token_mean(load_balance(logits, mask), mask).backward()
        optimizer.step()
    assert largest[-1] < 0.6 * largest[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"router_logits": torch.zeros(1, 6, 4)},
            r"router_logits has shape \(1, 6, 4\) .*, expected floats \(1, 6, L, E\)",
        ),
        ({"top_k": 6}, r"top_k=6, expected a number in \[1, 5\]"),
        ({"expert_counts": torch.zeros(5)}, r"expert_counts is \(L, E\), here \(5,\)"),
        ({"form": "megatron"}, "form='megatron', expected 'mixtral' or 'switch'"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_balance(**{"router_logits": random(1, 6), "response_mask": ALL, **changes})
