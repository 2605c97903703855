"""Limits on the rates at which calls start and tokens are sent."""

import threading
import time
from collections.abc import Iterable


class Rates:
    """Limits on calls and on tokens per second, shared by all threads and event loops; None: no limit.

    The first caller starts at once. Each next one starts after the time for the units of the callers before it.
    """

    def __init__(self, calls: float | None, tokens: float | None) -> None:
        self._rates, self._next = (calls, tokens), [0.0, 0.0]
        self._lock = threading.Lock()

    def turn(self, texts: Iterable[str]) -> float:
        """Reserve the turn of a call with these texts, and return the seconds until it."""
        with self._lock:
            now = time.monotonic()
            turns = [max(begin, now) for begin in self._next]
            units = zip(turns, (1, tokens(texts)), self._rates, strict=True)
            self._next = [turn + amount / rate if rate else now for turn, amount, rate in units]
        return max(turns) - now


def tokens(texts: Iterable[str]) -> int:
    """The approximate number of tokens: a quarter of the UTF-8 bytes, as for English text in common tokenizers."""
    return sum(len(text.encode(errors="replace")) for text in texts) // 4 + 1
