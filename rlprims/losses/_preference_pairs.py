"""More losses on pairs of a chosen and a rejected response, and the loss of a reward model.

c and r are the log-ratios log π/π_ref of the chosen and the rejected response, each the sum over its tokens. Δ = c − r,
and β is the strength of the KL to the reference. Each loss equals a loss of TRL 1.16 on one pair; its docstring has the
name. TRL's ``sigmoid_norm`` is :func:`dpo` on means over the tokens instead of sums.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from rlprims._described import described
from rlprims.losses._preference import check_label_smoothing, check_responses, log_ratios
from rlprims.masking import check_above, check_at_least, check_choice, check_finite, upcast
from rlprims.ratios import LOG_RATIO_LIMIT, log_sigmoid
from rlprims.types import PerPair

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]


@described
def hinge(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Hinge loss on normalized likelihoods, Liu et al. 2023 (RSO, arXiv:2309.06657), after SLiC: max(0, 1 − β Δ).

    A pair with β Δ > 1 has no gradient. TRL's ``hinge``.

    >>> z = torch.zeros(1)
    >>> hinge(z, z - 5.0, z, z, beta=0.1)  # Δ = 5
    tensor([0.5000])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return (1 - beta * (c - r)).clamp(min=0)


@described
def robust_dpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PerPair:
    """DPO that is unbiased if a share ε of the labels is flipped, Chowdhury et al. 2024 (arXiv:2403.00409).

    [−(1 − ε) log σ(β Δ) + ε log σ(−β Δ)] / (1 − 2ε), where ε is ``label_smoothing`` in [0, ½). If labels are flipped
    with probability ε, its expectation is DPO's loss with the true labels. :func:`dpo` with the same ε has the opposite
    sign in the second term; it is biased, but bounded below, and this loss may be negative. TRL's ``robust``.

    >>> z = torch.zeros(1)
    >>> robust_dpo(z, z, z, z)  # (0.9 − 0.1) log 2 / 0.8
    tensor([0.6931])
    """
    check_label_smoothing(label_smoothing)
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    margins = beta * (c - r)
    as_labelled = (1 - label_smoothing) * log_sigmoid(margins)
    flipped = label_smoothing * log_sigmoid(-margins)
    return -(as_labelled - flipped) / (1 - 2 * label_smoothing)


@described
def exo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> PerPair:
    """Exact optimization of a pair, Ji et al. 2024 (arXiv:2402.00856), eq. 16: the reverse KL to the labels.

    KL(p ‖ q) with p = (σ(β Δ), σ(−β Δ)) and q = (1 − ε, ε). ε is ``label_smoothing``, above 0 and below 1; the paper
    advises 1e-3. TRL's ``exo_pair``.

    >>> z = torch.zeros(1)
    >>> exo(z, z, z, z, label_smoothing=0.5)
    tensor([0.])
    """
    if not 0 < label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}, expected a number in (0, 1): its logarithm is taken")
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    margins = beta * (c - r)
    chosen = margins.sigmoid() * (log_sigmoid(margins) - math.log1p(-label_smoothing))
    rejected = (-margins).sigmoid() * (log_sigmoid(-margins) - math.log(label_smoothing))
    return chosen + rejected


@described
def nca(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Noise contrastive alignment of a pair, Chen et al. 2024 (arXiv:2402.05369).

    −log σ(β c) − ½ log σ(−β c) − ½ log σ(−β r). Unlike DPO, which depends on the margin only, it also keeps the
    probability of the chosen response from falling. TRL's ``nca_pair``.

    >>> z = torch.zeros(1)
    >>> nca(z, z, z, z)  # 2 log 2
    tensor([1.3863])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return -log_sigmoid(beta * c) - 0.5 * log_sigmoid(-beta * c) - 0.5 * log_sigmoid(-beta * r)


@described
def bco(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    reward_shift: PerPair | None = None,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Binary classifier optimization, Jung et al. 2024 (arXiv:2404.04656): −log σ(β c − δ) − log σ(δ − β r).

    δ, ``reward_shift`` (None: 0, as TRL's ``bco_pair``), is the moving average of the implicit rewards β c and β r; for
    one δ use ``delta.expand(P)``. The loss is then a tight upper bound of DPO's.

    >>> z = torch.zeros(1)
    >>> bco(z, z, z, z)  # 2 log 2
    tensor([1.3863])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    if reward_shift is None:
        return -log_sigmoid(beta * c) - log_sigmoid(-beta * r)
    check_responses(chosen_log_probs=chosen_log_probs, reward_shift=reward_shift)
    delta = upcast(reward_shift).detach()
    return -log_sigmoid(beta * c - delta) - log_sigmoid(delta - beta * r)


@described
def sppo_hard(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Self-play preference optimization with labels 1 and 0, Wu et al. 2024 (arXiv:2405.00675), algorithm 1, eq. 4.7.

    (c − 1/(2β))² + (r + 1/(2β))²: each log-ratio has its own target. In the paper a preference model gives the
    probability that a response wins; here the chosen response wins with probability 1. TRL's ``sppo_hard``.

    >>> z = torch.zeros(1)
    >>> sppo_hard(z + 5.0, z - 4.0, z, z, beta=0.1)  # the targets are 5 and −5
    tensor([1.])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()


@described
def apo_zero(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Anchored preference optimization, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 7: 1 − σ(β c) + σ(β r).

    For chosen responses better than the policy's: they become more likely, rejected ones less. TRL's ``apo_zero``.

    >>> z = torch.zeros(1)
    >>> apo_zero(z, z, z, z)
    tensor([1.])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return (-beta * c).sigmoid() + (beta * r).sigmoid()  # 1 − σ(x) = σ(−x)


@described
def apo_down(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
) -> PerPair:
    """Anchored preference optimization, D'Oosterlinck et al. 2024 (arXiv:2408.06266), eq. 8: σ(β c) + 1 − σ(β Δ).

    For chosen responses worse than the policy's: both become less likely, rejected ones more so. TRL's ``apo_down``.

    >>> z = torch.zeros(1)
    >>> apo_down(z, z, z, z)
    tensor([1.])
    """
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return (beta * c).sigmoid() + (-beta * (c - r)).sigmoid()


@described
def discopop(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
) -> PerPair:
    """Log-ratio modulated loss, Lu et al. 2024 (DiscoPOP, arXiv:2406.08414), eq. 5, which a language model found.

    (1 − s) (−log σ(β Δ)) + s exp(−β Δ) with s = σ(β Δ / τ), τ = ``tau`` > 0: a logistic loss for pairs in the wrong
    order, and an exponential loss for the others. It is not convex: slightly below Δ = 0 the gradient makes Δ more
    negative. The exponent is clamped to ±20. TRL's ``discopop``.

    >>> z = torch.zeros(1)
    >>> discopop(z, z, z, z)  # ½ log 2 + ½
    tensor([0.8466])
    """
    check_above(0, tau=tau)
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    margins = beta * (c - r)
    modulation = (margins / tau).sigmoid()
    exponential = (-margins).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (1 - modulation) * -log_sigmoid(margins) + modulation * exponential


@described
def f_dpo(
    chosen_log_probs: PerPair,
    rejected_log_probs: PerPair,
    ref_chosen_log_probs: PerPair,
    ref_rejected_log_probs: PerPair,
    *,
    beta: float = 0.1,
    divergence: Divergence = "forward_kl",
    alpha: float = 0.5,
) -> PerPair:
    """DPO with another divergence to the reference, Wang et al. 2023 (f-DPO, arXiv:2309.16240).

    −log σ(β (f'(e^c) − f'(e^r))), where f'(t) is log t for ``reverse_kl`` (:func:`dpo`), 1 − 1/t for ``forward_kl``,
    log(2t / (1 + t)) for ``js``, and (t^(α−1) − 1) / (α − 1) for ``alpha`` with any α except 1, up to a constant that
    cancels. The limit α → 1 is log t, and α = 0 is 1 − 1/t. Exponents are clamped to ±20. TRL's ``f_divergence_type``.

    >>> z = torch.zeros(1)
    >>> f_dpo(z + 1.0, z, z, z, beta=1.0)  # −log σ(1 − 1/e)
    tensor([0.4262])
    """
    check_choice("divergence", divergence, Divergence)
    check_finite(alpha=alpha)
    if alpha == 1:
        raise ValueError('alpha=1, expected another number; use divergence="reverse_kl", which is the limit')
    c, r = log_ratios(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs, beta=beta)
    return -log_sigmoid(beta * (_f_prime(c, divergence, alpha) - _f_prime(r, divergence, alpha)))


def _f_prime(log_ratios: Tensor, divergence: Divergence, alpha: float) -> Tensor:
    """f'(t) at t = π/π_ref, from log t."""
    if divergence == "reverse_kl":
        return log_ratios
    if divergence == "js":
        return math.log(2) + log_sigmoid(log_ratios)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    return torch.expm1((power * log_ratios).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) / power


