"""Linear layers by oneDNN: their numbers and slopes are those of torch's own, and only what is plain is exchanged."""

import copy

import pytest
import torch
from execution_contract import local, training_batch
from torch import nn

from rlprims import algorithms, products
from rlprims.execution.hf._linear import WideLinear, widen


@pytest.fixture
def wide(monkeypatch):
    """As on a processor where it pays, of products of any size."""
    monkeypatch.setattr(products, "pays", lambda: True)
    monkeypatch.setattr(products, "_LEAST", 1)


@pytest.mark.parametrize("outputs", [40, 10])  # the narrower of input and slope is copied for the weight's
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 24), (2, 5, 24), (1, 1, 24), (3, 0, 24), (300, 24)], ids=str)
def test_values_and_slopes(wide, shape, bias, outputs):
    torch.manual_seed(0)
    layer = nn.Linear(24, outputs, bias=bias)
    exchanged = copy.deepcopy(layer)
    widen(exchanged_model := nn.Sequential(exchanged))
    assert type(exchanged_model[0]) is WideLinear
    x = torch.randn(shape)
    slope, found = torch.randn(*shape[:-1], outputs), []
    for module in (exchanged, layer):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        found.append((out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], slope)))
        assert torch.equal(module(x).detach(), out.detach())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_gets_no_slope(wide):
    layer = WideLinear(4, 6).requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is layer.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_torchs(wide, dtype, monkeypatch):
    monkeypatch.setattr(products, "product", None)
    layer, x = WideLinear(4, 6).to(dtype), torch.randn(3, 4, dtype=dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_so_is_autocast_and_a_small_product(wide, monkeypatch):
    monkeypatch.setattr(products, "product", None)
    layer, x = WideLinear(4, 6), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    monkeypatch.setattr(products, "_LEAST", 3 * 4 * 6 + 1)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_subclass_stays_what_it_is(wide):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    widen(model)
    assert [type(layer) for layer in model] == [Scaled, WideLinear]
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert model.state_dict().keys() == names


def test_an_update_is_torchs(wide, model_path, monkeypatch):
    algorithm = algorithms.grpo()
    ours = local(model_path, algorithm)
    assert any(isinstance(layer, WideLinear) for layer in ours.training.policy.module.modules())
    monkeypatch.setattr(products, "pays", lambda: False)
    theirs = local(model_path, algorithm)
    batch = training_batch(theirs)
    torch.testing.assert_close(ours.log_probs(batch), theirs.log_probs(batch), rtol=1e-6, atol=5e-6)
    one, other = (execution.update(batch, algorithm) for execution in (ours, theirs))
    assert one.loss == pytest.approx(other.loss, rel=1e-6, abs=1e-7)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
