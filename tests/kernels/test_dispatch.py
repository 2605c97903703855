"""When a kernel computes, and when the formula does."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlprims import kernels
from rlprims.kernels import accelerated


class FromKernel(Exception):
    """What the kernel of these tests raises."""


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> kernels.Accelerated:
    return probe(monkeypatch, differentiable=False)


def probe(monkeypatch: pytest.MonkeyPatch, *, differentiable: bool, module: str = "log_probs") -> kernels.Accelerated:
    """2 x, whose kernel says that it was called."""
    monkeypatch.setattr(kernels, "ACCELERATED", {})

    @accelerated(cpu=module, differentiable=differentiable)
    def double(x: Tensor, y: Tensor | None = None) -> Tensor:
        return 2 * x

    def kernel(x: Tensor, y: Tensor | None = None) -> Tensor:
        raise FromKernel

    monkeypatch.setattr(f"rlprims.kernels.{module}.double", kernel, raising=False)
    return double


class Sub(Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_tensors_go_to_the_kernel(double: kernels.Accelerated) -> None:
    with pytest.raises(FromKernel):
        double(torch.ones(2))
    with pytest.raises(FromKernel):
        double(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert double.formula(torch.ones(2)).tolist() == [2.0, 2.0]
    assert double.__doc__ == double.formula.__doc__


def test_a_gradient_goes_to_the_formula_unless_the_kernel_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, requires_grad=True)
    with_none = probe(monkeypatch, differentiable=False)
    assert torch.equal(with_none(x), 2 * x)
    assert torch.equal(with_none(torch.ones(2), y=x), 2 * torch.ones(2))
    with torch.no_grad(), pytest.raises(FromKernel):
        with_none(x)
    with pytest.raises(FromKernel):
        probe(monkeypatch, differentiable=True)(x)


def test_every_transform_goes_to_the_formula(double: kernels.Accelerated) -> None:
    x, twice = torch.ones(2), 2 * torch.ones(2)
    assert torch.equal(torch.func.vmap(double)(x), twice)
    assert torch.equal(torch.func.grad(lambda y: double(y).sum())(x), twice)
    value, moved = torch.func.jvp(double, (x,), (x,))
    assert torch.equal(value, twice)
    assert torch.equal(moved, twice)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(double(dual)).tangent, twice)
    torch.compiler.reset()
    assert torch.equal(torch.compile(lambda y: double(y), backend="eager", fullgraph=True)(x), twice)
    torch.compiler.reset()
    with Watching():
        assert torch.equal(double(x), twice)
    with FakeTensorMode() as mode:
        assert double(mode.from_tensor(x)).shape == (2,)
    assert type(double(x.as_subclass(Sub))) is Sub


def test_export_holds_the_formula(double: kernels.Accelerated) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x)

    batch = torch.export.Dim("batch")
    exported = torch.export.export(Module(), (torch.ones(3),), dynamic_shapes=({0: batch},))
    assert exported.module()(torch.ones(5)).tolist() == [2.0] * 5


def test_another_device_goes_to_the_formula(double: kernels.Accelerated) -> None:
    assert double(torch.ones(2, device="meta")).device.type == "meta"


@pytest.mark.parametrize(
    ("choice", "by_kernel"),
    [
        ("default", True),
        ("0", False),
        ("all", True),
        ("log_probs", True),
        ("a,log_probs", True),
        ("other", False),
    ],
)
def test_the_environment_chooses(
    double: kernels.Accelerated, monkeypatch: pytest.MonkeyPatch, choice: str, by_kernel: bool
) -> None:
    monkeypatch.setenv("RLPRIMS_KERNELS", choice)
    if by_kernel:
        with pytest.raises(FromKernel):
            double(torch.ones(2))
    else:
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_checks_look_at_values_of_plain_cpu_tensors_only() -> None:
    x = torch.ones(2)
    assert kernels.are_readable(x)
    assert not kernels.are_readable(x, torch.ones(2, device="meta"))
    assert not kernels.are_readable(x.as_subclass(Sub))
    seen = []
    torch.func.vmap(lambda y: seen.append(kernels.are_readable(y)) or y)(x)
    assert seen == [False]
