"""A primitive is a pure function: no side effects, no shared memory, and the same result in a second call."""

import random

import torch
from torch import Tensor

from rlprims.testing._cases import LARGE, make_batch, make_batches
from rlprims.testing._compare import assert_same
from rlprims.testing._primitive import Primitive

EXACT = 1e-12


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(torch.uint8)


def inputs_are_untouched(p: Primitive) -> None:
    """No argument is written to, and no result is a view of one."""
    for dtype in (torch.float32, torch.float64):
        large = make_batch(0, dtype, *LARGE)
        for batch in (make_batch(0, dtype), large, *([large.pack()] if "response_mask" in p.data else [])):
            names = p.variants[-1]
            before = {name: _bits(batch.data[name].clone()) for name in names}
            value = p.call(batch, names)
            for name in names:
                assert torch.equal(_bits(batch.data[name]), before[name]), f"{name} was written to"
                shared = value.untyped_storage().data_ptr() == batch.data[name].untyped_storage().data_ptr()
                assert not shared, f"the result shares its storage with {name}"


def strides_do_not_matter(p: Primitive) -> None:
    """Transposed, strided and expanded inputs give the same numbers."""
    for batch in make_batches([0]):
        strided = batch.map(
            lambda x: torch.stack([x, x], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0],
            lambda x: torch.stack([x, x], dim=-1)[..., 0],
        )
        names = p.variants[-1]
        assert_same(p.run(strided, names), p.run(batch, names), EXACT, " of non-contiguous inputs")


def no_global_randomness(p: Primitive) -> None:
    """Global generators are not used, and a second call gives the same bits."""
    batch, names = make_batch(0, torch.float64, *LARGE), p.variants[-1]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    first = p.run(batch, names)
    assert torch.equal(torch.get_rng_state(), torch_state), "torch's global generator was used"
    assert random.getstate() == python_state, "random's global generator was used"
    torch.rand(3)
    second = p.run(batch, names)
    torch.set_rng_state(torch_state)
    assert_same(second, first, 0, " of a second call")


def no_value_is_read_by_the_host(p: Primitive) -> None:
    """It runs on the meta device, with shapes only: no .item(), no branch on a value, no tensor on another device."""
    names = p.variants[-1]
    for batch in (make_batch(0), *([make_batch(0).pack()] if "response_mask" in p.data else [])):
        try:
            value = p.call(batch.on("meta"), names)
        except Exception as error:
            raise AssertionError(f"without values it raised {type(error).__name__}: {error}") from error
        assert value.device.type == "meta", f"inputs on meta give a result on {value.device}"
