"""``merge``: the laws over random trees of turns, the decisions where the rule leaves a choice, and bad input."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.turns import Row, Turn, merge
from tests.turns.turn_trees import rollouts


def per_token(value: object, count: int) -> tuple[object, ...]:
    """A turn has one value of each kind, or one for each token."""
    return value if isinstance(value, tuple) else (value,) * count


def begins_with(ids: tuple[int, ...], prefix: tuple[int, ...]) -> bool:
    return ids[: len(prefix)] == prefix


def own_spans(turns: list[Turn], rows: list[Row]) -> dict[int, list[tuple[Row, int, int]]]:
    spans: dict[int, list[tuple[Row, int, int]]] = {number: [] for number in range(len(turns))}
    for row in rows:
        for number, start, stop in row.spans:
            spans[number].append((row, start, stop))
    return spans


@settings(max_examples=30)
@given(rollouts())
def test_every_turn_is_a_prefix_of_its_row_and_trained_once(turns: list[Turn]) -> None:
    rows = merge(turns)
    for number, places in own_spans(turns, rows).items():
        turn = turns[number]
        [(row, start, stop)] = places
        assert begins_with(row.token_ids, turn.token_ids)
        assert row.token_ids[start:stop] == turn.sampled_ids
        assert (start, stop) == (len(turn.prompt_ids), len(turn.token_ids))
        assert row.agent == turn.agent
        assert row.rollout_log_probs[start:stop] == turn.log_probs
        assert row.versions[start:stop] == per_token(turn.version, stop - start)
        assert row.response_mask[start:stop] == per_token(turn.trainable, stop - start)
        assert set(row.turn_ids[start:stop]) <= {number}
    trained = Counter(
        (token, log_prob)
        for row in rows
        for token, log_prob, valid in zip(row.token_ids, row.rollout_log_probs, row.response_mask, strict=True)
        if valid
    )
    assert trained == Counter(
        (token, log_prob)
        for turn in turns
        for token, log_prob, valid in zip(
            turn.sampled_ids, turn.log_probs, per_token(turn.trainable, len(turn.sampled_ids)), strict=True
        )
        if valid
    )


@settings(max_examples=30)
@given(rollouts())
def test_tokens_that_no_turn_sampled_have_zeros(turns: list[Turn]) -> None:
    for row in merge(turns):
        sampled = {i for span in row.spans for i in range(span.start, span.stop)}
        for i in set(range(len(row.token_ids))) - sampled:
            assert not row.response_mask[i]
            assert (row.rollout_log_probs[i], row.versions[i], row.rewards[i]) == (0.0, 0, 0.0)
        assert row.prompt_length == min(sampled, default=len(row.token_ids))
        columns = (row.response_mask, row.rollout_log_probs, row.rewards, row.turn_ids, row.versions)
        assert {len(column) for column in (*columns, *row.extras.values())} <= {len(row.token_ids)}


@settings(max_examples=30)
@given(rollouts())
def test_rewards_are_on_the_last_sampled_token(turns: list[Turn]) -> None:
    rows = merge(turns)
    for number, [(row, _, stop)] in own_spans(turns, rows).items():
        if turns[number].sampled_ids:
            assert row.rewards[stop - 1] == turns[number].reward
    assert math.fsum(math.fsum(row.rewards) for row in rows) == math.fsum(turn.reward for turn in turns)


@settings(max_examples=30)
@given(rollouts())
def test_a_row_opens_only_if_no_row_is_a_prefix_of_the_prompt(turns: list[Turn]) -> None:
    for number, turn in enumerate(turns):
        rows, extended = merge(turns[:number]), merge(turns[: number + 1])
        fits = [row for row in rows if row.agent == turn.agent and begins_with(tuple(turn.prompt_ids), row.token_ids)]
        assert len(extended) == len(rows) + (not fits)
        [home] = [row for row in extended if row.spans[-1].turn == number]
        if fits:
            longest = max(len(row.token_ids) for row in fits)
            assert any(len(row.token_ids) == longest and row.spans == home.spans[:-1] for row in fits)
        others = [row for row in extended if row is not home]
        assert all(row in rows for row in others)


@settings(max_examples=30)
@given(rollouts())
def test_a_row_only_grows(turns: list[Turn]) -> None:
    for number in range(len(turns)):
        for before, after in zip(merge(turns[:number]), merge(turns), strict=False):
            length = len(before.token_ids)
            for name in ("token_ids", "response_mask", "rollout_log_probs", "turn_ids", "versions"):
                assert getattr(after, name)[:length] == getattr(before, name)


@settings(max_examples=30)
@given(rollouts())
def test_agents_do_not_see_each_other(turns: list[Turn]) -> None:
    together = merge(turns)
    for agent in ("main", "critic"):
        alone = merge([turn for turn in turns if turn.agent == agent])
        theirs = [row for row in together if row.agent == agent]
        assert [row.token_ids for row in alone] == [row.token_ids for row in theirs]
        assert [row.rollout_log_probs for row in alone] == [row.rollout_log_probs for row in theirs]


@settings(max_examples=30)
@given(rollouts(), st.sampled_from(["first", "every"]))
def test_extras_move_like_tokens(turns: list[Turn], shared: str) -> None:
    """An entry that names its turn and position is where the row says that this turn's token is."""
    for row in merge(turns, shared=shared):  # type: ignore[arg-type]
        sampled = {i for span in row.spans for i in range(span.start, span.stop)}
        for i, entry in enumerate(row.extras.get("at", ())):
            turn = turns[row.turn_ids[i]]
            given_for_prompt = len(turn.extras["at"]) > len(turn.sampled_ids)
            assert entry == ((row.turn_ids[i], i) if given_for_prompt or i in sampled else None)


