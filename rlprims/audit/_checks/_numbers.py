"""N: numbers that no formula gives, and denominators."""

import torch

from rlprims.audit._checks._step import Step, finding
from rlprims.audit._finding import Finding

_OWN = {"attention_mask", "prompts", "responses", "input_ids", "kept_ids"}


def not_finite(step: Step) -> Finding | None:
    """A number that is learned from is NaN or infinite: in the mask, or in a row's own column.

    One such number makes the step's loss NaN. Usual cause: a log of 0, a reward that failed, an exp before its mask.
    """
    for name, x in step.data.items():
        if name in _OWN or not x.is_floating_point() or x.shape not in (step.mask.shape, step.mask.shape[:1]):
            continue
        where = ~x.isfinite() & (step.mask if x.dim() == 2 else True)
        if where.any():
            said = f"{name} has {int(where.sum())} numbers that are not finite, first {float(x[where][0])}"
            rows = torch.atleast_2d(where.T).T.any(1)
            cost = f"{float(rows.double().mean()):.1%} of the rows have one; the step's loss is NaN"
            return finding(where, said, cost, f"find the stage that makes {name}; drop these rows until then")
    return None
