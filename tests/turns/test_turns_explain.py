"""``explain``: where a prompt leaves a row, what kind of token it is, and what the sentence says."""

import pytest
from hypothesis import given

from rlprims.turns import Explanation, Row, Turn, explain, merge
from tests.turns.chat_templates import byte_tokenizer
from tests.turns.turn_trees import rollouts

FIRST = Turn([1, 2], [3, 4], [0.0, 0.0])
SECOND = Turn([1, 2, 3, 4, 5, 6], [7], [0.0])
ROW = merge([FIRST, SECOND])[0]  # 1 2 | 3 4 | 5 6 | 7


def ask(previous: Row | Turn, *prompt: int) -> Explanation:
    return explain(previous, Turn(prompt, [0], [0.0]))


@pytest.mark.parametrize(
    ("prompt", "kind", "position"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8), "extends", 7),
        ((1, 2, 3, 4, 5, 6, 7), "extends", 7),
        ((1, 2, 3), "shorter prompt", 3),
        ((), "shorter prompt", 0),
        ((9, 2, 3, 4), "other token", 0),
        ((1, 2, 3, 9), "own token", 3),
        ((1, 2, 3, 4, 9), "other token", 4),
        ((1, 2, 3, 4, 5, 6, 9, 8), "own token", 6),
    ],
)
def test_kinds_and_positions(prompt: tuple[int, ...], kind: str, position: int) -> None:
    found = ask(ROW, *prompt)
    assert (found.kind, found.position) == (kind, position)


def test_of_a_turn() -> None:
    assert ask(FIRST, 1, 9).kind == "other token"
    assert ask(FIRST, 1, 2, 9).kind == "own token"
    assert ask(FIRST, 1, 2, 3, 4).kind == "extends"


def test_sentences() -> None:
    assert (
        str(ask(ROW, 1, 2, 3, 4, 5, 6, 7, 8))
        == "the prompt extends the row at token 7, after [1, 2, 3, 4, 5, 6, 7]: it adds [8]"
    )
    assert str(ask(ROW, 1, 2, 3)) == (
        "the prompt ends at token 3, after [1, 2, 3], before the row does: expected [4, 5, 6, 7] next"
    )
    assert str(ask(ROW, 1, 2, 3, 4, 9)) == (
        "the prompt differs at token 4, after [1, 2, 3, 4], in a token that was not sampled "
        "(an earlier message was rewritten): expected [5, 6, 7], got [9]"
    )


def test_text_and_special_tokens() -> None:
    tokenizer = byte_tokenizer("chatml")
    row = tokenizer.encode("the answer is 42.<|im_end|>")
    found = explain(
        Turn(row[:2], row[2:], [0.0] * len(row[2:])), Turn([*row[:-1], *tokenizer.encode("\n")], [1], [0.0]), tokenizer
    )
    assert (found.kind, found.position) == ("special token", len(row) - 1)
    assert found.before.endswith("42.'")
    assert (found.expected, found.got) == ("'<|im_end|>'", r"'\n'")
    assert "a special token (the chat template wrote something else): expected '<|im_end|>', got" in str(found)


def test_the_text_around_is_short() -> None:
    long = list(range(1000))
    found = explain(Turn(long, [], []), Turn([*long[:500], 7, *long], [], []))
    assert found.before == str(long[492:500])
    assert found.expected == str(long[500:504])
    assert found.got == str([7, 0, 1, 2])


@given(rollouts(agents=("main",)))
def test_extends_is_what_merge_does(turns: list[Turn]) -> None:
    for number, turn in enumerate(turns):
        rows = merge(turns[:number])
        extends = any(explain(row, turn).kind == "extends" for row in rows)
        assert (len(merge(turns[: number + 1])) == len(rows)) is extends
