"""The reverse scan on a CPU (temporary: the formula)."""

from torch import Tensor


def reverse_scan(a: Tensor, b: Tensor) -> Tensor:
    from rlprims import scan

    return scan.reverse_scan.formula(a, b)
