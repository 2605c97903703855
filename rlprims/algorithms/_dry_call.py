"""Checks hyperparameters before the first batch, by a call of the primitive on zeros."""

import inspect
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from rlprims import advantage, losses
from rlprims.algorithms._use import BoundFunction

_DTYPES = {"float": torch.float32, "bool": torch.bool, "int": torch.int64, "int64": torch.int64, "int8": torch.int8}
_SHAPES = {"(B, T)": (2, 2), "(B, K)": (2, 2), "(B,)": (2,), "(P,)": (2,), "()": ()}


def impossible(part: BoundFunction) -> str | None:
    """The error of a primitive of this library for its hyperparameters, or None.

    Each primitive checks its hyperparameters when it is called, so it is called on two responses of zeros. An error
    that names no hyperparameter is caused by the zeros and is ignored.

    >>> from rlprims import losses
    >>> from rlprims.algorithms import use
    >>> impossible(use(losses.clipped_surrogate, clip_high=-1))
    'clip_high=-1.0, expected a number of at least 0'
    """
    if not part.path.startswith("rlprims."):
        return None
    try:
        if inspect.isclass(part.fn):
            part.fn(**dict(part.bound))
        elif (batch := _zeros(part)) is not None:
            with torch.no_grad():
                part(batch)
    except ValueError as error:
        message = str(error)
        return message if any(f"{name}=" in message for name in part.hyperparameters) else None
    return None


def wrong_shape(part: BoundFunction) -> str | None:
    """The error of a user's function that returns no number per token; None if it cannot be called on zeros."""
    if part.path.startswith("rlprims.") or (batch := _zeros(part)) is None:
        return None
    mask = batch.get("response_mask", torch.zeros(2, 2))
    with suppress(Exception), torch.no_grad():
        result = part(batch)
        if isinstance(result, Tensor) and result.shape != mask.shape:
            return part.shape_error(result, mask)
    return None


def _zeros(part: BoundFunction) -> dict[str, Any] | None:
    """Zeros for the data that it needs; None if neither its signature nor one of this library has their shapes."""
    hints = {**_known_hints(), **get_type_hints(part.fn, include_extras=True)}
    batch = {}
    for name in part.needs:
        hint = hints.get(name)
        text = str(get_args(hint)[1]) if get_origin(hint) is Annotated else ""
        dtype = _DTYPES.get(text.partition(" ")[0])
        shape = next((shape for written, shape in _SHAPES.items() if written in text), None)
        if dtype is None or shape is None:
            return None
        batch[name] = torch.zeros(shape, dtype=dtype)
    return batch


@cache
def _known_hints() -> dict[str, Any]:
    functions = [getattr(module, name) for module in (advantage, losses) for name in module.__all__]
    return {name: hint for fn in functions for name, hint in get_type_hints(fn, include_extras=True).items()}
