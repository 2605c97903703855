"""The batch of a post-training step: tensors, Python objects and metadata in one container.

>>> import torch
>>> data = DataProto.from_dict({"ids": torch.arange(4)}, {"uid": ["a", "a", "b", "b"]}, {"step": 7})
>>> first, second = data.chunk(2)
>>> DataProto.concat([second, first])["uid"].tolist()
['b', 'b', 'a', 'a']
"""

from rlprims.data_proto._columns import BatchError, MissingField, RowIndexError
from rlprims.data_proto._container import DataProto
from rlprims.data_proto._rows import DataProtoItem

__all__ = ["BatchError", "DataProto", "DataProtoItem", "MissingField", "RowIndexError"]
