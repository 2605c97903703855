"""Where a turn ends, against a plain loop."""

from itertools import zip_longest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlprims.layout import sequence_ids
from rlprims.turns import last_of_turn, turn_boundaries

ROWS = st.lists(st.lists(st.tuples(st.integers(-1, 2), st.booleans()), min_size=5, max_size=5), min_size=1, max_size=4)


def ends_of(turns: list[int], valid: list[bool]) -> list[bool]:
    positions = [t for t, v in enumerate(valid) if v]
    ends = {t for t, u in zip_longest(positions, positions[1:]) if u is None or turns[t] != turns[u]}
    return [t in ends for t in range(len(turns))]


@given(ROWS)
def test_a_turn_ends_before_a_valid_token_of_another(rows: list[list[tuple[int, bool]]]) -> None:
    turns, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in (0, 1))
    want = [ends_of(*(list(column) for column in zip(*row, strict=True))) for row in rows]
    assert last_of_turn(turns, mask).tolist() == want
    cu = torch.arange(len(rows) + 1) * 5
    assert last_of_turn(turns.flatten(), mask.flatten(), cu).tolist() == [end for row in want for end in row]


@given(ROWS)
def test_the_valid_tokens_of_a_turn_and_no_others_share_a_sequence(rows: list[list[tuple[int, bool]]]) -> None:
    turns, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in (0, 1))
    boundaries = turn_boundaries(turns, mask)
    tokens = mask.numel()
    assert boundaries.shape == (tokens + 1,)
    assert boundaries[0] == 0
    assert boundaries[-1] == tokens
    assert (boundaries.diff() >= 0).all()
    valid = mask.flatten()
    ends = last_of_turn(turns, mask).flatten()[valid].long()
    number = ends.cumsum(0) - ends  # of each valid token's turn, from 0
    sequence = sequence_ids(boundaries, tokens)[valid]
    assert torch.equal(sequence[:, None] == sequence, number[:, None] == number)


def test_turns_without_a_number_are_refused() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match=r"turn_ids has dtype .*, expected integers"):
            last_of_turn(torch.zeros(1, 2, dtype=dtype), mask)
