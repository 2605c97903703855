"""Event loops that live as long as the process: a client that async code keeps stays usable from step to step."""

import asyncio
import os
import threading
from functools import cache


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of this name, in a daemon thread of its own. A forked process gets loops of its own."""
    return _event_loop(name, os.getpid())


@cache
def _event_loop(name: str, process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"rlprims {name}", daemon=True).start()
    return loop
