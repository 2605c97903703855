"""Bad responses from a policy that has moved away are dropped, good ones never."""

import pytest
import torch

from rlprims.corrections import opsm
from rlprims.testing import check_weights
from tests.records import Record, one_more

RECORDS = [
    Record("corrections.opsm", check_weights, call={"delta": 0.1}, matters={"delta": 0.5, "all_reduce_rows": one_more}),
]

NOW = torch.tensor([[-1.0, -3.0], [-1.0, -3.0], [-1.0, -1.5], [-3.0, -1.0]], dtype=torch.float64)
SAMPLER = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -9.0]], dtype=torch.float64)
MASK = torch.ones(4, 2, dtype=torch.bool)
A = torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=torch.float64)[:, None].expand(4, 2)


def test_by_hand() -> None:
    """Mean log-ratios of sampler to policy: 1, 1, 0.25 and, with signs that cancel, −3."""
    assert opsm(NOW, SAMPLER, A, MASK, delta=0.5).values[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert opsm(NOW, SAMPLER, A, MASK, delta=0.25).values[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert opsm(NOW, SAMPLER, A, MASK, delta=0.2).values[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert opsm(NOW, SAMPLER, A, MASK, delta=1.0).values.all()


def test_an_advantage_of_zero_is_kept_and_tokens_have_their_own() -> None:
    mixed = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
    assert opsm(NOW[:1], SAMPLER[:1], mixed, MASK[:1], delta=0.5).values.tolist() == [[1.0, 0.0]]


def test_the_mean_is_over_the_valid_tokens() -> None:
    """0.01 of one token; 0 and 0.06 of two."""
    short = torch.tensor([[True, False], [True, True]])
    got = opsm(torch.tensor([[-1.01, -9.0], [-1.0, -1.06]]), -torch.ones(2, 2), -torch.ones(2, 2), short, delta=0.02)
    assert got.values.tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_opsm_is_a_constant_gate() -> None:
    got = opsm(NOW.clone().requires_grad_(), SAMPLER, A, MASK, delta=0.5)
    assert not got.values.requires_grad
    assert got.corrected == frozenset()


def test_a_negative_delta_is_refused() -> None:
    with pytest.raises(ValueError, match="delta"):
        opsm(NOW, SAMPLER, A, MASK, delta=-0.1)
