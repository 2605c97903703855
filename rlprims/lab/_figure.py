"""A matplotlib figure that every notebook shows."""

import io
from typing import Any


def figure(width: float = 8.0, height: float = 3.4) -> Any:
    """An empty matplotlib Figure, in inches, that any notebook shows as the value of a cell.

    A notebook shows a plain ``matplotlib.figure.Figure`` only after ``%matplotlib inline`` or an import of pyplot;
    otherwise it prints text. This figure has its own PNG representation. Needs the extra ``lab``.

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
