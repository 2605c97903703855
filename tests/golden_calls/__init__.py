"""Which call of ours each recorded case is. A call takes the case and answers by the names of the peer's outputs."""

from tests.golden_calls import advantages, aggregation, batches, corrections, losses, returns, rewards
from tests.golden_cases import Calls

CALLS: Calls = {
    **aggregation.CALLS,
    **advantages.CALLS,
    **returns.CALLS,
    **losses.CALLS,
    **corrections.CALLS,
    **rewards.CALLS,
    **batches.CALLS,
}
