"""The estimators and losses of rlprims in verl, and conversion of batches. verl is imported when a function is called.

``install()`` registers the estimators, policy losses and a reward manager with verl, as ``rlprims/<name>``. ``to_verl``
and ``from_verl`` convert between the containers. ``DataProto`` is that of rlprims with all methods of verl's.
"""

from rlprims.data_proto._rows import pad_to_divisor as pad_dataproto_to_divisor
from rlprims.data_proto._rows import unpad as unpad_dataproto
from rlprims.interop.verl._container import DataProto, fold_batch_dim, unfold_batch_dim
from rlprims.interop.verl._data_proto import from_verl, to_verl
from rlprims.interop.verl._install import Installed, install
from rlprims.interop.verl._rewards import compute_score

__all__ = [
    "DataProto", "Installed", "compute_score", "fold_batch_dim", "from_verl", "install", "pad_dataproto_to_divisor",
    "to_verl", "unfold_batch_dim", "unpad_dataproto",
]  # fmt: skip
