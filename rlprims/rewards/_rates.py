"""Limits on the rates at which calls start and tokens are sent."""

import threading
import time
from collections.abc import Iterable


class Rates:
    """Limits on calls and on tokens per second, shared by all threads and event loops; None: no limit."""

    def __init__(self, calls: float | None, tokens: float | None) -> None:
        self._calls, self._tokens = Pace(calls), Pace(tokens)

    def turn(self, texts: Iterable[str]) -> float:
        """Reserve the turn of a call with these texts, and return the seconds until it."""
        return max(self._calls.turn(), self._tokens.turn(tokens(texts)))


class Pace:
    """Limits callers to ``rate`` units per second, evenly; each caller uses ``amount`` units.

    The first caller starts at once. Each next one starts after the time for the units of the callers before it.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def turn(self, amount: float = 1.0) -> float:
        """Reserve the caller's turn and return the seconds until it."""
        if self._rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + amount / self._rate
        return turn - now


def tokens(texts: Iterable[str]) -> int:
    """The approximate number of tokens: a quarter of the UTF-8 bytes, as for English text in common tokenizers."""
    return sum(len(text.encode(errors="replace")) for text in texts) // 4 + 1
