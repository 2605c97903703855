"""What a notebook shows: tables and figures. Pictures need the extra ``lab``.

Files of ``examples`` are built on it: they show the advantage, loss and gradient of each token.
"""

from rlprims.lab._display import Table, figure

__all__ = ["Table", "figure"]
