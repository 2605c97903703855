"""Losses on preferences: pairs of a chosen and a rejected response, or single responses, good or bad.

All read one log-prob for each response, which ``layout.sequence_sum`` makes of the per-token ones, padded or packed;
:func:`orpo` and :func:`simpo` ask for the mean over the tokens. They return one loss for each pair or response.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlprims.masking import upcast
from rlprims.types import PerPair, PerSequence, RowMask

_MIN_REST = 1e-6
"""In the odds p / (1 − p) of a response, 1 − p counts as at least this."""


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

    Preference losses read one log-prob for each response: take ``layout.sequence_sum`` of the per-token ones, padded or
    packed. Sums are the paper's; divided by ``layout.sequence_lengths``, β is per token.

    Args:
        chosen_log_probs, rejected_log_probs: float (P,), current policy; the only gradients.
        ref_chosen_log_probs, ref_rejected_log_probs: float (P,), frozen reference.
        beta: above 0; the strength of the KL to the reference.
        label_smoothing: at least 0, below ½.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0; label_smoothing outside [0, ½).

    >>> z = torch.zeros(1)
    >>> dpo(z, z, z, z)  # log 2: the policy is still the reference
    tensor([0.6931])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    check_positive("beta", beta)
    check_label_smoothing(label_smoothing)

    margins = c - r
    return -(1 - label_smoothing) * logsigmoid(beta * margins) - label_smoothing * logsigmoid(-beta * margins)


def ipo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    tau: float = 0.1,
) -> PerPair:
    """Identity preference optimization, Azar et al. 2023 (arXiv:2310.12036), eq. 17.

    With Δ = log π/π_ref of the chosen response less that of the rejected one: loss = (Δ − 1/(2τ))². It is least at a
    finite margin, so the policy cannot move away from the reference without bound; DPO's on certain labels has no such
    margin.

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

    >>> z = torch.zeros(1)
    >>> ipo(z, z - 3.0, z, z, tau=0.25)  # Δ = 3, wanted: 2
    tensor([1.])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    check_positive("tau", tau)

    margins = c - r
    return (margins - 1 / (2 * tau)).square()


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

    z estimates KL(π ‖ π_ref), a constant for the gradient: in the paper the mean of r over responses paired with
    prompts that are not theirs, at least 0. It is an input here, because that mean is over the whole step and every
    rank; one number for all is ``z.expand(B)``, and zeros are KTO without a baseline, TRL's apo_zero_unpaired.

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
    _check_desirable(desirable, sequence_log_probs)
    if beta <= 0 or desirable_weight < 0 or undesirable_weight < 0:
        raise ValueError(
            f"beta={beta}, desirable_weight={desirable_weight} and undesirable_weight={undesirable_weight}, "
            "expected beta above 0 and weights of at least 0"
        )

    rewards = _log_ratio(sequence_log_probs, ref_sequence_log_probs) - upcast(baseline_kl).detach()  # r − z
    desirable_loss = desirable_weight * torch.sigmoid(-beta * rewards)  # 1 − σ(x) = σ(−x)
    undesirable_loss = undesirable_weight * torch.sigmoid(beta * rewards)
    return torch.where(desirable, desirable_loss, undesirable_loss)


def implicit_reward(
    sequence_log_probs: PerSequence,
    ref_sequence_log_probs: PerSequence,
    desirable: RowMask,
    *,
    beta: float = 0.05,
) -> PerSequence:
    """Cross-entropy of an implicit reward model, Yuan et al. 2024 (arXiv:2412.01981): right or wrong from log-ratios.

    r = β (log π − log π_ref) of the whole response: −log σ(r) for right and −log σ(−r) for wrong ones. Trained so, what
    a single token adds to r is its process reward (:func:`rlprims.rewards.implicit_process`), which is what PRIME
    (arXiv:2502.01456) uses it for.

    Args:
        sequence_log_probs: float (B,), sums over each response's tokens (``layout.sequence_sum``) under the model that
            is trained; the only gradients.
        ref_sequence_log_probs: float (B,), the same under the frozen reference.
        desirable: bool (B,), right responses.
        beta: β > 0.

    Returns:
        float (B,), one loss for each response: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0.

    >>> implicit_reward(torch.tensor([20.0, 20.0]), torch.zeros(2), torch.tensor([True, False]))  # r is 1
    tensor([0.3133, 1.3133])
    """
    check_responses(sequence_log_probs=sequence_log_probs, ref_sequence_log_probs=ref_sequence_log_probs)
    _check_desirable(desirable, sequence_log_probs)
    check_positive("beta", beta)
    rewards = beta * _log_ratio(sequence_log_probs, ref_sequence_log_probs)
    return -logsigmoid(torch.where(desirable, rewards, -rewards))


def orpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    *,
    odds_coef: float = 0.1,
) -> PerPair:
    """Odds ratio preference optimization, Hong et al. 2024 (arXiv:2403.07691), eq. 6 and 7: fine-tuning and preference.

    With ℓ each response's log-prob divided by its length and the log-odds o = ℓ − log(1 − exp ℓ):
    loss = −ℓ_chosen − λ log σ(o_chosen − o_rejected), λ being ``odds_coef``. No reference.

    The first term is the paper's, per response; TRL instead takes the token mean of the batch (and calls λ beta). The
    odds term alone is the difference of this and of :func:`nll`.

    Args:
        chosen_log_probs, rejected_log_probs: float (P,), means over each response's tokens under the current policy
            (``layout.sequence_sum`` / ``layout.sequence_lengths``), at most 0; the only gradients.
        odds_coef: λ > 0.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; odds_coef <= 0.

    >>> half = torch.tensor([0.5]).log()
    >>> orpo(half, half, odds_coef=1.0)  # log 2 twice
    tensor([1.3863])
    """
    check_responses(chosen_log_probs=chosen_log_probs, rejected_log_probs=rejected_log_probs)
    check_positive("odds_coef", odds_coef)

    log_odds_ratio = _log_odds(upcast(chosen_log_probs)) - _log_odds(upcast(rejected_log_probs))
    return -upcast(chosen_log_probs) - odds_coef * logsigmoid(log_odds_ratio)


def _log_odds(log_probs: Tensor) -> Tensor:
    """log p − log(1 − p)."""
    return log_probs - (-torch.expm1(log_probs)).clamp(min=_MIN_REST).log()


def simpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    *,
    beta: float = 2.0,
    margin: float = 1.0,
) -> PerPair:
    """Simple preference optimization, Meng et al. 2024 (arXiv:2405.14734), eq. 6: no reference, means over tokens.

    With each response's log-prob divided by its length: loss = −log σ(β (chosen − rejected) − γ), γ being ``margin``.
    The paper tunes β from 2 to 2.5 and γ from 0.3 to 1.6; its code asks for γ/β, and TRL starts from γ = 0.5.

    Args:
        chosen_log_probs, rejected_log_probs: float (P,), means over each response's tokens under the current policy
            (``layout.sequence_sum`` / ``layout.sequence_lengths``); the only gradients.
        beta: above 0.
        margin: at least 0, the target difference of chosen and rejected, after multiplication by β.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0; margin < 0.

    >>> simpo(torch.tensor([-0.5]), torch.tensor([-1.0]))  # β times the difference is 1, as wanted: log 2
    tensor([0.6931])
    """
    check_responses(chosen_log_probs=chosen_log_probs, rejected_log_probs=rejected_log_probs)
    if beta <= 0 or margin < 0:
        raise ValueError(f"beta={beta} and margin={margin}, expected beta above 0 and margin at least 0")
    return -logsigmoid(beta * (upcast(chosen_log_probs) - upcast(rejected_log_probs)) - margin)


def check_responses(**log_probs: Tensor) -> None:
    """Raise ``ValueError`` unless all are floats (P,), of one length."""
    first = next(iter(log_probs.values()))
    for name, x in log_probs.items():
        if x.dim() != 1 or not x.is_floating_point() or x.shape != first.shape:
            shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in log_probs.items())
            raise ValueError(
                f"expected floats (P,) of one length, one number for each response; "
                f"got {shapes}, and {name} has dtype {x.dtype}"
            )


def _check_desirable(desirable: Tensor, sequence_log_probs: Tensor) -> None:
    """Raise ``ValueError`` unless it is bool, one entry for each response."""
    if desirable.shape != sequence_log_probs.shape or desirable.dtype is not torch.bool:
        raise ValueError(
            f"desirable has shape {tuple(desirable.shape)} and dtype {desirable.dtype}, "
            f"expected bool {tuple(sequence_log_probs.shape)}: one entry for each response"
        )


def check_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` unless it is above 0."""
    if value <= 0:
        raise ValueError(f"{name}={value}, expected a number above 0")


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise ``ValueError`` unless it is a share of wrong labels that leaves the others a majority."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}, expected a number in [0, 0.5): at 0.5 labels say nothing")


def log_ratios(
    chosen_log_probs: Tensor, rejected_log_probs: Tensor, ref_chosen_log_probs: Tensor, ref_rejected_log_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """c and r: log π / π_ref of the chosen and of the rejected responses, checked."""
    check_responses(
        chosen_log_probs=chosen_log_probs,
        rejected_log_probs=rejected_log_probs,
        ref_chosen_log_probs=ref_chosen_log_probs,
        ref_rejected_log_probs=ref_rejected_log_probs,
    )
    return _log_ratio(chosen_log_probs, ref_chosen_log_probs), _log_ratio(rejected_log_probs, ref_rejected_log_probs)


def _log_ratio(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log π / π_ref of each response, with a gradient to the first only: DPO's implicit reward over β."""
    return upcast(log_probs) - upcast(ref_log_probs).detach()
