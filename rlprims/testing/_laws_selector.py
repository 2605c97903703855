"""The law of selectors: one bool for each token."""

import torch

from rlprims.testing._cases import make_batches
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2)


def every_token_gets_an_answer(p: Primitive) -> None:
    """The result has a bool per token, padded and packed."""
    for either in make_batches(SEEDS):
        for batch in (either, either.pack()):
            selected = p.run(batch, p.required).value
            assert selected.dtype is torch.bool, f"the result has dtype {selected.dtype}, expected torch.bool"
            shape = tuple(selected.shape), tuple(batch.mask.shape)
            assert shape[0] == shape[1], f"the result has shape {shape[0]}, expected {shape[1]}: one per token"
