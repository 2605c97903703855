"""Weights over their mean, of tokens or of responses, over one rank or two."""

import pytest
import torch
from torch import Tensor

from rlprims.corrections import Weights, batch_normalized, tis
from rlprims.testing import check_weights

VALUES = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def normalized(importance_weights, response_mask, cu_seqlens=None, *, per="token", all_reduce=None):
    return batch_normalized(Weights(importance_weights), response_mask, cu_seqlens, per=per, all_reduce=all_reduce)


@pytest.mark.slow
def test_the_laws() -> None:
    of_the_batch = dict.fromkeys(("batches may be merged", "nan stays in its group"), "the mean is the whole batch's")
    check_weights(normalized, exempt=of_the_batch, alternatives={"per": "sequence", "all_reduce": lambda x: x + 1})
    check_weights(normalized, exempt=of_the_batch, per="sequence")


def test_by_hand() -> None:
    """Tokens: 7 of 4, the rejected one counted. Responses: means of 1 and 4, the empty one not counted."""
    assert batch_normalized(Weights(VALUES), MASK).values.tolist() == (VALUES / 1.75).tolist()
    assert batch_normalized(Weights(VALUES), MASK, per="sequence").values.tolist() == (VALUES / 2.5).tolist()


def test_batch_normalized_accounts_for_the_same_gaps() -> None:
    weights = tis(torch.zeros(3, 3), torch.ones(3, 3), MASK)
    assert batch_normalized(weights, MASK).corrected == weights.corrected


def test_batch_normalized_divides_nothing_where_all_is_rejected() -> None:
    for per in ("token", "sequence"):
        assert batch_normalized(Weights(VALUES * 0), MASK, per=per).values.tolist() == (VALUES * 0).tolist()


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_two_ranks_are_one_batch(per: str) -> None:
    """Each rank is given the sum of what both have sent."""
    sent: list[Tensor] = []
    ranks = slice(0, 1), slice(1, 3)
    for rank in ranks:
        batch_normalized(Weights(VALUES[rank]), MASK[rank], per=per, all_reduce=lambda x: sent.append(x) or x)
    got = [
        batch_normalized(Weights(VALUES[rank]), MASK[rank], per=per, all_reduce=lambda x: sent[0] + sent[1]).values
        for rank in ranks
    ]
    torch.testing.assert_close(torch.cat(got), batch_normalized(Weights(VALUES), MASK, per=per).values)


def test_an_unknown_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="per"):
        batch_normalized(Weights(VALUES), MASK, per="turn")