@settings(max_examples=30)
@given(rollouts())
def test_shared_every_changes_no_tokens(turns: list[Turn]) -> None:
    first, every = merge(turns), merge(turns, shared="every")
    assert [row.token_ids for row in first] == [row.token_ids for row in every]
    for a, b in zip(first, every, strict=True):
        assert set(a.spans) <= set(b.spans)
        assert all(y or not x for x, y in zip(a.response_mask, b.response_mask, strict=True))
        for number, start, stop in b.spans:
            turn = turns[number]
            assert begins_with(b.token_ids, turn.token_ids)
            assert b.rollout_log_probs[start:stop] == turn.log_probs
            assert b.response_mask[start:stop] == per_token(turn.trainable, stop - start)
            assert stop == start or b.rewards[stop - 1] == turn.reward
        assert all(s.stop <= t.start for s, t in zip(b.spans, b.spans[1:], strict=False))


@settings(max_examples=30)
@given(rollouts())
def test_shared_every_trains_the_longest_earlier_turn_that_a_new_row_begins_with(turns: list[Turn]) -> None:
    for row in merge(turns, shared="every"):
        opener = min(span.turn for span in row.spans if span in merge_first_spans(turns, row))
        prompt = tuple(turns[opener].prompt_ids)
        earlier = [
            turn.token_ids for turn in turns[:opener] if turn.agent == row.agent and begins_with(prompt, turn.token_ids)
        ]
        inherited = [turns[span.turn].token_ids for span in row.spans if span.turn < opener]
        assert max(map(len, inherited), default=-1) == max(map(len, earlier), default=-1)


def merge_first_spans(turns: list[Turn], row: Row) -> set[tuple[int, int, int]]:
    [same] = [r for r in merge(turns) if r.spans[-1] == row.spans[-1]]
    return set(same.spans)


def ids(rows: list[Row]) -> list[tuple[int, ...]]:
    return [row.token_ids for row in rows]


