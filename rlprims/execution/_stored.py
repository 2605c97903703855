"""What a loss on stored rows is on, and what it reads: its signature says so.

Of ``log_probs`` it is on demonstrations; of ``chosen_log_probs`` on pairs that a policy gives log-probs to; of
``chosen_scores`` on pairs that a reward model gives scores to.
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
    """What a loss is on, by its signature.

    Raises:
        ValueError: stored rows do not have what it asks for.

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
    """Whether a loss on pairs asks for the reference's log-probs."""
    return "ref_chosen_log_probs" in loss.needs


def reads_means(loss: Use) -> bool:
    """Whether a loss on pairs asks for each response's mean log-prob over its tokens, and not for the sum."""
    return loss.fn in (losses.orpo, losses.simpo)
