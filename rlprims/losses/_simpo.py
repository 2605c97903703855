"""See :func:`simpo`."""

from torch.nn.functional import logsigmoid

from rlprims.losses._pairs import check_responses
from rlprims.masking import upcast
from rlprims.types import PerPair


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
        margin: at least 0, by how much the chosen response is to lead, after multiplication by β.

    Returns:
        float (P,), one loss for each pair: the paper takes the mean.

    Raises:
        ValueError: shapes or dtypes that do not fit; beta <= 0; margin < 0.

    >>> import torch
    >>> simpo(torch.tensor([-0.5]), torch.tensor([-1.0]))  # a lead of 1 after β, as wanted: log 2
    tensor([0.6931])
    """
    check_responses(chosen_log_probs=chosen_log_probs, rejected_log_probs=rejected_log_probs)
    if beta <= 0 or margin < 0:
        raise ValueError(f"beta={beta} must be above 0 and margin={margin} at least 0")
    return -logsigmoid(beta * (upcast(chosen_log_probs) - upcast(rejected_log_probs)) - margin)
