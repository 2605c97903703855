"""Rows into batches that a device can hold."""

from rlprims.batching._micro_batches import micro_batches

__all__ = ["micro_batches"]
