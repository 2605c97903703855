"""Ctrl-C while something is awaited for 1,000 s: the call ends, and so does what it waits for."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from examples.judge import Judge, rubric, tournament
from examples.remote_reward import Server as Remote
from examples.remote_reward import remote as of_rows
from examples.sandbox_fusion import run_cases
from rlprims.rewards.pool import Pool
from rlprims.rewards.several import Reward, several
from tests.rewards.misbehaving import obey
from tests.rewards.server import Server
from tests.rewards.test_pool import wait_until_ended
from tests.rewards.test_remote import lengths, remote
from tests.rewards.test_remote_faults import children, raw_server

GONE = 20.0  # seconds within which the other end must notice: none of the calls ends by itself in 1,000


@contextmanager
def interrupted_when(begun: Callable[[], bool]) -> Iterator[None]:
    """Ctrl-C in the main thread, once the call inside has begun to wait."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not begun():
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


class Silence:
    """A server that reads requests and does not answer. ``left`` is set when a client has closed its connection."""

    def __init__(self) -> None:
        self.asked, self.left = threading.Event(), threading.Event()

    def __call__(self, connection: Any) -> None:
        self.asked.set()
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass
        self.left.set()


OPTIONS: dict[str, Any] = {"timeout": 1000.0, "retries": 5}


def calls(url: str) -> dict[str, Callable[[], Any]]:
    judge = Judge(f"{url}v1", "m", **OPTIONS)
    criteria = {"right": "it is right"}
    graded = Reward(rubric, options={"judge": judge, "criteria": criteria}, concurrency=2)
    played = Reward(tournament, per="group", options={"judge": judge}, concurrency=2)
    rows = ["a", "b", "c"]
    return {
        "remote": lambda: remote(url, rows, rows, deadline=1000.0, **OPTIONS),
        "remote in several": lambda: several(
            [Reward(of_rows, per="batch", options={"server": Remote(url, **OPTIONS)})], rows, rows
        ),
        "a judge": lambda: asyncio.run(rubric("a", judge=judge, criteria=criteria)),
        "judges": lambda: several([graded], rows, rows),
        "a tournament": lambda: several([played], rows, rows, group_ids=[0, 0, 0]),
        "a sandbox server": lambda: list(
            run_cases("print(1)", [""], url=url, function=None, seconds=500, total_seconds=500, memory_mb=64)
        ),
    }


@pytest.mark.parametrize("name", calls(""))
def test_a_request_to_a_server_that_does_not_answer(name: str, server: Server) -> None:
    silence = Silence()
    with raw_server(silence) as url:
        with interrupted_when(silence.asked.is_set):
            calls(url)[name]()
        assert silence.left.wait(GONE)
    server.reply = lengths
    assert remote(server.url, ["ab"], [""]).scores.tolist() == [2]


def test_the_wait_between_two_attempts(server: Server) -> None:
    server.reply = lambda request: (503, {}, {"Retry-After": "60"})
    with interrupted_when(lambda: bool(server.requests)):
        remote(server.url, ["a"], [""])
    assert len(server.requests) == 1


def test_async_functions_are_cancelled_and_no_further_one_begins() -> None:
    begun, ended = list[str](), list[str]()

    async def waits(response: str) -> float:
        begun.append(response)
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(response)
        return 1.0

    with interrupted_when(lambda: len(begun) == 2):
        several([Reward(waits, concurrency=2)], ["a", "b", "c"], [""] * 3)
    limit = time.monotonic() + GONE
    while len(ended) < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert begun == ["a", "b"]


def test_functions_in_threads_are_left_alone_and_no_further_one_begins() -> None:
    begun, release = list[str](), threading.Event()

    def waits(response: str) -> float:
        begun.append(response)
        release.wait(1000)
        return 1.0

    with interrupted_when(lambda: len(begun) == 2):
        several([Reward(waits, concurrency=2)], ["a", "b", "c", "d"], [""] * 4)
    release.set()
    assert several([Reward(waits, concurrency=2)], ["e"], [""]).scores.tolist() == [1]
    assert sorted(begun) == ["a", "b", "e"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(obey, workers=2, seconds=1000) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("through", ["several", "the pool"])
def test_the_rows_of_a_pool(pool: Pool, through: str) -> None:
    """Through several it scored its whole batch first."""
    rows = ["hang"] * 20
    workers = list[int]()

    def begun() -> bool:
        workers[:] = children(pool._servers[0]._process.pid)
        return len(workers) == 2

    with interrupted_when(begun):
        if through == "several":
            several([Reward(pool, per="scores", name="pool")], rows, rows)
        else:
            pool(rows, rows)
    wait_until_ended(*workers)
    assert pool(["3"], [""]).scores.tolist() == [3]


def test_a_pool_that_still_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "begun"
    text = f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    (tmp_path / "never_imported.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with interrupted_when(lambda: begun.exists() and begun.read_text() != ""):
        Pool(obey, preload=["never_imported"])
    wait_until_ended(int(begun.read_text()))


SCRIPT = """
import asyncio, sys, threading, time
from examples.judge import Judge, rubric
from examples.remote_reward import Server, remote
from rlprims.rewards.pool import Pool
from rlprims.rewards.several import Reward, several

url = sys.argv[1]

async def sleeps(response):
    await asyncio.sleep(1000)

def blocks(response):
    time.sleep(1000)

judge = Judge(url + "v1", "m", timeout=1000.0)
rewards = [
    Reward(Pool("tests.rewards.misbehaving.obey", workers=1, seconds=1000), per="scores", name="pool"),
    Reward(remote, per="batch", options={"server": Server(url, timeout=1000.0)}),
    Reward(rubric, options={"judge": judge, "criteria": {"a": "b"}}, concurrency=2),
    Reward(sleeps),
    Reward(blocks, concurrency=2),
]
threading.Timer(1.0, print, ["begun"], {"flush": True}).start()
several(rewards, ["hang"] * 3, [""] * 3)
"""


@pytest.mark.slow
def test_the_process_ends() -> None:
    with raw_server(Silence()) as url:
        command = [sys.executable, "-c", SCRIPT, url]
        root = Path(__file__).parents[2]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GONE)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
