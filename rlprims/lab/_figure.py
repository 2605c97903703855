"""See :func:`figure`."""

import io
from typing import Any


def figure(width: float = 8.0, height: float = 3.4) -> Any:
    """An empty matplotlib Figure of so many inches that any notebook shows as the value of a cell.

    A bare ``matplotlib.figure.Figure`` is shown only where ``%matplotlib inline`` or pyplot was loaded before; else the
    notebook has its text. This one says itself what it looks like. Needs the extra ``lab``.

    >>> picture = figure(4, 3)
    >>> axis = picture.subplots()
    >>> picture._repr_png_()[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", dpi=90, metadata={"Software": None})
            return png.getvalue()

    return Picture(figsize=(width, height), layout="constrained", facecolor="white")
