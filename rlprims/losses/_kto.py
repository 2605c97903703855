"""See :func:`kto`."""

import torch

from rlprims.losses._pairs import check_responses, log_ratios
from rlprims.masking import upcast
from rlprims.types import PerSequence, RowMask


def kto(
    sequence_log_probs: PerSequence,
    ref_sequence_log_probs: PerSequence,
    baseline_kl: PerSequence,
    desirable: RowMask,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PerSequence:
    """Kahneman-Tversky optimization, Ethayarajh et al. 2024 (arXiv:2402.01306): responses good or bad, not in pairs.

    With r = log π/π_ref of a response, the sum over its tokens, and z the baseline:
    loss = λ_D (1 − σ(β (r − z))) for a desirable one, λ_U (1 − σ(β (z − r))) for an undesirable one.

    z estimates KL(π ‖ π_ref), a constant for the gradient: in the paper the mean of r over responses put to the prompts
    of others in the batch, at least 0. It is data here, because that mean is over the whole step and every rank; one
    number for all is ``z.expand(B)``, and zeros are KTO without a baseline, TRL's apo_zero_unpaired.

    Args:
        sequence_log_probs: float (B,), current policy, ``layout.sequence_sum``; the only gradient.
        ref_sequence_log_probs: float (B,), frozen reference.
        baseline_kl: float (B,), z in nats.
        desirable: bool (B,).
        beta: above 0.
        desirable_weight, undesirable_weight: λ_D and λ_U, at least 0. The paper advises λ_D n_D / (λ_U n_U) from 1 to
            4/3, n counting the responses of each kind.

    Returns:
        float (B,), one loss for each response: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0; a weight below 0.

    >>> z = torch.zeros(2)
    >>> kto(torch.tensor([10.0, 10.0]), z, z, torch.tensor([True, False]))  # 1 − σ(1), 1 − σ(−1)
    tensor([0.2689, 0.7311])
    """
    check_responses(
        sequence_log_probs=sequence_log_probs,
        ref_sequence_log_probs=ref_sequence_log_probs,
        baseline_kl=baseline_kl,
    )
    if desirable.shape != sequence_log_probs.shape or desirable.dtype is not torch.bool:
        raise ValueError(
            f"desirable has shape {tuple(desirable.shape)} and dtype {desirable.dtype}, "
            f"needs bool {tuple(sequence_log_probs.shape)}: one answer for each response"
        )
    if beta <= 0 or desirable_weight < 0 or undesirable_weight < 0:
        raise ValueError(
            f"beta={beta} must be above 0, desirable_weight={desirable_weight} and "
            f"undesirable_weight={undesirable_weight} at least 0"
        )
    gain = log_ratios(sequence_log_probs, ref_sequence_log_probs) - upcast(baseline_kl).detach()
    signed = torch.where(desirable, gain, -gain)
    weights = torch.where(desirable, torch.full_like(gain, desirable_weight), undesirable_weight)
    return weights * torch.sigmoid(-beta * signed)
