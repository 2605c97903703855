"""Laws of the mask: inputs outside it are not read, results outside it are 0, and empty batches are no error."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims.testing._cases import LARGE, TOY, Batch, layout_of, make_batch, make_batches
from rlprims.testing._compare import assert_finite, assert_same, assert_zero
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1)
POISONS = (torch.nan, torch.inf, -torch.inf, 1e38)


def _layouts(batch: Batch) -> Iterator[tuple[str, Batch]]:
    yield "padded", batch
    yield "packed", batch.pack()


def _poisoned(name: str, batch: Batch, poison: float) -> Tensor:
    x = batch.data[name]
    valid = batch.mask if layout_of(name) == "token" else batch.mask.any(-1)
    return torch.where(valid.reshape(valid.shape + (1,) * (x.dim() - valid.dim())), x, poison)


def masked_is_absent(p: Primitive) -> None:
    """NaN, ±Inf or 1e38 outside the mask, or in a row without tokens, changes no bit of the value or the gradient."""
    for size, poisons in ((TOY, POISONS), (LARGE, POISONS[:1])):
        clean = make_batch(0, torch.float32, *size)
        floats = [name for name in p.inputs if clean.data[name].is_floating_point()]
        for poison in poisons:
            for poisoned in [
                *([name] for name in floats if size == TOY),
                *([floats] if len(floats) > 1 or size == LARGE else []),
            ]:
                dirty = clean.replace(**{name: _poisoned(name, clean, poison) for name in poisoned})
                for names in p.variants:
                    if not set(poisoned) <= set(names):
                        continue
                    for (layout, a), (_, b) in zip(_layouts(dirty), _layouts(clean), strict=True):
                        of = f" with {poison} outside the mask of {', '.join(poisoned)} ({layout})"
                        assert_same(p.run(a, names), p.run(b, names), 0, of)


def zero_outside_the_mask(p: Primitive) -> None:
    """Per-token values and every gradient are exactly 0 outside the mask, and finite everywhere."""
    for either in make_batches(SEEDS):
        for layout, batch in _layouts(either):
            for names in p.variants:
                got = p.run(batch, names)
                assert_finite(got, f" ({layout})")
                outside = got.tokens(~batch.mask)
                if got.layout == "token":
                    assert_zero(f"the value outside the mask ({layout})", outside.value)
                for name, gradient in outside.gradients.items():
                    if layout_of(name) == "token":
                        assert_zero(f"the gradient of {name} outside the mask ({layout})", gradient)


def nothing_valid_gives_zero(p: Primitive) -> None:
    """A batch without a valid token gives 0 with gradient 0, and the result is still attached to the graph."""
    for either in make_batches(SEEDS[:1]):
        for layout, batch in _layouts(either.without_tokens()):
            for names in p.variants:
                got = p.run(batch, names)
                assert_zero(f"the value of a batch without valid tokens ({layout})", got.value)
                for name, gradient in got.gradients.items():
                    assert_zero(f"the gradient of {name} of a batch without valid tokens ({layout})", gradient)


def empty_batches_are_legal(p: Primitive) -> None:
    """B = 0 and T = 0, padded and packed, give finite results that are still attached to the graph."""
    for rows, width in ((0, 6), (8, 0), (0, 0)):
        empty = make_batch(0, width=width).rows(torch.arange(rows))
        for layout, batch in _layouts(empty) if "response_mask" in p.data else [("", empty)]:
            for names in p.variants:
                try:
                    got = p.run(batch, names)
                except Exception as error:
                    raise AssertionError(f"B={rows}, T={width} {layout} raised {_described(error)}") from error
                assert_finite(got, f" for B={rows}, T={width} {layout}")


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
