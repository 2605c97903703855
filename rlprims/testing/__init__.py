"""The laws that every primitive of this library keeps, as a suite that yours can run.

A primitive is called by the names of its parameters, so a function with the vocabulary's names needs no adapter::

    from rlprims.testing import check_loss

    def test_my_loss():
        check_loss(my_loss, alternatives={"clip": 0.1})

The batches are small, awkward and the same every time: ragged rows, tool tokens inside, a row without tokens, a group
of one; padded on either side, and packed.
"""

from rlprims.testing._checks import (
    check_advantage,
    check_aggregation,
    check_filter,
    check_logits,
    check_loss,
    check_reward,
    check_selector,
    check_weights,
)

__all__ = [
    "check_advantage",
    "check_aggregation",
    "check_filter",
    "check_logits",
    "check_loss",
    "check_reward",
    "check_selector",
    "check_weights",
]
