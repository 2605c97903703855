"""When kernels are chosen; and kernels beside the plain formulas, in Triton's interpreter (``make test-triton``)."""

import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import get_args

import pytest
import torch

from rlprims import kernels
from rlprims.logprobs import from_logits
from rlprims.losses import clipped_surrogate
from rlprims.recurrence import reverse_recurrence

X = torch.zeros(2)


def test_a_block_rules_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)
    assert not kernels.chosen("scan", X)  # "auto", on a CPU
    monkeypatch.setenv("RLPRIMS_KERNELS", "always")
    assert kernels.chosen("scan", X)
    assert not kernels.chosen("scan", X, torch.zeros(0))
    with kernels.using("never"):
        assert not kernels.chosen("scan", X)
        with kernels.using("always"):
            assert kernels.chosen("scan", X)
    assert kernels.chosen("scan", X)


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPRIMS_KERNELS", "yes")
    with pytest.raises(ValueError, match="RLPRIMS_KERNELS='yes': choose 'auto', 'always' or 'never'"):
        kernels.chosen("scan", X)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a CPU were the device: "auto" takes kernels there, in the interpreter, once they are seen to be right."""
    monkeypatch.setattr(kernels, "_AUTO_DEVICES", ("cpu",))
    kernels._right.cache_clear()
    with kernels.using("auto"):
        yield
    kernels._right.cache_clear()


@pytest.mark.triton
@pytest.mark.parametrize("name", get_args(kernels.Name))
@pytest.mark.parametrize("dtype", list(kernels.TOLERANCE))
def test_a_kernel_that_passes_its_probe_is_taken(on_cpu: None, name: kernels.Name, dtype: torch.dtype) -> None:
    with warnings.catch_warnings(action="error"):
        assert kernels.chosen(name, X.to(dtype))


WRONG = {
    "clipped": {"clipped": lambda of, *args, **knobs: of(*args, **{**knobs, "clip_high": 0.3})},
    "scan": {"reverse_scan": lambda of, a, *args: of(a.abs().clamp(max=0.999), *args)},
    "softmax": {"softmax": lambda of, *args, **more: of(*args, **more) + 1e-3},
}


@pytest.mark.triton
@pytest.mark.parametrize("name", get_args(kernels.Name))
def test_a_wrong_kernel_is_off_with_one_warning(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, name: kernels.Name
) -> None:
    module = import_module(f"rlprims.kernels._{name}")
    ((function, wrong),) = WRONG[name].items()
    right = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args, **more: wrong(right, *args, **more))
    with pytest.warns(
        RuntimeWarning, match=f"kernel '{name}' is off for torch.float32 on cpu: on its probe it differs"
    ):
        assert not kernels.chosen(name, X)
    with warnings.catch_warnings(action="error"):
        assert not kernels.chosen(name, X)
    with kernels.using("always"):
        assert kernels.chosen(name, X)


@pytest.mark.triton
def test_a_kernel_that_does_not_compile_is_off_and_the_formula_computes(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("rlprims.kernels._softmax.softmax", broken)
    with pytest.warns(RuntimeWarning, match="on its probe it fails(.|\n)*RuntimeError: no such instruction"):
        got = from_logits(torch.zeros(1, 4), torch.tensor([2]))
    assert got.item() == pytest.approx(-1.3862944)


@pytest.mark.triton
def test_auto_computes_by_the_kernel(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlprims.kernels import _softmax

    assert kernels.chosen("softmax", X)
    right, calls = _softmax.softmax, []
    monkeypatch.setattr(_softmax, "softmax", lambda *args, **more: calls.append(args) or right(*args, **more))
    logits = torch.zeros(3, 4, requires_grad=True)
    from_logits(logits, torch.tensor([2, 0, 1])).sum().backward()
    assert len(calls) == 2
    assert logits.grad.tolist()[0] == [-0.25, -0.25, 0.75, -0.25]


@pytest.mark.triton
def test_who_else_has_saved_the_logits_is_told_that_a_kernel_overwrote_them() -> None:
    with kernels.using("always"):
        leaf, tokens = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, dtype=torch.int64)
        logits = leaf * 2
        kept = logits.exp().log_softmax(-1).sum() + logits.square().sum()
        log_probs = from_logits(logits, tokens, inplace_backward=True)
        with pytest.raises(RuntimeError, match="inplace operation"):
            (kept + log_probs.sum()).backward()


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [[1], [1500], [3, 1024, 1, 2049, 0, 5]])  # around the kernel's block of 1024
def test_a_scan_over_many_blocks(lengths: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    a, b = (torch.rand(sum(lengths), generator=generator, dtype=dtype) for _ in range(2))
    a[::7] = 0.0
    initial = torch.rand(len(lengths), generator=generator, dtype=dtype)
    want = reverse_recurrence(a, b, initial, cu)
    with kernels.using("always"):
        got = reverse_recurrence(a, b, initial, cu)
    torch.testing.assert_close(got, want)


@pytest.mark.triton
def test_nothing_crosses_from_one_sequence_to_another() -> None:
    a, b, cu = torch.ones(4), torch.tensor([1.0, 2.0, torch.nan, 4.0]), torch.tensor([0, 2, 4])
    with kernels.using("always"):
        s, received = reverse_recurrence(a, b, torch.zeros(2), cu)
    assert s[:2].tolist() == [3.0, 2.0]
    assert received[:2].tolist() == [2.0, 0.0]
    assert s[2:].isnan().tolist() == [True, False]


@pytest.mark.triton
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_clipped_loss_and_its_gradient(dtype: torch.dtype, dual_clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (5, 700)
    log_probs, old, advantages = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    old[0] += 30.0  # beyond the limit of the log-ratio
    mask = torch.rand(shape, generator=generator) < 0.7
    advantages[~mask] = torch.nan
    log_probs[1, :3] = torch.tensor([torch.nan, -torch.inf, torch.inf])  # inside, they are the caller's to see
    mask[1, :3] = True
    log_probs.requires_grad_()
    upstream = torch.randn(shape, generator=generator)

    def both(when: kernels.When) -> tuple[torch.Tensor, torch.Tensor]:
        with kernels.using(when):
            losses = clipped_surrogate(log_probs, old, advantages, mask, clip_high=0.28, dual_clip=dual_clip)
            return losses, torch.autograd.grad(losses, log_probs, upstream.to(losses.dtype))[0]

    torch.testing.assert_close(both("always"), both("never"), rtol=1e-6, atol=0, equal_nan=True)
