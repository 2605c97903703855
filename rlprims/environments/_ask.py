"""Calls of an environment within a time limit."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

_Job: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[tuple[Any, BaseException | None]]"]


class Asker:
    """Calls plain methods in one separate thread, and awaits ``async`` methods.

    A call that takes too long is abandoned. Its thread cannot be killed; it ends with the process.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left = seconds
        self._jobs: SimpleQueue[_Job | None] | None = None

    async def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The result of the call."""
        start = time.monotonic()
        task = asyncio.ensure_future(self._call(fn, args))
        try:
            done, _ = await asyncio.wait([task], timeout=self.left)
            if not done:
                raise TimeoutError
            return task.result()
        finally:
            task.cancel()  # not awaited, because it may ignore the cancellation
            self.left -= time.monotonic() - start

    def close(self) -> None:
        """Let the thread end after its current call."""
        if self._jobs is not None:
            self._jobs.put(None)

    async def _call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if inspect.iscoroutinefunction(fn):
            return await fn(*args)
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work, args=[self._jobs], name="environment", daemon=True).start()
        future = asyncio.get_running_loop().create_future()
        self._jobs.put((fn, args, future))
        value, error = await future
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        return await value if inspect.isawaitable(value) else value


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        fn, args, future = job
        answer: tuple[Any, BaseException | None]
        try:
            answer = fn(*args), None
        except BaseException as error:  # a SystemExit in the environment must not end the thread
            answer = None, error
        loop = future.get_loop()
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(_settle, future, answer)
            except RuntimeError:  # the loop was closed meanwhile, so nothing waits for this
                return


def _settle(future: "asyncio.Future[Any]", answer: tuple[Any, BaseException | None]) -> None:
    if not future.done():
        future.set_result(answer)
