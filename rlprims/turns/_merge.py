"""Rows made from turns, by exact prefixes."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from rlprims.masking import check_choice
from rlprims.turns._explain import explain
from rlprims.turns._turn import Row, Span, Turn, per_token

Shared: TypeAlias = Literal["first", "every"]


def merge(turns: Sequence[Turn], *, shared: Shared = "first", strict: bool = False) -> list[Row]:
    """The rows of one rollout: a turn extends a row if its prompt begins with all tokens and images of that row.

    Then the rest of the prompt is appended with mask False and the sampled ids with mask True. Otherwise the turn opens
    a new row: the history was rewritten, or the turn is a second try after the same prompt. Ids are compared and never
    computed, so nothing is tokenized twice. Every turn is a prefix of its row, and its sampled tokens are trained once.

    - If a turn could extend several rows, it extends the longest one; of equally long ones the latest.
    - A row that was not extended stays open: conversations may be interleaved.
    - A turn without sampled ids appends its prompt. Its reward is moved to the last sampled token before it.
    - The reward of a turn that is not trainable is on its last token, outside the mask, so no estimator reads it.
    - If turns have an extra for their whole prompt, a token has the entry of the turn that added it.

    Args:
        turns: of one rollout, in the order of sampling.
        shared: a prompt that opens a new row may contain tokens that an earlier turn sampled. "first": they are
            trained in that turn's own row only. "every": in the new row too, with their log-probs and rewards.
        strict: raise if a turn would open a second row for its agent, for environments that only append.

    Raises:
        ValueError: a reward without any sampled token; with ``strict`` a second row, with the reason.

    The rule is that of tinker-cookbook (``trajectory_to_data``), torchtitan (``rollout_to_training_samples``) and SkyRL
    (``merge_stepwise_output``), which compare with the newest row only.

    >>> first = Turn([1, 2], [3], [-0.5])
    >>> second = Turn([1, 2, 3, 8, 9], [4, 5], [-0.1, -0.2], reward=1.0)
    >>> rewritten = Turn([1, 7], [6], [-0.3])
    >>> for row in merge([first, second, rewritten]):
    ...     print(row.token_ids, [int(valid) for valid in row.response_mask], row.turn_ids)
    (1, 2, 3, 8, 9, 4, 5) [0, 0, 1, 0, 0, 1, 1] (0, 0, 0, 1, 1, 1, 1)
    (1, 7, 6) [0, 0, 1] (2, 2, 2)
    """
    check_choice("shared", shared, Shared)
    chains: list[list[int]] = []  # the turns of each row
    chain_of: list[list[int]] = []  # for each turn, the chain of its row
    for number, turn in enumerate(turns):
        end = _longest_prefix(turn, turns, (chain[-1] for chain in chains))
        if end is not None:
            chain = next(chain for chain in chains if chain[-1] == end)
        else:
            same_agent = (i for i in reversed(range(number)) if turns[i].agent == turn.agent)
            if strict and (before := next(same_agent, None)) is not None:
                raise ValueError(f"turn {number} does not continue turn {before}: {explain(turns[before], turn)}")
            chain = []
            if shared == "every" and (parent := _longest_prefix(turn, turns, range(number))) is not None:
                chain = chain_of[parent][: chain_of[parent].index(parent) + 1]
            chains.append(chain)
        chain.append(number)
        chain_of.append(chain)
    return [_row(turns, chain) for chain in chains]


def _longest_prefix(turn: Turn, turns: Sequence[Turn], numbers: Iterable[int]) -> int | None:
    """The turn whose ids are the longest prefix of the prompt; of equally long ones the latest."""
    found, longest = None, -1
    for number in numbers:
        earlier = turns[number]
        start, stop = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.sampled_ids)
        if (
            (stop, number) > (longest, -1 if found is None else found)
            and stop <= len(turn.prompt_ids)
            and earlier.agent == turn.agent
            and turn.prompt_ids[start:stop] == earlier.sampled_ids  # compared first because it is shorter
            and turn.prompt_ids[:start] == earlier.prompt_ids
            and turn.images[: len(earlier.images)] == earlier.images
        ):
            found, longest = number, stop
    return found


def _row(turns: Sequence[Turn], chain: Sequence[int]) -> Row:
    """Each turn of the chain begins with all ids of the turn before it, so the last one has all ids of the row."""
    last = turns[chain[-1]]
    token_ids = last.token_ids
    length = len(token_ids)
    mask, log_probs, rewards = [False] * length, [0.0] * length, [0.0] * length
    turn_ids, versions = [0] * length, [0] * length
    names = dict.fromkeys(name for number in chain for name in turns[number].extras)
    extras: dict[str, list[Any]] = {name: [None] * length for name in names}
    spans: list[Span] = []
    known, last_sampled = 0, None  # the number of tokens of the turns before; the index of their last sampled token
    for number in chain:
        turn = turns[number]
        start, stop = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
        mask[start:stop] = map(bool, per_token(turn.trainable, stop - start))
        log_probs[start:stop] = map(float, turn.log_probs)
        versions[start:stop] = per_token(turn.version, stop - start)
        turn_ids[known:stop] = [number] * (stop - known)
        for name, column in turn.extras.items():
            begin = start if len(column) == stop - start else known
            extras[name][begin:stop] = list(column)[begin - stop :] if begin < stop else []
        last_sampled = stop - 1 if stop > start else last_sampled
        if last_sampled is not None:
            rewards[last_sampled] += turn.reward
        elif turn.reward != 0:
            what = f"turn {number} has reward {turn.reward}"
            raise ValueError(f"{what}, but nothing was sampled: expected a token for it")
        spans.append(Span(number, start, stop))
        known = stop
    return Row(
        token_ids=token_ids,
        response_mask=tuple(mask),
        rollout_log_probs=tuple(log_probs),
        rewards=tuple(rewards),
        turn_ids=tuple(turn_ids),
        versions=tuple(versions),
        extras={name: tuple(column) for name, column in extras.items()},
        spans=tuple(spans),
        agent=last.agent,
        finish=last.finish,
        images=tuple(last.images),
    )
