"""Event loops that run until the process ends, so that async clients can be used again in the next step."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

T = TypeVar("T")


def event_loop(name: str) -> asyncio.AbstractEventLoop:
    """The loop of this name, which runs in its own daemon thread. A forked process gets new loops."""
    return _event_loop(name, os.getpid())


@cache
def _event_loop(name: str, process: int) -> asyncio.AbstractEventLoop:
    loop = _Loop()
    threading.Thread(target=loop.run_forever, name=f"rlprims {name}", daemon=True).start()
    return loop


class _Loop(asyncio.SelectorEventLoop):
    async def getaddrinfo(self, host: Any, port: Any, **settings: Any) -> Any:
        """Look a name up in a thread of its own: asyncio's are few, and the process waits for them when it exits."""
        return await asyncio.wrap_future(in_daemon(partial(socket.getaddrinfo, host, port, **settings), Future()))


def in_daemon(function: Callable[[], T], result: Future[T]) -> Future[T]:
    """Call the function in a thread of its own, for which the process does not wait when it exits."""

    def call() -> None:
        with suppress(InvalidStateError):  # cancelled
            try:
                result.set_result(function())
            except (KeyboardInterrupt, SystemExit) as error:  # as such it would end the event loop
                result.set_exception(RuntimeError(f"{type(error).__name__} in a thread: {error}"))
            except BaseException as error:
                result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return result
