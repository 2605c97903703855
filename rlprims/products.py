"""Products of float32 matrices on a CPU where torch's own leave half of it unused.

Torch multiplies float32 by MKL, which takes AVX-512 on Intel's processors alone. oneDNN, which torch brings too, takes
it wherever it is: twice the speed on others. Torch calls it for 16 bits, and in compiled code for float32 by the
operator that is called here.
"""

from functools import cache

import torch
from torch import Tensor

_LEAST = 2**20
"""Multiplications below which a call costs more than it saves."""


def suit(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`product` is for these two."""
    return (
        x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.numel() * len(weight) >= _LEAST
        and type(x) is Tensor
        and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())
        and pays()
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weightᵀ + bias, as ``nn.functional.linear``, without a gradient."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@cache
def pays() -> bool:
    """Whether this processor has what MKL does not use, and oneDNN multiplies here as torch does.

    It is the processor that decides, not a timing: a resumed run multiplies as it did.
    """
    try:
        processor = torch.cpu.get_capabilities()
        return "AMD" in processor["cpu_name"] and processor["avx512_f"] and right()
    except Exception:  # of a torch, or a machine, that has not all of it
        return False


def right() -> bool:
    """Of a forward's product and of a backward's two, whose operands are transposed."""
    x, weight, slope = (torch.arange(float(n * m)).cos().view(n, m) for n, m in ((40, 20), (160, 20), (40, 160)))
    operands = (x, weight, slope[0]), (slope, weight.t(), None), (slope.t(), x.t(), None)
    linear = torch.nn.functional.linear
    return all(torch.allclose(product(*each), linear(*each), rtol=1e-5, atol=1e-5) for each in operands)
