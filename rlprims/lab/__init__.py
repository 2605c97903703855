"""What a notebook shows: tables, pages of text, and figures. Pictures need the extra ``lab``.

Files of ``examples`` are built on it: they show the advantage, loss and gradient of each token.
"""

from rlprims.lab._display import Page, Table, figure

__all__ = ["Page", "Table", "figure"]
