"""Laws of mask and layout: padding, packing, the order of rows, labels of groups, and other groups do not matter."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlprims.testing._call import errors_break_the_law
from rlprims.testing._cases import LARGE, TOY, Batch, layout_of, make_batch, make_batches, merge
from rlprims.testing._compare import NAN, assert_close, assert_finite, assert_same, assert_zero
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1)
EXACT = 1e-12
PACKED = 1e-6
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
        singles = [[name] for name in floats if size == TOY]
        together = [floats] if len(floats) > 1 or size == LARGE else []
        for poison in poisons:
            for poisoned in singles + together:
                dirty = clean.replace(**{name: _poisoned(name, clean, poison) for name in poisoned})
                for names in (names for names in p.variants if set(poisoned) <= set(names)):
                    for (layout, a), (_, b) in zip(_layouts(dirty), _layouts(clean), strict=True):
                        of = f" with {poison} outside the mask of {', '.join(poisoned)} ({layout})"
                        assert_same(p.run(a, names), p.run(b, names), 0, of)


def zero_outside_the_mask(p: Primitive) -> None:
    """Per-token values and every gradient are exactly 0 outside the mask, and finite everywhere."""
    for either in make_batches(SEEDS):
        for layout, batch in _layouts(either):
            for names in p.variants:
                got = p.run(batch, names)
                assert not got.value.isnan().any(), NAN
                assert_finite(got, f" ({layout})")
                outside = got.tokens(~batch.mask)
                if got.layout == "token":
                    assert_zero(f"the value outside the mask ({layout})", outside.value)
                for name, gradient in outside.gradients.items():
                    if layout_of(name) == "token":
                        assert_zero(f"the gradient of {name} outside the mask ({layout})", gradient)


def nothing_valid_gives_zero(p: Primitive) -> None:
    """A batch without a valid token gives 0 with gradient 0, and the result is still attached to the graph."""
    for either in make_batches([0]):
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
                with errors_break_the_law(f"B={rows}, T={width} {layout} raised"):
                    got = p.run(batch, names)
                assert_finite(got, f" for B={rows}, T={width} {layout}")


def padding_changes_nothing(p: Primitive) -> None:
    """Masked columns on either side do not change the other columns, and their result is 0."""
    for batch in make_batches(SEEDS):
        width = batch.mask.shape[1]
        for names in p.variants:
            want = p.run(batch, names)
            for left, right in ((0, 7), (7, 0), (3, 2)):
                got = p.run(batch.pad(left, right), names)
                old = slice(left, left + width)
                of = f" with {left} columns of padding on the left and {right} on the right"
                assert_same(got.columns(old), want, EXACT, of)
                new = torch.ones(left + width + right, dtype=torch.bool)
                new[old] = False
                for name, gradient in got.gradients.items():
                    assert_zero(f"the gradient of {name} in the padding", gradient[:, new])
                if got.layout == "token":
                    assert_zero("the value in the padding", got.value[:, new])


def packed_equals_padded(p: Primitive) -> None:
    """(N,) with cu_seqlens gives the values and gradients of (B, T), to 1e-6 in float32 and 1e-12 in float64.

    For sums over 128 tokens, which have a larger rounding error, to 1e-5 in float32.
    """
    for dtype, exact in ((torch.float32, PACKED), (torch.float64, EXACT)):
        for batch in make_batches(SEEDS, dtype):
            tolerance = 10 * exact if batch.mask.shape == LARGE else exact
            for names in p.variants:
                want = p.run(batch, names).pack(batch.data["lengths"])
                assert_same(p.run(batch.pack(), names), want, tolerance, f" packed in {dtype}")


def rows_may_be_permuted(p: Primitive) -> None:
    """Permuted rows give permuted results."""
    for batch in make_batches(SEEDS):
        order = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(0))
        for names in p.variants:
            want = p.run(batch, names).rows(order)
            assert_same(p.run(batch.rows(order), names), want, EXACT, " of permuted rows")


def groups_may_be_renamed(p: Primitive) -> None:
    """Other dense ids for the same groups do not change the result."""
    _may_be_renamed(p, "group_ids")


def rollouts_may_be_renamed(p: Primitive) -> None:
    """Other dense ids for the same rollouts do not change the result."""
    _may_be_renamed(p, "trajectory_ids")


def _may_be_renamed(p: Primitive, ids: str) -> None:
    for batch in make_batches(SEEDS):
        other = torch.randperm(len(batch.mask), generator=torch.Generator().manual_seed(0))
        for names in p.variants:
            assert_same(p.run(batch.relabel(other, ids), names), p.run(batch, names), EXACT, f" under other {ids}")


def batches_may_be_merged(p: Primitive) -> None:
    """Two batches with different prompts give the same results in one call as in two."""
    pairs = [(make_batch(seed), make_batch(seed + 100, width=9)) for seed in SEEDS]
    for first, second in (*pairs, (make_batch(0), make_batch(0, torch.float64, *LARGE))):
        both = merge(first, second)
        rows, width = first.mask.shape
        for names in p.variants:
            got = p.run(both, names)
            one, two = got.rows(slice(rows)).columns(slice(width)), got.rows(slice(rows, None))
            assert_same(one, p.run(first, names), EXACT, " of a batch merged with another")
            assert_same(two, p.run(second, names), EXACT, " of the second of two merged batches")


def nan_stays_in_its_group(p: Primitive) -> None:
    """A NaN on a valid token does not change the results of other sequences (of other groups, if there are groups)."""
    for clean in make_batches(SEEDS[:1], torch.float32):
        row = int(clean.mask.sum(-1).argmax())
        ids = clean.data["group_ids"]
        others = ids != ids[row] if "group_ids" in p.data else torch.arange(len(ids)) != row
        layouts = (False, True) if "response_mask" in p.data else (False,)
        for name in (name for name in p.inputs if clean.data[name].is_floating_point()):
            x = clean.data[name].clone()
            x[row] = torch.nan
            for packed in layouts:
                batches = (clean.replace(**{name: x}), clean)
                got, want = (p.run(batch.pack() if packed else batch, p.variants[-1]) for batch in batches)
                keep = others.repeat_interleave(clean.data["lengths"]) if packed and got.layout == "token" else others
                what = f"the value of other rows after a NaN in {name} of row {row}"
                assert_close(what, got.value[keep], want.value[keep], 0)
