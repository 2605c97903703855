"""A limit on the rate at which requests start."""

import threading
import time


class Pace:
    """Limits callers to ``rate`` units per second, evenly; each caller uses ``amount`` units.

    The first caller starts at once. Each next one starts after the time for the units of the callers before it.
    """

    def __init__(self, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise ValueError(f"expected a rate above 0, got {rate}; use None for no limit")
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

    def wait(self, amount: float = 1.0) -> None:
        """Sleep until the caller's turn."""
        if (seconds := self.turn(amount)) > 0:
            time.sleep(seconds)


def tokens(*texts: str) -> int:
    """The approximate number of tokens: a quarter of the UTF-8 bytes, as for English text in common tokenizers."""
    return sum(len(text.encode(errors="replace")) for text in texts) // 4 + 1
