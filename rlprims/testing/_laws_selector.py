"""A selector answers for tokens: yes or no, each."""

import torch

from rlprims.testing._cases import make_batches
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2)


def every_token_gets_an_answer(p: Primitive) -> None:
    """A bool per token, padded and packed."""
    for either in make_batches(SEEDS):
        for batch in (either, either.pack()):
            chosen = p.run(batch, p.required).value
            assert chosen.dtype is torch.bool, f"the answer has dtype {chosen.dtype}, needs torch.bool"
            shape = tuple(chosen.shape), tuple(batch.mask.shape)
            assert shape[0] == shape[1], f"the answer has shape {shape[0]}, needs {shape[1]}: one per token"
