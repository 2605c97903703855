"""Rows into batches that fit on a device, and into parts that take equally long.

Pure Python and numpy, on lists of lengths; every result is a list of row numbers for each part.
"""

from rlprims.batching._balance import attention_workload, balance
from rlprims.batching._micro_batches import micro_batches, pack, restore_order

__all__ = ["attention_workload", "balance", "micro_batches", "pack", "restore_order"]