def test_a_fork_trains_what_it_shares_once_or_in_every_row() -> None:
    turns = [
        Turn([1], [2], [-0.5], reward=1.0),
        Turn([1, 2, 3], [4], [-0.25]),
        Turn([1, 2, 3], [5], [-0.75]),  # a second try
    ]
    first, again = merge(turns)
    assert ids([first, again]) == [(1, 2, 3, 4), (1, 2, 3, 5)]
    assert first.response_mask == (False, True, False, True)
    assert again.response_mask == (False, False, False, True)
    assert again.prompt_length == 3
    assert again.rewards == (0.0, 0.0, 0.0, 0.0)
    _, every = merge(turns, shared="every")
    assert every.response_mask == (False, True, False, True)
    assert every.rollout_log_probs == (0.0, -0.5, 0.0, -0.75)
    assert every.rewards == (0.0, 1.0, 0.0, 0.0)
    assert every.prompt_length == 1


def test_of_several_rows_the_longest_is_extended() -> None:
    turns = [Turn([1], [2], [0.0]), Turn([1], [2, 3], [0.0, 0.0]), Turn([1, 2, 3, 4], [5], [0.0])]
    assert ids(merge(turns)) == [(1, 2), (1, 2, 3, 4, 5)]


def test_of_equal_rows_the_latest_is_extended_and_then_the_other() -> None:
    retry, third, again = Turn([1], [2], [0.0]), Turn([1, 2], [3], [0.0]), Turn([1, 2], [4], [0.0])
    turns_of = lambda turns: [[span.turn for span in row.spans] for row in merge(turns)]  # noqa: E731
    assert turns_of([retry, retry, third]) == [[0], [1, 2]]
    assert turns_of([retry, retry, third, again]) == [[0, 3], [1, 2]]
    assert turns_of([retry, retry, third, third, Turn([1, 2, 3], [5], [0.0])]) == [[0, 3, 4], [1, 2]]


def test_a_prompt_that_ends_inside_what_was_sampled_opens_a_row() -> None:
    assert ids(merge([Turn([1], [2, 3], [0.0, 0.0]), Turn([1, 2], [4], [0.0])])) == [(1, 2, 3), (1, 2, 4)]


def test_a_turn_without_samples_appends_its_prompt() -> None:
    turns = [Turn([1], [2], [0.0]), Turn([1, 2, 3], [], [], reward=-1.0), Turn([1, 2, 3], [4], [0.0])]
    [row] = merge(turns)
    assert row.token_ids == (1, 2, 3, 4)
    assert row.rewards == (0.0, -1.0, 0.0, 0.0)
    assert row.turn_ids == (0, 0, 1, 2)
    assert [span.turn for span in row.spans] == [0, 1, 2]
    [empty] = merge([Turn([1, 2], [], [])])
    assert empty.prompt_length == 2
    with pytest.raises(ValueError, match=r"turn 0 has reward 1\.0, but nothing was sampled"):
        merge([Turn([1, 2], [], [], reward=1.0)])
    assert merge([]) == []


def test_a_turn_that_is_not_trained_keeps_its_numbers() -> None:
    [row] = merge([Turn([1], [2], [-0.5], version=3, reward=1.0, trainable=False), Turn([1, 2, 9], [4], [-0.25])])
    assert row.response_mask == (False, False, False, True)
    assert row.rollout_log_probs == (0.0, -0.5, 0.0, -0.25)
    assert row.versions == (0, 3, 0, 0)
    assert row.rewards == (0.0, 1.0, 0.0, 0.0)


def test_forced_tokens_inside_a_turn_are_not_trained() -> None:
    [row] = merge([Turn([1], [2, 3, 4], [-0.5, math.nan, -0.5], trainable=[True, False, True])])
    assert row.response_mask == (False, True, False, True)


