"""M: which tokens are learned."""

from rlprims.audit._checks._step import Step, finding
from rlprims.audit._finding import Finding


def padding(step: Step) -> Finding | None:
    """Padding is in the mask: tokens of response_mask with attention_mask 0.

    The policy learns to write padding after its end, and padding is in every mean. Usual cause: a mask from the ids
    (``ids != pad``) where the padding token is another one, or a mask made before padding was added.
    Needs attention_mask.
    """
    where = step.mask & ~step.attended
    if not where.any():
        return None
    said = f"{int(where.sum())} padding tokens are in response_mask"
    return finding(where, said, step.share(where) + " is on padding", "response_mask = response_mask & attention_mask")
