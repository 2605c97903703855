"""Waiting for coroutines and threads, so that an interrupt ends them and what they wait for themselves."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from rlprims._event_loop import event_loop, in_daemon

IO = "rewards io"
"""The event loop of requests, pools and threads. No function of a user runs in it, so that none can block it."""
T = TypeVar("T")
_RESULT: contextvars.ContextVar[Future[Any] | None] = contextvars.ContextVar("result of this thread", default=None)


def start(work: Coroutine[Any, Any, T], loop: str = IO) -> Future[T]:
    """Run a coroutine in the event loop of this name. If :func:`in_thread` calls this, it is cancelled with it."""
    future = asyncio.run_coroutine_threadsafe(work, event_loop(loop))
    if (result := _RESULT.get()) is not None:
        result.add_done_callback(lambda _: future.cancel())
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
    result: Future[T] = Future()

    def call() -> T:
        _RESULT.set(result)
        return function()

    in_daemon(call, result)
    try:
        return await asyncio.wrap_future(result)
    finally:
        result.cancel()


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
