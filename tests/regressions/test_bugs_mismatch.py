"""The sampler's policy against the trainer's: which way round, and what a bound bounds."""

from typing import Any

import pytest
import torch

from rlprims.corrections import importance_weights, rejection, tis, token_veto
from rlprims.logprobs import from_logits, fused_loss
from rlprims.losses import clipped_surrogate
from rlprims.types import SamplingSupport

M = torch.ones(2, 2, dtype=torch.bool)
TRAINER = torch.tensor([[0.8, 0.4], [0.2, 0.4]]).log()
SAMPLER = torch.tensor([[0.2, 0.4], [0.8, 0.4]]).log()


@pytest.mark.parametrize(
    "options",
    [{"level": "token"}, {"level": "sequence"}, {"level": "sequence", "mean": "geometric"}],
    ids=["token", "product", "geometric"],
)
def test_r13_a_truncated_weight_is_not_above_its_cap(options: dict[str, Any]) -> None:
    """OpenRLHF: seq-mask-tis was documented as truncated, and was not."""
    weights = importance_weights(TRAINER, SAMPLER, M, high=1.5, **options).values
    assert weights.max() == 1.5
    assert (TRAINER - SAMPLER).exp().max() > 1.5


def test_r14_b14_bounds_of_the_ratio_are_of_trainer_over_sampler() -> None:
    """verl#6377: token_k1 of "0.5_5.0" keeps ratios from 0.2 to 2."""
    kept = rejection(TRAINER, SAMPLER, M, estimator="k1", level="token", low=0.5, high=5.0).values > 0
    assert kept.tolist() == [[True, True], [False, True]]  # ratios of 4 and of 1/4
    peer = ((SAMPLER - TRAINER).exp() >= 0.5) & ((SAMPLER - TRAINER).exp() <= 5.0)
    assert peer.tolist() == [[False, True], [True, True]]


def test_r7_one_absurd_token_takes_its_response_and_no_other() -> None:
    """NeMo-RL b59165262: such a response stayed, with a ratio that swamped the batch."""
    trainer = torch.tensor([[-20.0, -1.0], [-1.0, -1.0]])
    sampler = torch.full((2, 2), -1.0)
    assert (token_veto(trainer, sampler, M).values > 0).tolist() == [[False, False], [True, True]]


def nucleus(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, SamplingSupport]:
    """As a mask, and as sets: the fewest tokens of each row whose probabilities reach top_p."""
    p = logits.double().softmax(-1)
    order = p.argsort(-1, descending=True)
    before = p.gather(-1, order).cumsum(-1) - p.gather(-1, order)
    left = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before < top_p)
    return left, SamplingSupport.from_counts(left.nonzero()[:, 1], left.sum(-1))


def test_t12_trl_6789_on_policy_weights_are_one_under_top_p() -> None:
    """TRL: with top_p = 0.8 and the sampler's own weights, the importance weights were 0.8 to 0.9, not 1."""
    logits = 2 * torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    left, kept = nucleus(logits, 0.8)
    drawn = logits.masked_fill(~left, -torch.inf).log_softmax(-1)
    tokens = drawn.exp().multinomial(1, generator=torch.Generator().manual_seed(1))[:, 0]
    sampler, mask = drawn.gather(-1, tokens[:, None])[None, :, 0], torch.ones(1, 64, dtype=torch.bool)
    within = tis(from_logits(logits, tokens, kept)[None], sampler, mask).values
    torch.testing.assert_close(within, torch.ones(1, 64), rtol=1e-6, atol=1e-6)
    peer = tis(from_logits(logits, tokens)[None], sampler, mask).values
    torch.testing.assert_close(peer[0], (logits.softmax(-1) * left).sum(-1), rtol=1e-5, atol=1e-5)
    assert peer.max() < 0.9


def test_t13_prime_rl_2601_a_token_at_the_edge_of_its_set_stays_inside() -> None:
    """Two logits change places between two forward passes: the trainer's own top-2 does not have what was drawn."""
    sampler, trainer = torch.tensor([[3.0, 2.001, 2.0, 0.0]]), torch.tensor([[3.0, 2.0, 2.001, 0.0]])
    token, kept = torch.tensor([1]), SamplingSupport(torch.tensor([0, 1]), torch.tensor([0, 2]))
    ratio = (from_logits(trainer, token, kept) - from_logits(sampler, token, kept)).exp()
    assert float(ratio) == pytest.approx(1, abs=1e-3)
    peer = SamplingSupport(trainer.topk(2).indices[0], torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="sets from another forward pass differ by rounding"):
        from_logits(trainer, token, peer)


def test_t14_prime_rl_1965_the_fused_head_scores_within_the_sets() -> None:
    """There the fused head has to be off with sets. The loss that never holds whole logits is that of whole logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator, requires_grad=True)
    left, kept = nucleus((hidden @ head.T).detach(), 0.7)
    tokens = left.float().multinomial(1, generator=generator)[:, 0]
    a, mask = torch.randn(32, generator=generator), torch.ones(32, dtype=torch.bool)
    whole = from_logits(hidden @ head.T, tokens, kept)
    want = clipped_surrogate(whole, whole.detach(), a, mask, torch.tensor([0, 32])).mean()
    data = {"old_log_probs": whole.detach(), "advantages": a}
    got = fused_loss(hidden, head, tokens, torch.full((32,), 1 / 32), mask, clipped_surrogate, data, kept).loss
    torch.testing.assert_close(got, want)
    for x, y in zip(torch.autograd.grad(got, (hidden, head)), torch.autograd.grad(want, (hidden, head)), strict=True):
        torch.testing.assert_close(x, y)
