"""Tables for notebooks. Files of ``examples`` show the advantage, loss and gradient of each token with them."""

from rlprims.lab._display import Table

__all__ = ["Table"]
