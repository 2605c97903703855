"""Random rollouts: turns that extend earlier ones, rewrite them, fork, try again, or sample nothing."""

from collections.abc import Sequence

from hypothesis import strategies as st

from rlprims.turns import Turn

TOKENS = st.integers(0, 2)  # few, so that prefixes agree by chance, too


@st.composite
def rollouts(draw: st.DrawFn, *, max_turns: int = 7, agents: Sequence[str] = ("main", "critic")) -> list[Turn]:
    """Every log-prob is a number of its own. The extra ``at`` of a token is (turn, position in prompt and samples)."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(0, max_turns))):
        new = draw(st.lists(TOKENS, max_size=3))
        kind = draw(st.sampled_from(["extend", "extend", "rewrite", "retry", "fresh"])) if turns else "fresh"
        earlier = draw(st.sampled_from(turns)) if turns else None
        if kind == "fresh" or earlier is None:
            prompt = new
        elif kind == "extend":
            prompt = [*earlier.token_ids, *new]
        elif kind == "rewrite":
            prompt = [*earlier.token_ids[: draw(st.integers(0, len(earlier.token_ids)))], *new]
        else:
            prompt = list(earlier.prompt_ids)
        sampled = draw(st.lists(TOKENS, max_size=3))
        count = len(sampled)
        whole = draw(st.booleans())
        first = 0 if whole else len(prompt)
        turns.append(
            Turn(
                prompt,
                sampled,
                [-(number + 1) - i / 8 for i in range(count)],
                version=draw(st.one_of(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=count, max_size=count))),
                finish=draw(st.sampled_from(["stop", "length", "parse_error"])),
                reward=float(draw(st.integers(-2, 2))) if count else 0.0,
                trainable=draw(
                    st.one_of(st.just(True), st.booleans(), st.lists(st.booleans(), min_size=count, max_size=count))
                ),
                agent=draw(st.sampled_from(agents)),
                extras={"at": [(number, i) for i in range(first, len(prompt) + count)]},
            )
        )
    return turns
