"""Rows into batches that a device can hold, and into parts that take equally long.

Pure Python and numpy, on lists of lengths; every answer is a list of row numbers for each part.
"""

from rlprims.batching._attention_workload import attention_workload
from rlprims.batching._balance import balance
from rlprims.batching._micro_batches import micro_batches
from rlprims.batching._pack import pack
from rlprims.batching._restore_order import restore_order

__all__ = ["attention_workload", "balance", "micro_batches", "pack", "restore_order"]
