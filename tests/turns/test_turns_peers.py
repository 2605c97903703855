"""Other libraries' rules for turns and rows, worked out by hand on their own examples, and their faults by thread.

Versions: tinker-cookbook 9dfcc3a2, torchtitan b5bcd76c, prime-rl 559b4477 with verifiers a60a606e, SkyRL a9564572, all
of August 2026.
"""

import math

import pytest

from rlprims.turns import Row, Turn, merge, to_batch

P1, P2, C1, C2, C3, C4, C5, E1, E2, E4 = range(10, 20)


def turn(prompt: list[int], *sampled: int, version: int = 0, log_prob: float = -1.0) -> Turn:
    return Turn(prompt, sampled, [log_prob] * len(sampled), version)


def as_lists(row: Row) -> tuple[list[int], list[int]]:
    return list(row.token_ids), [int(valid) for valid in row.response_mask]


def test_tinker_two_rows_of_three_transitions() -> None:
    """(O1, A1), (O1+A1+O2, A2), (O3, A3): the first two are one datum. Theirs is shifted by one for the targets."""
    rows = merge([turn([1, 2], 3), turn([1, 2, 3, 4, 5], 6, 7, log_prob=-0.5), turn([8], 9)])
    assert [as_lists(row) for row in rows] == [
        ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 0, 1, 1]),
        ([8, 9], [0, 1]),
    ]
    targets, mask = rows[0].token_ids[1:], rows[0].response_mask[1:]
    log_probs = rows[0].rollout_log_probs[1:]
    assert targets == (2, 3, 4, 5, 6, 7)
    assert [int(valid) for valid in mask] == [0, 1, 0, 0, 1, 1]
    assert log_probs == (0.0, -1.0, 0.0, 0.0, -0.5, -0.5)


def test_torchtitan_five_turns_with_a_compaction() -> None:
    """Its own example: the environment compacts the history before turn 3. Versions of a sample are from 5 to 6."""
    rows = merge(
        [
            turn([P1], C1, version=5),
            turn([P1, C1, E1], C2, version=6),
            turn([P1, C1, E1, C2, E2], C3, version=6),
            turn([P2], C4, version=6),
            turn([P2, C4, E4], C5, version=7),
        ]
    )
    assert [as_lists(row) for row in rows] == [
        ([P1, C1, E1, C2, E2, C3], [0, 1, 0, 1, 0, 1]),
        ([P2, C4, E4, C5], [0, 1, 0, 1]),
    ]
    versions = [{v for v, valid in zip(row.versions, row.response_mask, strict=True) if valid} for row in rows]
    assert versions == [{5, 6}, {6, 7}]
    assert [row.spans[0].turn for row in rows] == [0, 3]


def test_prime_rl_a_shared_turn_is_trained_in_the_first_branch() -> None:
    """A graph with two branches after the first answer: both samples hold the answer, one trains it."""
    turns = [turn([1], 2), turn([1, 2, 3], 4), turn([1, 2, 5], 6)]
    assert [as_lists(row) for row in merge(turns)] == [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2, 5, 6], [0, 0, 0, 1])]
    every = [([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2, 5, 6], [0, 1, 0, 1])]
    assert [as_lists(row) for row in merge(turns, shared="every")] == every


def test_skyrl_steps_become_one_row_with_zeros_at_observations() -> None:
    """Consecutive steps merge if prompt[i] + response[i] is a prefix of prompt[i+1]: four steps, one row."""
    prompt, turns = [1], []
    for answer in (20, 21, 22, 23):
        turns.append(turn(prompt, answer))
        prompt = [*prompt, answer, 5, 6]
    [row] = merge(turns)
    assert as_lists(row) == ([1, 20, 5, 6, 21, 5, 6, 22, 5, 6, 23], [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1])


def test_interleaved_conversations_where_peers_cut() -> None:
    """tinker, torchtitan and SkyRL compare with the newest row only: a sub-agent between two turns costs a row."""
    main, sub = turn([1], 2), turn([7], 8)
    rows = merge([main, sub, turn([1, 2, 3], 4), turn([7, 8, 9], 6)])
    assert [as_lists(row)[0] for row in rows] == [[1, 2, 3, 4], [7, 8, 9, 6]]


def test_an_empty_completion_in_the_middle_where_torchtitan_raises() -> None:
    [row] = merge([turn([1], 2), turn([1, 2, 3]), turn([1, 2, 3, 4], 5)])
    assert as_lists(row) == ([1, 2, 3, 4, 5], [0, 1, 0, 0, 1])


def test_no_state_is_kept_between_calls_tinker() -> None:
    """Its accumulator is state of a class. Here an error in one call changes nothing in the next."""
    turns = [turn([1], 2), turn([1, 2, 3], 4)]
    before = merge(turns)
    with pytest.raises(ValueError, match="nothing was sampled"):
        merge([*turns, Turn([9], [], [], reward=1.0)])
    assert merge(turns) == before


def test_a_sampled_token_of_probability_1_is_not_a_prompt_token_torchtitan() -> None:
    """log-prob 0.0 stands for "not sampled" in its samples, and is legal: only the mask tells them apart."""
    [row] = merge([turn([1, 2], 3, log_prob=0.0)])
    assert row.rollout_log_probs == (0.0, 0.0, 0.0)
    assert as_lists(row) == ([1, 2, 3], [0, 0, 1])


def test_a_resumed_answer_is_one_answer_verl_7207_slime_2261() -> None:
    """A partial answer that is sampled on from its own tokens: its length is the sum, so a budget can see all of it."""
    [row] = merge([turn([1], 2, 3, 4, version=1), turn([1, 2, 3, 4], 5, 6, version=2)])
    assert as_lists(row) == ([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1])
    assert sum(span.stop - span.start for span in row.spans) == 5


def test_a_log_prob_that_is_not_finite_costs_its_token_only_torchtitan_4174() -> None:
    rows = merge([Turn([1], [2, 3], [math.nan, -0.5]), turn([1, 2, 3, 4], 5)])
    data = to_batch([rows], ["prompt"], pad_id=0)
    finite = data["rollout_log_probs"].isfinite()
    assert (finite & data["response_mask"]).tolist() == [[False, True, False, True]]


def test_padding_and_missing_routes_are_not_zeros_nemo_3208() -> None:
    """Expert 0 is a real expert. What no engine reported gets the route that the caller names."""
    routed = Turn([1], [2], [-1.0], extras={"experts": [[3, 5]]})
    data = to_batch(
        [merge([routed, turn([1, 2, 8, 8], 4)]), merge([routed])], [0, 1], pad_id=0, fill={"experts": [0, 1]}
    )
    assert data["experts"].tolist() == [[[3, 5], [0, 1], [0, 1], [0, 1]], [[3, 5], [0, 1], [0, 1], [0, 1]]]


def test_rows_of_one_rollout_are_one_trajectory_rllm_605_agent_lightning_445() -> None:
    """Rows of a rollout that was compacted have one trajectory id and one group: a mean may count the rollout once."""
    compacted = merge([turn([1], 2), turn([5], 6), turn([7], 8)])
    data = to_batch([compacted, merge([turn([1], 3)])], ["question", "question"], pad_id=0)
    assert data["trajectory_ids"].tolist() == [0, 0, 0, 1]
    assert data["group_ids"].tolist() == [0, 0, 0, 0]
