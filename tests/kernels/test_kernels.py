"""When kernels are chosen; and kernels beside the plain formulas, in Triton's interpreter (``make test-triton``)."""

import pytest
import torch

from rlprims import kernels
from rlprims.losses import clipped_surrogate
from rlprims.recurrence import reverse_recurrence

X = torch.zeros(2)


def test_a_block_rules_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)
    assert not kernels.chosen(X)
    with kernels.using("auto"):
        assert not kernels.chosen(X)  # on a CPU
    monkeypatch.setenv("RLPRIMS_KERNELS", "always")
    assert kernels.chosen(X)
    assert not kernels.chosen(X, torch.zeros(0))
    with kernels.using("never"):
        assert not kernels.chosen(X)
        with kernels.using("always"):
            assert kernels.chosen(X)
    assert kernels.chosen(X)


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPRIMS_KERNELS", "yes")
    with pytest.raises(ValueError, match="RLPRIMS_KERNELS='yes': choose 'auto', 'always' or 'never'"):
        kernels.chosen(X)


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
