"""The dispatch from a formula to its kernels, by device. No other module of the maths reads the device.

A formula is plain torch, to which every transform applies. A few name kernels that are faster or need less memory::

    @accelerated(differentiable=True, cpu="log_probs", cuda="log_probs")
    def log_probs_and_entropies(logits, token_ids, temperature): ...

The kernel is the function of the same name in ``rlprims.kernels.log_probs``. It runs for plain tensors on its device,
outside every transform (compile, export, ``torch.func``, forward-mode derivatives, subclasses, dispatch modes), and for
a vocabulary that is whole. All other calls compute the formula, ``log_probs_and_entropies.formula``.

The environment variable ``RLPRIMS_KERNELS`` chooses: ``default`` or ``all``, ``0`` (none), or a list of module names
such as ``log_probs,linear_log_probs``. ``README.md`` beside this file lists every kernel with its gain;
``rlprims doctor --gpu`` compares each with its formula on this machine and times both.
"""

import os
from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rlprims.types import VocabShard

P = ParamSpec("P")
R = TypeVar("R")

ACCELERATED: dict[str, "Accelerated[..., Any]"] = {}
"""Every formula that has kernels, by name."""


class Accelerated(Generic[P, R]):
    """A formula, and the kernels that may compute it."""

    def __init__(self, formula: Callable[P, R], modules: dict[str, str], *, differentiable: bool) -> None:
        self.formula, self.modules, self.differentiable = formula, modules, differentiable
        update_wrapper(self, formula)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return self.formula(*args, **kwargs)
        values = (*args, *kwargs.values())
        parts = (x for value in values for x in (value if isinstance(value, tuple) else (value,)))
        tensors = [x for x in parts if isinstance(x, Tensor)]
        module = self.modules.get(tensors[0].device.type)
        in_shards = any(isinstance(value, VocabShard) for value in values)
        if in_shards or module is None or not is_enabled(module) or not are_plain(*tensors):
            return self.formula(*args, **kwargs)
        if not self.differentiable and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self.formula(*args, **kwargs)
        return self.kernel(module)(*args, **kwargs)

    def kernel(self, module: str) -> Callable[P, R]:
        """The function of the same name in ``rlprims.kernels.<module>``."""
        return cast(Callable[P, R], getattr(import_module(f"rlprims.kernels.{module}"), self.formula.__name__))


def accelerated(*, differentiable: bool = False, **modules: str) -> Callable[[Callable[P, R]], Accelerated[P, R]]:
    """Name the modules of ``rlprims.kernels`` that may compute a formula, by type of device.

    Args:
        differentiable: whether the kernels compute gradients. Other kernels run only if no argument requires one.
        modules: type of device to module name, such as ``cpu="log_probs"``.
    """

    def decorate(formula: Callable[P, R]) -> Accelerated[P, R]:
        wrapped = Accelerated(formula, modules, differentiable=differentiable)
        ACCELERATED[formula.__name__] = wrapped
        return wrapped

    return decorate


def is_enabled(module: str) -> bool:
    """Whether ``RLPRIMS_KERNELS`` allows this kernel."""
    choice = os.environ.get("RLPRIMS_KERNELS", "default")
    return choice in ("default", "all") or module in choice.split(",")


def are_plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary tensors of one device, outside every transform of torch."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, torch.nn.Parameter) and x.device == tensors[0].device for x in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and forward_ad._current_level < 0
    )


def are_readable(*tensors: Tensor) -> bool:
    """Whether checks may read values: plain tensors on a CPU. Elsewhere that waits for the device or breaks a graph."""
    return tensors[0].device.type == "cpu" and are_plain(*tensors)


def is_static(size: int) -> bool:
    """Whether a size is one number: False in a graph that is traced for many sizes."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which matrix products on this tensor's device keep the dtype of their factors."""
    return torch.autocast(x.device.type, enabled=False)
