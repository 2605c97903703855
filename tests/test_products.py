"""Products by oneDNN: those of torch, taken only where they are quicker and only of what is plain."""

import pytest
import torch

from rlprims import products


@pytest.fixture
def pays(monkeypatch):
    monkeypatch.setattr(products, "pays", lambda: True)


def test_it_multiplies_as_torch_does():
    assert products.right()


@pytest.mark.parametrize("shape", [(300, 24), (2, 5, 24), (3, 0, 24)], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
def test_against_float64(shape, transposed):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(n, generator=generator) for n in (shape, (40, 24), (40,)))
    if transposed:
        weight = weight.T.contiguous().T
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(products.product(x, weight).double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(products.product(x, weight, bias).double(), exact + bias, rtol=1e-5, atol=1e-5)


def test_what_suits(pays):
    x, weight = torch.zeros(2**10, 2**5), torch.zeros(2**5, 2**5)
    assert products.suit(x, weight)
    assert not products.suit(x[1:], weight)  # too small
    assert not products.suit(x.double(), weight.double())
    assert not products.suit(x, weight.bfloat16())
    assert not products.suit(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not products.suit(x, weight)


@pytest.mark.parametrize(
    "capabilities", [{}, {"cpu_name": "AMD", "avx512_f": False}, {"cpu_name": "Intel", "avx512_f": True}]
)
def test_a_processor_that_is_none_of_those_keeps_torchs(monkeypatch, capabilities):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    products.pays.cache_clear()
    try:
        assert not products.pays()
    finally:
        products.pays.cache_clear()
