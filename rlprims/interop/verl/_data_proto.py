"""Between this library's DataProto and verl's, in both directions.

Both functions leave their argument as it is. What the result shares with it, and what it does not:

- tensors are shared, whatever their layout or device: nothing is copied or moved, gradients flow through, and a write
  into one is seen in the other;
- numpy arrays are copied, the objects in their cells are shared;
- ``meta_info`` is copied at every depth;
- the TensorDict around the tensors is new, so a field that is added to one does not appear in the other.

Parts that are absent stay absent, and zero rows stay zero rows. Jagged tensors go through, though many methods of
verl's container refuse them.
"""

from __future__ import annotations

import importlib
from typing import Any

from rlprims import data_proto
from rlprims.data_proto import BatchError
from rlprims.interop.verl._container import DataProto

_PARTS = ("batch", "non_tensor_batch", "meta_info")


def to_verl(data: data_proto.DataProto) -> Any:
    """The batch as a ``verl.DataProto`` over the same tensors. The first call imports verl, which brings Ray.

    Raises:
        BatchError: a write into the parts has broken the batch.
        ImportError: verl is not installed, or what it needs is not.
    """
    own = data.select()  # checked: a new TensorDict of the same tensors, own arrays and own metadata
    return _container()(batch=own.batch, non_tensor_batch=own.non_tensor_batch, meta_info=own.meta_info)


def from_verl(data: Any) -> DataProto:
    """A ``verl.DataProto``, or anything with its three parts, as a batch of this library that has
    all the methods of verl's. verl need not be installed.

    A part may be None. verl's flag for automatic padding is metadata like any other here: it stays, and pads nothing.

    Raises:
        BatchError: (a ValueError) no such object, or parts that verl lets through and this container does not: columns
            of different lengths, one name in two parts, a TensorDict with other than one batch dimension.
    """
    absent = [part for part in _PARTS if not hasattr(data, part)]
    if absent:
        raise BatchError(f"from_verl: {type(data).__name__} has no {', '.join(absent)}; it needs a verl.DataProto")
    return DataProto(data.batch, data.non_tensor_batch, data.meta_info).select()


def _container() -> Any:
    try:
        return importlib.import_module("verl.protocol").DataProto
    except ImportError as error:
        raise ImportError(f"to_verl needs verl ({error}): pip install verl") from error
