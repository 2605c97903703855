"""See :func:`orpo`."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlprims.losses._pairs import check_responses
from rlprims.masking import upcast
from rlprims.types import PerPair

_LEAST_REST = 1e-6
"""A response as likely as this short of certain has the odds of one that is this short of it."""


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
    if odds_coef <= 0:
        raise ValueError(f"odds_coef={odds_coef} must be above 0")
    chosen, rejected = upcast(chosen_log_probs), upcast(rejected_log_probs)
    return -chosen - odds_coef * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_prob: Tensor) -> Tensor:
    return log_prob - (-torch.expm1(log_prob)).clamp(min=_LEAST_REST).log()
