"""Waiting for coroutines and threads, so that an interrupt ends them and what they wait for themselves."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from rlprims._event_loop import event_loop, in_daemon

IO = "rewards io"
"""The event loop of requests, pools and threads. No function of a user runs in it, so that none can block it."""
T = TypeVar("T")


class _Thread(NamedTuple):
    result: Future[Any]
    waits_for: list[Future[Any]]


_THREAD: contextvars.ContextVar[_Thread | None] = contextvars.ContextVar("rlprims thread", default=None)


def start(work: Coroutine[Any, Any, T], loop: str = IO) -> Future[T]:
    """Run a coroutine in the event loop of this name. If :func:`in_thread` calls this, it is cancelled with it."""
    future = asyncio.run_coroutine_threadsafe(work, event_loop(loop))
    if (thread := _THREAD.get()) is not None:
        thread.waits_for.append(future)
        if thread.result.cancelled():
            future.cancel()
    return future


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. An interrupt cancels it."""
    future = start(work)
    try:
        return future.result()
    finally:
        future.cancel()


async def in_thread(function: Callable[[], T]) -> T:
    """Call the function in a thread of its own. If this is cancelled, what the function waits for is cancelled too, and
    the thread is left alone: the process does not wait for it when it exits."""
    thread = _Thread(Future(), [])

    def call() -> T:
        _THREAD.set(thread)
        return function()

    in_daemon(call, thread.result)
    try:
        result: T = await asyncio.wrap_future(thread.result)
        return result
    finally:
        thread.result.cancel()
        for future in thread.waits_for:
            future.cancel()


async def gather(works: Iterable[Callable[[], Awaitable[T]]], at_once: int) -> list[T]:
    """The results of all, in their order; ``at_once`` run at the same time. An exception cancels the others."""
    slots = asyncio.Semaphore(at_once)

    async def in_slot(work: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await work()

    tasks = [asyncio.create_task(in_slot(work)) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
