"""Conversion between this library's DataProto and verl's.

Both functions do not change their argument. What the result shares with it:

- tensors are shared, of any layout and device: nothing is copied or moved, gradients flow through, and a write into
  one appears in the other;
- numpy arrays are copied; the objects in their cells are shared;
- ``meta_info`` is copied at every depth;
- the TensorDict around the tensors is new, so a field that is added to one does not appear in the other.

A part that is None stays None. Jagged tensors are converted too, although many methods of verl's container refuse them.
"""

from __future__ import annotations

from typing import Any

from rlprims import data_proto
from rlprims._extras import package
from rlprims.data_proto import BatchError
from rlprims.interop.verl._container import DataProto

_PARTS = ("batch", "non_tensor_batch", "meta_info")


def to_verl(data: data_proto.DataProto) -> Any:
    """The batch as a ``verl.DataProto`` with the same tensors. The first call imports verl, which imports Ray.

    Raises:
        BatchError: a write into the parts has made the batch inconsistent.
        ImportError: verl, or a package that it needs, is not installed.
    """
    own = data.select()  # checks the batch; a new TensorDict of the same tensors, copied arrays and metadata
    container = package("verl.protocol", "verl", "to_verl").DataProto
    return container(batch=own.batch, non_tensor_batch=own.non_tensor_batch, meta_info=own.meta_info)


def from_verl(data: Any) -> DataProto:
    """A batch of this library, with verl's further methods, from a ``verl.DataProto`` or any object with its parts.

    verl need not be installed. A part may be None. verl's flag for automatic padding stays in meta_info, unused.

    Raises:
        BatchError: (a ValueError) an object without the three parts, or parts that verl allows and this library does
            not: columns of different lengths, one name in two parts, not exactly one batch dimension.
    """
    absent = [part for part in _PARTS if not hasattr(data, part)]
    if absent:
        raise BatchError(f"from_verl: {type(data).__name__} has no {', '.join(absent)}; expected a verl.DataProto")
    return DataProto(data.batch, data.non_tensor_batch, data.meta_info).select()
