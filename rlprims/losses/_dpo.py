"""See :func:`dpo`."""

from torch.nn.functional import logsigmoid

from rlprims.losses._pairs import check_responses, log_ratios
from rlprims.types import PerPair


def dpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PerPair:
    """Direct preference optimization, Rafailov et al. 2023 (arXiv:2305.18290), eq. 7.

    With Δ = log π/π_ref of the chosen response less that of the rejected one, each the sum over its tokens:
    loss = −log σ(β Δ). With ``label_smoothing=ε``: −(1 − ε) log σ(β Δ) − ε log σ(−β Δ), the paper's own conservative
    variant for labels of which a share ε is wrong (Mitchell 2023, cDPO).

    One log-prob for each response is all that preference losses read: take ``layout.sequence_sum`` of the per-token
    ones, padded or packed. Sums are the paper's; divided by ``layout.sequence_lengths``, β is per token.

    Args:
        chosen_log_probs, rejected_log_probs: float (P,), current policy; the only gradients.
        ref_chosen_log_probs, ref_rejected_log_probs: float (P,), frozen reference.
        beta: above 0; the strength of the KL to the reference.
        label_smoothing: at least 0, below ½.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0; label_smoothing outside [0, ½).

    >>> import torch
    >>> z = torch.zeros(1)
    >>> dpo(z, z, z, z)  # log 2: the policy is still the reference
    tensor([0.6931])
    """
    check_responses(
        chosen_log_probs=chosen_log_probs,
        rejected_log_probs=rejected_log_probs,
        ref_chosen_log_probs=ref_chosen_log_probs,
        ref_rejected_log_probs=ref_rejected_log_probs,
    )
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must be in [0, 0.5): at 0.5 no label says anything")
    margin = log_ratios(chosen_log_probs, ref_chosen_log_probs) - log_ratios(rejected_log_probs, ref_rejected_log_probs)
    right, wrong = logsigmoid(beta * margin), logsigmoid(-beta * margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
