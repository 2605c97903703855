"""A policy loss drawn over the ratio, for a positive and a negative advantage.

In a notebook, with this file beside it; the picture needs matplotlib (``rlprims[lab]``):

>>> from rlprims import algorithms
>>> picture = surrogate(algorithms.dapo()).draw()
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlprims.algorithms import Algorithm, BoundFunction, use

_COLOURS = {1: "#00803c", -1: "#c8322d"}  # one line is also dashed, for colour-blind readers


@dataclass(frozen=True, repr=False)
class Surrogate:
    """A loss as a function of the ratio, for A = 1 and A = −1.

    Attributes:
        name: the name of the loss, with its hyperparameters.
        ratio: (K,).
        loss: sign of A to (K,).
        coefficient: sign of A to (K,): −∂loss/∂log π / A. 1 is REINFORCE's gradient, 0 is no gradient.
    """

    name: str
    ratio: Tensor
    loss: dict[int, Tensor]
    coefficient: dict[int, Tensor]

    def columns(self) -> dict[str, list[float]]:
        """The numbers by name, as ``pandas.DataFrame`` takes them."""
        columns = {"ratio": self.ratio.tolist()}
        for what, values in (("loss", self.loss), ("coefficient", self.coefficient)):
            columns |= {f"{what} A={sign:+d}": column.tolist() for sign, column in values.items()}
        return columns

    def draw(self) -> Any:
        """A matplotlib Figure, as :func:`picture` makes it: the loss and the coefficient over the ratio."""
        drawn = picture(9, 3.4)
        axes = drawn.subplots(1, 2)
        drawn.suptitle(self.name, fontsize=11)
        shown = ((self.loss, "loss"), (self.coefficient, "coefficient  −∂loss/∂log π / A"))
        for axis, (what, label) in zip(axes, shown, strict=True):
            for sign, values in what.items():
                style = {"color": _COLOURS[sign], "linestyle": "-" if sign > 0 else "--", "linewidth": 2}
                axis.plot(self.ratio, values, label=f"A = {sign:+d}".replace("-", "−"), **style)
            axis.axvline(1.0, color="#888888", linewidth=0.8, linestyle=":")
            axis.axhline(0.0, color="#888888", linewidth=0.8)
            axis.set(xlabel="ratio  π / π_old", ylabel=label, facecolor="white")
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False)
        return drawn

    def __repr__(self) -> str:
        every = max(1, len(self.ratio) // 12)
        columns = [[name, *(f"{x + 0.0:.4g}" for x in column[::every])] for name, column in self.columns().items()]
        aligned = ([cell.rjust(max(map(len, column))) for cell in column] for column in columns)
        title = f"{self.name}, every {every}. of {len(self.ratio)} ratios"
        return "\n".join([title, *map("  ".join, zip(*aligned, strict=True))])


def surrogate(
    loss: Algorithm | BoundFunction | Callable[..., Tensor], ratios: Tensor | None = None, *, probability: float = 0.1
) -> Surrogate:
    """A policy loss and its gradient over a grid of ratios, for both signs of the advantage, by autograd.

    Each point is a response of one token, so losses of whole responses work too: its ratio is the response's ratio.

    Args:
        loss: a loss, bound by ``use`` or not, or an algorithm, whose policy loss is used.
        ratios: float (K,), above 0; 0.02 to 2.5 by default.
        probability: of the token in old policy, sampler and reference, for losses that bound a probability difference.

    Raises:
        ValueError: ratios for which a probability would be above 1, or a loss that needs other data.

    >>> from rlprims import losses
    >>> surrogate(losses.clipped_surrogate, torch.tensor([0.5, 1.0, 1.5])).coefficient
    {1: tensor([0.5000, 1.0000, 0.0000]), -1: tensor([0.0000, 1.0000, 1.5000])}
    """
    bound = loss.policy_loss if isinstance(loss, Algorithm) else loss if isinstance(loss, BoundFunction) else use(loss)
    ratio = torch.linspace(0.02, 2.5, 249) if ratios is None else torch.as_tensor(ratios)
    if not (0 < probability < 1) or bool((ratio <= 0).any()) or bool((ratio * probability > 1).any()):
        given = f"probability={probability} and ratios from {ratio.min():g} to {ratio.max():g}"
        raise ValueError(f"{given}, expected both above 0 and probability × ratio at most 1")
    losses, coefficients = {}, {}
    for sign in (1, -1):
        old = torch.full_like(ratio, probability).log()[:, None]
        log_probs = (old + ratio.log()[:, None]).requires_grad_()
        data = {"log_probs": log_probs, "advantages": torch.full_like(old, float(sign))}
        data |= dict.fromkeys(("old_log_probs", "rollout_log_probs", "ref_log_probs"), old)
        data |= {"response_mask": torch.ones_like(old, dtype=torch.bool), "group_ids": torch.arange(len(old))}
        values = bound({**data, "expert_mask": torch.zeros_like(old, dtype=torch.bool)})
        (gradient,) = torch.autograd.grad(values.sum(), log_probs)
        losses[sign], coefficients[sign] = values.detach()[:, 0], -sign * gradient[:, 0] + 0.0
    return Surrogate(str(bound), ratio, losses, coefficients)


def picture(width: float = 8.0, height: float = 3.4) -> Any:
    """An empty matplotlib Figure, in inches, that any notebook shows as the value of a cell.

    A notebook shows a plain ``matplotlib.figure.Figure`` only after ``%matplotlib inline`` or an import of pyplot;
    otherwise it prints text. This figure has its own PNG representation. Needs the extra ``lab``.

    >>> drawn = picture(4, 3)
    >>> axis = drawn.subplots()
    >>> drawn._repr_png_()[:4]
    b'\\x89PNG'
    """
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            png = io.BytesIO()
            self.savefig(png, format="png", dpi=90, metadata={"Software": None})
            return png.getvalue()

    return Picture(figsize=(width, height), layout="constrained", facecolor="white")
