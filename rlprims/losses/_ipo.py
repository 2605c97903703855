"""See :func:`ipo`."""

from rlprims.losses._pairs import check_responses, log_ratios
from rlprims.types import PerPair


def ipo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    tau: float = 0.1,
) -> PerPair:
    """Identity preference optimization, Azar et al. 2023 (arXiv:2310.12036), eq. 17.

    With Δ = log π/π_ref of the chosen response less that of the rejected one: loss = (Δ − 1/(2τ))². Its least value is
    at a finite margin, where DPO's on certain labels has none, so that it cannot run away from the reference.

    Give sums over the tokens, as the equation is written (OpenRLHF), or means over each response's tokens (TRL, AReaL):
    TRL reports from the paper's authors that their results used means. τ differs by the length between the two.

    prime-rl's "IPO" is another thing, :func:`tv_symmetric`.

    Args:
        chosen_log_probs, rejected_log_probs: float (P,), current policy; the only gradients.
        ref_chosen_log_probs, ref_rejected_log_probs: float (P,), frozen reference.
        tau: above 0; the strength of the regularization, TRL's β.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; tau <= 0.

    >>> import torch
    >>> z = torch.zeros(1)
    >>> ipo(z, z - 3.0, z, z, tau=0.25)  # Δ = 3, wanted: 2
    tensor([1.])
    """
    check_responses(
        chosen_log_probs=chosen_log_probs,
        rejected_log_probs=rejected_log_probs,
        ref_chosen_log_probs=ref_chosen_log_probs,
        ref_rejected_log_probs=ref_rejected_log_probs,
    )
    if tau <= 0:
        raise ValueError(f"tau={tau} must be above 0")
    margin = log_ratios(chosen_log_probs, ref_chosen_log_probs) - log_ratios(rejected_log_probs, ref_rejected_log_probs)
    return (margin - 1 / (2 * tau)).square()
