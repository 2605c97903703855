"""Losses on preferences: pairs of a chosen and a rejected response, or single responses that are good or bad."""

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.masking import check_above, check_at_least, check_finite, upcast
from rlprims.ratios import LOG_RATIO_LIMIT, log_sigmoid
from rlprims.types import PerPair, PerSequence, RowMask

_MIN_REST = 1e-6
"""The smallest 1 − p in the odds p / (1 − p) of a response."""


@described
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

    With Δ = log π/π_ref of the chosen response minus that of the rejected one, each the sum over its tokens:
    loss = −log σ(β Δ). With ``label_smoothing=ε`` in [0, ½): −(1 − ε) log σ(β Δ) − ε log σ(−β Δ), the conservative
    variant if a share ε of the labels is wrong (Mitchell 2023, cDPO).

    Give ``layout.sequence_sum`` of the per-token log-probs, as in the paper. If you divide by
    ``layout.sequence_lengths``, β is per token.

    >>> z = torch.zeros(1)
    >>> dpo(z, z, z, z)  # log 2: the policy is still the reference
    tensor([0.6931])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    check_label_smoothing(label_smoothing)

    margins = c - r
    return -(1 - label_smoothing) * log_sigmoid(beta * margins) - label_smoothing * log_sigmoid(-beta * margins)


