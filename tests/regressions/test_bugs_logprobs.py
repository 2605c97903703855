"""Logits to log-probs and entropies, and metrics of extreme ones."""

import pytest
import torch

from rlprims import diagnostics
from rlprims.logprobs import entropy_from_logits, from_logits


def test_e1_a_banned_token_adds_nothing_to_the_entropy() -> None:
    """verl, TRL: 0 · −∞."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    got = entropy_from_logits(logits)
    got.sum().backward()
    torch.testing.assert_close(got, torch.tensor([2.0]).log())
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    log_p = logits.detach().log_softmax(-1)
    assert (log_p.exp() * log_p).sum().isnan()


def test_e2_e4_bf16_logits_are_scaled_and_reduced_in_float32() -> None:
    """TRL and verl lose 0.04 nats in bf16; miles#1554 divided by the temperature there."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(64, 1000, generator=generator)).bfloat16()
    tokens = torch.randint(1000, (64,), generator=generator)
    want = (logits.double() / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(from_logits(logits, tokens, temperature=0.7).double(), want, rtol=0, atol=1e-5)
    peer = (logits / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (peer.double() - want).abs().max() > 0.03


@pytest.mark.parametrize("apart", [800.0, -800.0, 1e4])
def test_e10_no_metric_overflows(apart: float) -> None:
    """verl: k3_kl, chi2 and the perplexities are exponentials without a bound."""
    old, mask = torch.full((2, 3), -0.1), torch.ones(2, 3, dtype=torch.bool)
    new = old + apart if apart < 0 else old
    old = old if apart < 0 else old - apart
    metrics = {
        **diagnostics.sampler_mismatch(new, old, mask),
        **diagnostics.ratio_stats(new, old, torch.ones(2, 3), mask, clip_low=0.2, clip_high=0.2),
        **diagnostics.divergences(new, old, mask),
        "log_perplexity": diagnostics.log_perplexity(new, mask),
    }
    assert all(metric.value().isfinite() for metric in metrics.values())
    assert torch.tensor(800.0).exp().isinf()
