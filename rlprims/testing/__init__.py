"""The laws that every primitive of this library keeps, as a suite that yours can run.

A primitive is called by the names of its parameters, so a function with the vocabulary's names needs no adapter::

    from rlprims.testing import check_loss

    def test_my_loss():
        check_loss(my_loss, alternatives={"clip": 0.1})

The batches are awkward and the same every time: ragged rows, tool tokens inside, a row without tokens, a group of one;
padded on either side, and packed; of two sizes, (8, 6) and (64, 128). The laws are those of the primitive's kind, and
that every transform of torch applies: ``grad``, ``jvp`` and ``vmap`` of torch.func, second derivatives, one compiled
graph for all batch sizes, ``torch.export``, FakeTensors, subclasses and DTensors. One that takes ``vocab``,
``all_reduce_rows``, ``shard`` or ``all_reduce`` gives on several ranks what it gives on one. ``effort="quick"``
leaves out the compiler and FakeTensors, ``effort="thorough"`` adds what takes long.
"""

from rlprims.testing._checks import (
    check_advantage,
    check_aggregation,
    check_filter,
    check_logits,
    check_loss,
    check_reward,
    check_selector,
    check_transforms,
    check_weights,
)
from rlprims.testing._ranks import Rank, on_ranks

__all__ = [
    "Rank",
    "check_advantage",
    "check_aggregation",
    "check_filter",
    "check_logits",
    "check_loss",
    "check_reward",
    "check_selector",
    "check_transforms",
    "check_weights",
    "on_ranks",
]