def test_a_turn_that_was_resumed_has_the_versions_of_both_halves() -> None:
    """Sampling stopped for new weights, and went on from its own tokens: one row, no token twice."""
    [row] = merge([Turn([1], [2, 3], [0.0, 0.0], version=1, finish="aborted"), Turn([1, 2, 3], [4], [0.0], version=2)])
    assert row.versions == (0, 1, 1, 2)
    assert row.response_mask == (False, True, True, True)
    [row] = merge([Turn([1], [2, 3, 4], [0.0] * 3, version=[1, 1, 2])])
    assert row.versions == (0, 1, 1, 2)


def test_log_probs_that_are_not_finite_stay_with_their_token() -> None:
    [row] = merge([Turn([1], [2, 3], [math.nan, -math.inf]), Turn([1, 2, 3, 4], [5], [-0.5])])
    assert math.isnan(row.rollout_log_probs[1])
    assert row.rollout_log_probs[2:] == (-math.inf, 0.0, -0.5)
    assert row.response_mask == (False, True, True, False, True)


def test_arrays_and_tensors_are_lists() -> None:
    prompt, sampled, log_probs = [1, 2], [3, 4], [-0.5, -0.25]
    turn = Turn(prompt, sampled, log_probs, version=[1, 2])
    array = Turn(np.array(prompt), np.array(sampled, np.int32), np.array(log_probs), version=np.array([1, 2]))
    tensor = Turn(torch.tensor(prompt), torch.tensor(sampled), torch.tensor(log_probs), version=torch.tensor([1, 2]))
    of_numpy = Turn([np.int64(1), np.int64(2)], sampled, log_probs, version=[1, 2])
    assert turn == array == tensor == of_numpy
    assert all(type(token) is int for token in of_numpy.token_ids)


def test_a_later_change_of_a_callers_list_changes_nothing() -> None:
    prompt, sampled = [1, 2], [3]
    turn = Turn(prompt, sampled, [0.0])
    prompt.append(9)
    sampled.append(9)
    assert turn.token_ids == (1, 2, 3)
    assert hash(merge([turn])[0].spans)  # what a row has cannot be changed either


def test_strict_refuses_a_second_row_and_says_why() -> None:
    first, second = Turn([1, 2], [3], [0.0]), Turn([1, 2, 3, 4], [5], [0.0])
    assert len(merge([first, second, Turn([7], [8], [0.0], agent="critic")], strict=True)) == 2
    with pytest.raises(
        ValueError, match=r"turn 2 does not continue turn 1: the prompt differs at token 1, after \[1\]"
    ):
        merge([first, second, Turn([1, 7], [8], [0.0])], strict=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_probs": [0.0]}, r"log_probs has 1 entries, expected 2: one for each of sampled_ids"),
        ({"log_probs": [0.0] * 3}, r"log_probs has 3 entries, expected 2"),
        ({"log_probs": None}, r"log_probs is or contains None, expected numbers; use NaN"),
        ({"log_probs": [None, 0.0]}, r"log_probs is or contains None"),
        ({"version": [1]}, r"version has 1 entries, expected 2"),
        ({"trainable": [True] * 3}, r"trainable has 3 entries, expected 2"),
        ({"prompt_ids": "text"}, r"prompt_ids is text, expected a sequence of integers: tokenize text first"),
        ({"prompt_ids": [1.0]}, r"prompt_ids is \[1\.0\], expected a sequence of integers"),
        ({"prompt_ids": None}, r"prompt_ids is None, expected a sequence of integers"),
        ({"prompt_ids": (i for i in range(3))}, r"prompt_ids is <generator"),
        ({"sampled_ids": [1, None]}, r"sampled_ids is \[1, None\], expected a sequence of integers"),
    ],
)
def test_bad_turns(arguments: dict[str, object], message: str) -> None:
    good = {"prompt_ids": [1], "sampled_ids": [2, 3], "log_probs": [0.0, 0.0]}
    with pytest.raises(ValueError, match=message):
        Turn(**(good | arguments))  # type: ignore[arg-type]


def test_a_bad_choice() -> None:
    with pytest.raises(ValueError, match="shared='all', expected 'first' or 'every'"):
        merge([], shared="all")  # type: ignore[arg-type]
