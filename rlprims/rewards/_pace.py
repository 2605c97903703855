"""How fast requests may start: see :class:`Pace`."""

import threading
import time


class Pace:
    """Lets callers through evenly: so many units a second, each caller worth ``amount`` of them.

    The first starts at once, and the next when the units of those before it are paid for.
    """

    def __init__(self, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise ValueError(f"expected a rate above 0, got {rate}; use None for no limit")
        self._rate = rate
        self._next = 0.0
        self._lock = threading.Lock()

    def turn(self, amount: float = 1.0) -> float:
        """Seconds until the caller's turn, which is taken with this call."""
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
    """About how many tokens: a quarter of the bytes of UTF-8, which is what common tokenizers make of English."""
    return sum(len(text.encode(errors="replace")) for text in texts) // 4 + 1
