"""The kind of stored rows that a loss needs, from its signature.

A loss of ``log_probs`` is on demonstrations, one of ``chosen_log_probs`` on pairs for a policy, and one of
``chosen_scores`` on pairs for a reward model.
"""

from typing import Literal, TypeAlias

from rlprims import losses
from rlprims.algorithms import Use

Kind: TypeAlias = Literal["demonstrations", "pairs", "scores"]

_READS: dict[Kind, set[str]] = {
    "demonstrations": {"log_probs", "response_mask"},
    "pairs": {"chosen_log_probs", "rejected_log_probs", "ref_chosen_log_probs", "ref_rejected_log_probs"},
    "scores": {"chosen_scores", "rejected_scores"},
}


def kind_of(loss: Use) -> Kind:
    """The kind of rows that a loss needs.

    Raises:
        ValueError: the loss has a parameter that no kind of stored rows has.

    >>> from rlprims import losses
    >>> from rlprims.algorithms import use
    >>> [kind_of(use(loss)) for loss in (losses.nll, losses.dpo, losses.bradley_terry)]
    ['demonstrations', 'pairs', 'scores']
    """
    for kind, names in _READS.items():
        if loss.needs <= names:
            return kind
    raise ValueError(
        f"{loss.path} needs {sorted(loss.needs)}: expected a loss of log_probs and response_mask, as losses.nll; of "
        "chosen_log_probs and rejected_log_probs, as losses.dpo; or of chosen_scores and rejected_scores, as "
        "losses.bradley_terry"
    )


def reads_reference(loss: Use) -> bool:
    """Whether a loss on pairs reads the reference's log-probs."""
    return "ref_chosen_log_probs" in loss.needs


def reads_means(loss: Use) -> bool:
    """Whether a loss on pairs is defined on the mean log-prob of each response, and not on the sum."""
    return loss.fn in (losses.orpo, losses.simpo)
