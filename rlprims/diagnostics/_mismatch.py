"""See :func:`sampler_mismatch`."""

import torch

from rlprims.diagnostics._tokens import token_max, token_mean
from rlprims.diagnostics._weights import weights
from rlprims.layout import sequence_lengths, sequence_sum
from rlprims.masking import zero_outside
from rlprims.ratios import LOG_RATIO_LIMIT, estimate_kl, log_ratio
from rlprims.types import CuSeqlens, Metrics, PerToken, TokenMask


def sampler_mismatch(
    old_log_probs: PerToken,
    rollout_log_probs: PerToken,
    response_mask: TokenMask,
    cu_seqlens: CuSeqlens | None = None,
) -> Metrics:
    """Trainer against sampler on the same tokens; at the first step of a run it should be rounding.

    ``mismatch_max``: largest |difference| in nats, clamped at 20; ``mismatch_k1``, ``mismatch_k3``: estimates of
    KL(sampler ‖ trainer); ``mismatch_probability``: mean |difference| of the probabilities; and of the ratios trainer /
    sampler the effective share and χ² of :func:`weights`: ``mismatch_ess`` and ``mismatch_chi2`` of the tokens' own,
    ``mismatch_ess_sequence`` and ``mismatch_chi2_sequence`` of the products over each response.
    """
    with torch.no_grad():
        difference = log_ratio(old_log_probs, rollout_log_probs, response_mask)
        trainer, sampler = zero_outside(old_log_probs, response_mask), zero_outside(rollout_log_probs, response_mask)
        of_tokens = weights(difference.exp(), response_mask)
        product = sequence_sum(trainer - sampler, response_mask, cu_seqlens).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        of_sequences = weights(product.exp(), sequence_lengths(response_mask, cu_seqlens) > 0)
        return {
            "mismatch_max": token_max(difference.abs(), response_mask),
            "mismatch_k1": token_mean(-difference, response_mask),
            "mismatch_k3": token_mean(estimate_kl(-difference, "k3"), response_mask),
            "mismatch_probability": token_mean((trainer.exp() - sampler.exp()).abs(), response_mask),
            "mismatch_ess": of_tokens["weight_ess"],
            "mismatch_chi2": of_tokens["weight_chi2"],
            "mismatch_ess_sequence": of_sequences["weight_ess"],
            "mismatch_chi2_sequence": of_sequences["weight_chi2"],
        }
