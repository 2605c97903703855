"""The laws that every primitive of this library satisfies, as a test suite that you can run on your own functions.

A primitive is called by the names of its parameters, so a function with the vocabulary's names needs no adapter::

    from rlprims.testing import check_loss

    def test_my_loss():
        check_loss(my_loss, alternatives={"clip": 0.1})

The batches are difficult on purpose and the same in every run: ragged rows, tool tokens inside, a row without tokens, a
group of one row; padded on either side, and packed; of two sizes, (8, 6) and (64, 128). Some laws are those of the
primitive's kind. Others test that every transform of torch works: ``grad``, ``jvp`` and ``vmap`` of torch.func, second
derivatives, one compiled graph for all batch sizes, ``torch.export``, FakeTensors, subclasses and DTensors. A function
with a parameter ``vocab``, ``all_reduce_rows``, ``shard`` or ``all_reduce`` must give the same result on several ranks
as on one. ``effort="quick"`` leaves out the compiler and FakeTensors, ``effort="thorough"`` adds the slow laws.
"""

from rlprims.testing._checks import (
    check, check_advantage, check_aggregation, check_filter, check_logits, check_loss, check_reward, check_selector,
    check_transforms, check_weights,
)  # fmt: skip
from rlprims.testing._ranks import Rank, on_ranks
from rlprims.testing._step import assert_step

__all__ = [
    "Rank", "assert_step", "check", "check_advantage", "check_aggregation", "check_filter", "check_logits",
    "check_loss", "check_reward", "check_selector", "check_transforms", "check_weights", "on_ranks",
]  # fmt: skip