@described
def ipo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    tau: float = 0.1,
) -> PerPair:
    """Identity preference optimization, Azar et al. 2023 (arXiv:2310.12036), eq. 17.

    With Δ as in :func:`dpo`: loss = (Δ − 1/(2τ))². Its minimum is at a finite margin, which bounds the distance to the
    reference; DPO has no such minimum if the labels are certain. prime-rl's "IPO" is :func:`tv_symmetric`.

    Give sums over the tokens, as in the equation (OpenRLHF), or means over each response's tokens (TRL, AReaL). TRL
    reports that the paper's authors used means. The τ of the two differ by a factor of the length.

    Args:
        chosen_log_probs, rejected_log_probs: current policy, sums or means over the tokens; only they get gradients.
        tau: above 0; the strength of the regularization, TRL's β.

    >>> z = torch.zeros(1)
    >>> ipo(z, z - 3.0, z, z, tau=0.25)  # Δ = 3, the target is 2
    tensor([1.])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, tau=tau)
    return (c - r - 1 / (2 * tau)).square()


@described
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
    """Kahneman-Tversky optimization, Ethayarajh et al. 2024 (arXiv:2402.01306): single responses, good or bad.

    With r = log π/π_ref of a response, the sum over its tokens, and z, ``baseline_kl``: loss = λ_D (1 − σ(β (r − z)))
    for a desirable response, and λ_U (1 − σ(β (z − r))) for an undesirable one.

    z is an estimate of KL(π ‖ π_ref) without a gradient. In the paper it is the mean of r over responses with the
    prompt of another response, clamped to at least 0. It is an input, because that mean is over the whole step and all
    ranks; for one z use ``z.expand(B)``. Zeros are KTO without a baseline: TRL's apo_zero_unpaired.

    Args:
        desirable_weight, undesirable_weight: λ_D and λ_U, at least 0. The paper advises λ_D n_D / (λ_U n_U) from 1 to
            4/3, with n_D desirable and n_U undesirable responses.

    Returns:
        one loss for each response; take the mean.

    >>> z = torch.zeros(2)
    >>> kto(torch.tensor([10.0, 10.0]), z, z, torch.tensor([True, False]))  # 1 − σ(1), 1 − σ(−1)
    tensor([0.2689, 0.7311])
    """
    log_probs = {"sequence_log_probs": sequence_log_probs, "ref_sequence_log_probs": ref_sequence_log_probs}
    check_responses(**log_probs, baseline_kl=baseline_kl)
    _check_desirable(desirable, sequence_log_probs)
    check_above(0, beta=beta)
    check_at_least(0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    rewards = _log_ratio(sequence_log_probs, ref_sequence_log_probs) - upcast(baseline_kl).detach()  # r − z
    desirable_loss = desirable_weight * torch.sigmoid(-beta * rewards)  # 1 − σ(x) = σ(−x)
    undesirable_loss = undesirable_weight * torch.sigmoid(beta * rewards)
    return torch.where(desirable, desirable_loss, undesirable_loss)


@described
def implicit_reward(
    sequence_log_probs: PerSequence, ref_sequence_log_probs: PerSequence, desirable: RowMask, *, beta: float = 0.05
) -> PerSequence:
    """Cross-entropy of an implicit reward model, Yuan et al. 2024 (arXiv:2412.01981), for correct and wrong responses.

    With r = β (log π − log π_ref) of the whole response: −log σ(r) for a correct response and −log σ(−r) for a wrong
    one. After this training the part of r of a single token is its process reward
    (:func:`rlprims.rewards.implicit_process`), as PRIME (arXiv:2502.01456) uses it.

    Returns:
        one loss for each response; take the mean.

    >>> implicit_reward(torch.tensor([20.0, 20.0]), torch.zeros(2), torch.tensor([True, False]))  # r is 1
    tensor([0.3133, 1.3133])
    """
    check_responses(sequence_log_probs=sequence_log_probs, ref_sequence_log_probs=ref_sequence_log_probs)
    _check_desirable(desirable, sequence_log_probs)
    check_above(0, beta=beta)
    rewards = beta * _log_ratio(sequence_log_probs, ref_sequence_log_probs)
    return -log_sigmoid(torch.where(desirable, rewards, -rewards))


@described
def orpo(chosen_log_probs: PerPair, rejected_log_probs: PerPair, *, odds_coef: float = 0.1) -> PerPair:
    """Odds ratio preference optimization, Hong et al. 2024 (arXiv:2403.07691), eq. 6 and 7: fine-tuning and preference.

    With ℓ each response's log-prob divided by its length and the log-odds o = ℓ − log(1 − exp ℓ):
    loss = −ℓ_chosen − λ log σ(o_chosen − o_rejected), where λ is ``odds_coef``. There is no reference policy.

    The first term is per response, as in the paper; TRL uses the token mean of the batch (and calls λ beta).

    Args:
        chosen_log_probs, rejected_log_probs: means over each response's tokens under the current policy
            (``layout.sequence_sum`` / ``layout.sequence_lengths``), at most 0; only they get gradients.

    >>> half = torch.tensor([0.5]).log()
    >>> orpo(half, half, odds_coef=1.0)  # log 2 + log 2
    tensor([1.3863])
    """
    check_responses(chosen_log_probs=chosen_log_probs, rejected_log_probs=rejected_log_probs)
    check_above(0, odds_coef=odds_coef)
    log_odds_ratio = _log_odds(upcast(chosen_log_probs)) - _log_odds(upcast(rejected_log_probs))
    return -upcast(chosen_log_probs) - odds_coef * log_sigmoid(log_odds_ratio)


def _log_odds(log_probs: Tensor) -> Tensor:
    """log p − log(1 − p)."""
    return log_probs - (-torch.expm1(log_probs)).clamp(min=_MIN_REST).log()


@described
def simpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
    alpha: float = 0.0,
    nll_coef: float = 0.0,
) -> PerPair:
    """Simple preference optimization, Meng et al. 2024 (arXiv:2405.14734), eq. 6: means over tokens, no reference.

    With each response's log-prob divided by its length: loss = −log σ(β (chosen − rejected) − γ), where γ is
    ``margin``. The paper tunes β from 2 to 2.5 and γ from 0.3 to 1.6; its code takes γ/β, and TRL's default is γ = 0.5.

    ``alpha`` ≠ 0 is AlphaPO (arXiv:2501.03884), as TRL's: in the place of a mean ℓ it has (1 − exp(−α ℓ)) / α, of which
    ℓ is the limit α → 0. If α > 0, unlikely responses have a larger gradient. The exponent is clamped to ±20.

    ``nll_coef=λ`` adds −λ chosen: CPO-SimPO, and of sums over the tokens (``means: false`` in a run on pairs) with
    γ = 0 it is CPO (Xu et al. 2024, arXiv:2401.08417), with β = 0.1 and λ = 1. TRL and ms-swift have the mean over the
    tokens of all chosen responses in this term.

    Args:
        chosen_log_probs, rejected_log_probs: means over each response's tokens under the current policy
            (``layout.sequence_sum`` / ``layout.sequence_lengths``); only they get gradients.

    >>> simpo(torch.tensor([-0.5]), torch.tensor([-1.0]))  # β (chosen − rejected) is 1, the target: log 2
    tensor([0.6931])
    """
    check_responses(chosen_log_probs=chosen_log_probs, rejected_log_probs=rejected_log_probs)
    check_above(0, beta=beta)
    check_at_least(0, margin=margin, nll_coef=nll_coef)
    check_finite(alpha=alpha)
    gaps = _shaped(upcast(chosen_log_probs), alpha) - _shaped(upcast(rejected_log_probs), alpha)
    return -log_sigmoid(beta * gaps - margin) - nll_coef * upcast(chosen_log_probs)


def _shaped(x: Tensor, alpha: float) -> Tensor:
    return x if alpha == 0 else -torch.expm1((-alpha * x).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) / alpha


def check_responses(**log_probs: Tensor) -> None:
    """Raise ``ValueError`` unless all are floats (P,) of the same length."""
    first = next(iter(log_probs.values()))
    for name, x in log_probs.items():
        if x.dim() != 1 or not x.is_floating_point() or x.shape != first.shape:
            shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in log_probs.items())
            raise ValueError(
                f"expected floats (P,) of the same length, one number for each response; "
                f"got {shapes}, and {name} has dtype {x.dtype}"
            )


def _check_desirable(desirable: Tensor, sequence_log_probs: Tensor) -> None:
    """Raise ``ValueError`` unless ``desirable`` is bool with one entry for each response."""
    if desirable.shape != sequence_log_probs.shape or desirable.dtype is not torch.bool:
        raise ValueError(
            f"desirable has shape {tuple(desirable.shape)} and dtype {desirable.dtype}, "
            f"expected bool {tuple(sequence_log_probs.shape)}: one entry for each response"
        )


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise ``ValueError`` unless the share of wrong labels is in [0, ½)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}, expected in [0, 0.5): at 0.5 labels have no information")


def log_ratios(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    **strength: float,
) -> tuple[Tensor, Tensor]:
    """c and r: log π / π_ref of the chosen and of the rejected responses. The shapes and the strength are checked."""
    policy = {"chosen_log_probs": chosen_log_probs, "rejected_log_probs": rejected_log_probs}
    check_responses(**policy, ref_chosen_log_probs=ref_chosen_log_probs, ref_rejected_log_probs=ref_rejected_log_probs)
    check_above(0, inf=False, **strength)
    return _log_ratio(chosen_log_probs, ref_chosen_log_probs), _log_ratio(rejected_log_probs, ref_rejected_log_probs)


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log π / π_ref of each response; only ``log_probs`` gets a gradient. DPO's implicit reward is β times this."""
    return upcast(log_probs) - upcast(ref_log_probs).detach()
