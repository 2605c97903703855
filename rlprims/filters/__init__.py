"""What to keep: one answer per row, and the accumulator that samples until a batch of kept groups is full."""

from rlprims.filters._dynamic_sampling import DynamicSampling, SamplingExhausted
from rlprims.filters._finite import finite
from rlprims.filters._nonzero_range import nonzero_range

__all__ = ["DynamicSampling", "SamplingExhausted", "finite", "nonzero_range"]
