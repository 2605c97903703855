"""Division of rows into micro-batches that fit on a device, and into parts of equal work.

The functions are plain Python and numpy on lists of lengths, and return a list of row numbers for each part. Only
:func:`prefix_tree` takes the tokens: it merges rows with common prefixes into a tree that has each shared token once.
"""

from rlprims.batching._balance import attention_workload, balance
from rlprims.batching._micro_batches import micro_batches, pack, restore_order
from rlprims.batching._prefix_tree import PrefixTree, prefix_tree

__all__ = ["PrefixTree", "attention_workload", "balance", "micro_batches", "pack", "prefix_tree", "restore_order"]
