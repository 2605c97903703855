"""Event loops that run until the process ends, so that async clients can be used again in the next step."""

import asyncio
import os
import threading
from functools import cache


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of this name, which runs in its own daemon thread. A forked process gets new loops."""
    return _event_loop(name, os.getpid())


@cache
def _event_loop(name: str, process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"rlprims {name}", daemon=True).start()
    return loop
