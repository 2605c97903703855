"""Rows into batches that fit on a device, and into parts that take equally long.

Pure Python and numpy, on lists of lengths; every result is a list of row numbers for each part. :func:`prefix_tree` is
of the rows themselves: those that begin alike become a tree, in which a shared token is once.
"""

from rlprims.batching._balance import attention_workload, balance
from rlprims.batching._micro_batches import micro_batches, pack, restore_order
from rlprims.batching._prefix_tree import PrefixTree, prefix_tree

__all__ = ["PrefixTree", "attention_workload", "balance", "micro_batches", "pack", "prefix_tree", "restore_order"]
