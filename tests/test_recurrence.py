"""The linear recurrence against the loop that it replaces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.recurrence import reverse_recurrence


def loop(a: torch.Tensor, b: torch.Tensor, initial: float) -> tuple[list[float], list[float]]:
    solved, received, carry = [], [], initial
    for x, y in zip(reversed(a.tolist()), reversed(b.tolist()), strict=True):
        received.append(carry)
        carry = x * carry + y
        solved.append(carry)
    return solved[::-1], received[::-1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_packed_and_padded_against_a_loop(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    initial = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    solved, received = reverse_recurrence(a, b, initial, torch.tensor([0, *lengths]).cumsum(0))
    pieces = zip(
        a.split(lengths), b.split(lengths), initial, solved.split(lengths), received.split(lengths), strict=True
    )
    for a_i, b_i, start, solved_i, received_i in pieces:
        want = torch.tensor(loop(a_i, b_i, float(start)), dtype=torch.float64).reshape(2, -1)
        torch.testing.assert_close(torch.stack([solved_i, received_i]), want, rtol=1e-12, atol=1e-12)
        alone = reverse_recurrence(a_i[None], b_i[None], start[None])
        torch.testing.assert_close(torch.cat(alone), want, rtol=1e-12, atol=1e-12)


def test_a_nan_stays_in_its_sequence_and_to_the_left() -> None:
    b = torch.tensor([1.0, 1.0, 1.0, torch.nan, 1.0])
    solved, _ = reverse_recurrence(torch.ones(5), b, torch.zeros(2), torch.tensor([0, 2, 5]))
    assert solved.isnan().tolist() == [False, False, True, True, False]
