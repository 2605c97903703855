"""Laws of importance-weighted losses: the gradient on policy, and finite results far off policy."""

from functools import partial

import torch
from torch import Tensor

from rlprims.testing._cases import LARGE, Batch, layout_of, make_batch, make_batches
from rlprims.testing._compare import assert_close, assert_finite, assert_same
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2)
RATIOS = (0.0, 20.0, 88.0, 89.0, 710.0, 800.0, 1e4)


def on_policy_it_is_reinforce(p: Primitive) -> None:
    """At log_probs = old_log_probs the gradient of the loss with respect to log_probs is −advantages."""
    for batch in make_batches(SEEDS):
        for layout in (batch, batch.pack()):
            on_policy = layout.replace(
                old_log_probs=layout.data["log_probs"], token_cotangent=torch.ones_like(layout.data["log_probs"])
            )
            got = p.run(on_policy, p.required).gradients["log_probs"]
            want = torch.where(layout.mask, -layout.data["advantages"], 0.0)
            assert_close("the gradient of log_probs on policy", got, want, 1e-12)


def _others(p: Primitive) -> list[str]:
    return [name for name in p.inputs if name.endswith("_log_probs")]


def _at_log_probs(p: Primitive, batch: Batch, log_probs: float, others: float) -> Batch:
    pair = {name: torch.full_like(batch.data[name], others) for name in _others(p)}
    return batch.replace(log_probs=torch.full_like(batch.data["log_probs"], log_probs), **pair)


def far_log_ratios_are_finite(p: Primitive) -> None:
    """Log-ratios up to ±1e4 give finite values and gradients, in float32 and float64, for both signs of A."""
    for dtype in (torch.float32, torch.float64):
        for batch, size in [*((make_batch(0, dtype), size) for size in RATIOS), (make_batch(0, dtype, *LARGE), 1e4)]:
            for one, other in ((-0.1, -0.1 - size), (-0.1 - size, -0.1)):
                for names in p.variants:
                    got = p.run(_at_log_probs(p, batch, one, other), names)
                    assert_finite(got, f" at log_probs={one}, {', '.join(_others(p))}={other} in {dtype}")


def impossible_tokens_are_finite(p: Primitive) -> None:
    """A log-prob of −inf under one of the two policies gives finite values and gradients."""
    batch = make_batch(0, torch.float32)
    for one, other in ((-torch.inf, -1.0), (-1.0, -torch.inf)):
        for names in p.variants:
            got = p.run(_at_log_probs(p, batch, one, other), names)
            assert_finite(got, f" at log_probs={one}, {', '.join(_others(p))}={other}")


def tokens_are_independent(p: Primitive) -> None:
    """A loss declared ``token_wise`` has the same values and gradients for tokens in any order, cut anywhere."""
    per_row = [name for name in p.inputs if layout_of(name) == "row"]
    assert not per_row, f"it is declared token_wise but has the parameter {per_row[0]}, which is per row"
    for batch in make_batches(SEEDS[:1]):
        tokens = batch.mask.numel()
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
        cuts = torch.tensor([0, tokens // 3, tokens // 3, tokens])
        shuffle = partial(_shuffle, order)
        shuffled = batch.map(shuffle, lambda x: x[:3]).replace(cu_seqlens=cuts)
        for names in p.variants:
            want = p.run(batch, names).map(shuffle, lambda x: x)
            assert_same(p.run(shuffled, names), want, 1e-12, " of shuffled tokens")


def _shuffle(order: Tensor, x: Tensor) -> Tensor:
    return x.flatten(0, 1)[order]
