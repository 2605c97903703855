"""A judge compares the responses of a group with each other; the score is the share of its comparisons that each wins.

In a run, with the path of this file::

    rewards:
      - fn: {fn: examples/tournament.py:tournament, judge: {url: "http://judge:8000/v1", model: qwen}}
        per: group
        concurrency: 8
"""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from rlprims.rewards.judges import Judge, pair
from rlprims.rewards.remote import RemoteError


def tournament(
    responses: Sequence[str],
    answers: Sequence[Any],
    question: Sequence[str] | None = None,
    *,
    judge: Judge,
    instructions: str | None = None,
    opponents: int | None = None,
    concurrency: int = 8,
) -> list[dict[str, float] | None]:
    """The share of its comparisons that each response of a group wins, and ``met``, their number.

    Response i is compared with the next ``opponents`` responses, in a ring; None: with all others. ``pair`` asks for
    each comparison in both orders, with its own ``instructions`` if there are none here. One that fails is left out; a
    response without any has no score.

    Raises:
        RemoteError: every comparison failed.
    """
    size = len(responses)
    count = size - 1 if opponents is None else min(opponents, size - 1)
    pairs = dict.fromkeys(tuple(sorted((i, (i + step) % size))) for i in range(size) for step in range(1, count + 1))
    prompt = question[0] if question else ""
    options: dict[str, Any] = (
        {"judge": judge} if instructions is None else {"judge": judge, "instructions": instructions}
    )

    def compare(i: int, j: int) -> float | RemoteError:
        try:
            return pair(responses[i], responses[j], prompt, **options)["score"]
        except RemoteError as error:
            return error

    threads = ThreadPoolExecutor(concurrency)
    try:
        # In the context of this call, so that an interrupt of the run ends the requests as well.
        futures = {ij: threads.submit(copy_context().run, compare, *ij) for ij in pairs}
        results = {ij: future.result() for ij, future in futures.items()}
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    wins: list[list[float]] = [[] for _ in responses]
    for (i, j), share in results.items():
        if not isinstance(share, RemoteError):
            wins[i].append(share)
            wins[j].append(1 - share)
    if pairs and not any(wins):
        raise next(error for error in results.values() if isinstance(error, RemoteError))
    return [{"score": statistics.fmean(won), "met": float(len(won))} if won else None for won in wins]