@described
def bradley_terry(
    chosen_scores: PerPair, rejected_scores: PerPair, score_margins: PerPair | None = None, *, centering: float = 0.0
) -> PerPair:
    """The loss of a reward model: −log σ(s_c − s_r − m) + κ (s_c + s_r)², Ouyang et al. 2022 (arXiv:2203.02155), eq. 1.

    s_c and s_r are ``chosen_scores`` and ``rejected_scores``, which get gradients. m, ``score_margins`` (None: 0), from
    Llama 2 (arXiv:2307.09288, eq. 2), is a larger margin for pairs with a clearer preference. The second term, with κ =
    ``centering`` of at least 0, keeps the scores around 0, because the first depends on differences only (Eisenstein et
    al. 2023, arXiv:2312.09244). TRL's ``RewardTrainer``.

    >>> bradley_terry(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0]), centering=0.1)  # log 2 + 0.9
    tensor([1.5931])
    """
    check_responses(chosen_scores=chosen_scores, rejected_scores=rejected_scores)
    check_at_least(0, centering=centering)
    chosen, rejected = upcast(chosen_scores), upcast(rejected_scores)
    gaps = chosen - rejected
    if score_margins is not None:
        check_responses(chosen_scores=chosen_scores, score_margins=score_margins)
        gaps = gaps - upcast(score_margins).detach()
    return -log_sigmoid(gaps) + centering * (chosen + rejected).square()
