"""rlprims inside verl, and batches between the two. Nothing here imports verl before a function is called.

``install()`` registers the estimators, policy losses and a reward manager with verl, as ``rlprims/<name>``;
``to_verl`` and ``from_verl`` cross between the containers.
"""

from rlprims.interop.verl._data_proto import from_verl, to_verl
from rlprims.interop.verl._install import Installed, install
from rlprims.interop.verl._rewards import compute_score

__all__ = ["Installed", "compute_score", "from_verl", "install", "to_verl"]
