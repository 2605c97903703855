"""What a search needs beside the batch, on 512 responses of up to 2,048 tokens."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.audit import CALLS, large, tensors
from rlprims import audit


@pytest.mark.slow
@pytest.mark.parametrize(("call", "left_out"), CALLS, ids=lambda x: x if isinstance(x, str) else "-".join(sorted(x)))
def test_tensors_are_smaller_than_the_batch(call: str, left_out: set[str]) -> None:
    run: Callable[[Any], Any] = getattr(audit, call)
    batch = {name: x for name, x in large().items() if name not in left_out}
    assert tensors(lambda: run(batch)) < sum(x.nbytes for x in batch.values()) / 2**20
