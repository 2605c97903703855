"""What a server, or somebody in its place, can do to a call: each costs its rows, within the call's own limits."""

import math
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.remote_reward import RemoteError
from rlprims.algorithms import BoundFunction
from rlprims.rewards.pool import Pool
from rlprims.rewards.several import Reward, several
from rlprims.trainer.scoring.settings import RewardConfig
from tests.rewards.misbehaving import slowly
from tests.rewards.server import Server
from tests.rewards.test_remote import Waits, lengths, remote, send

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "remote_reward.py"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@contextmanager
def raw_server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """What it does with each connection; it has read the request's beginning."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=answer, args=[connection], daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                behave(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


def drip(connection: socket.socket, head: bytes = HEAD + b"Content-Length: 500\r\n\r\n") -> None:
    for byte in head + b" " * (600 - len(head)):  # all of it in 12 s
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST


def of(behave: Callable[[socket.socket], None], **options: Any) -> str:
    """The one cause of two rows."""
    with raw_server(behave) as url:
        settings = {"timeout": 10.0, "retries": 0, "backoff": 0.01} | options
        (cause,) = remote(url, ["a", "b"], ["", ""], **settings).causes
    return cause


class TestTheCausesAreToldApart:
    def test_refused(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        causes = remote(url, ["a"], [""], retries=1, backoff=0.01).causes
        assert "after 2 attempts" in causes["connection refused"].detail

    def test_reset(self) -> None:
        assert of(reset) == "connection reset"

    def test_closed_half_way(self) -> None:
        assert of(lambda c: c.sendall(HEAD + b"Content-Length: 90\r\n\r\n{")) == "connection reset"

    def test_closed_without_an_answer(self) -> None:
        assert of(lambda c: None) == "connection reset"

    def test_silence(self) -> None:
        assert of(lambda c: time.sleep(5), timeout=0.3) == "no answer in time"

    def test_no_HTTP(self) -> None:
        assert of(lambda c: c.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")) == "wrong answer"

    def test_no_TLS_at_the_other_end(self) -> None:
        with raw_server(lambda c: c.sendall(b"no TLS here, only text")) as url:
            (cause,) = remote(url.replace("http", "https"), ["a"], [""], retries=0, timeout=10).causes
        assert cause == "TLS error"

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
    def test_an_unsigned_certificate_is_not_tried_twice(self, server: Server, tmp_path: Path) -> None:
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
        causes = remote(server.url.replace("http", "https"), ["a"], [""], retries=3, timeout=10).causes
        assert "after 1 attempts" in causes["TLS error"].detail
        assert not server.requests

    def test_no_such_host(self) -> None:
        assert list(remote("http://nobody.invalid/", ["a"], [""], retries=0).causes) == ["no connection"]

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/", "127.0.0.1:80", "http://"])
    def test_no_address_of_a_server(self, url: str) -> None:
        assert remote(url, ["a"], [""], retries=0, timeout=1).scores.isnan().all()


class TestLimits:
    @pytest.mark.parametrize("head", [HEAD + b"Content-Length: 500\r\n\r\n", HEAD + b"X-Long: "])
    def test_a_dripping_server_has_timeout_seconds_in_all(self, head: bytes) -> None:
        """Its every byte came within a socket's timeout, so timeout=1 held a row for 32 s."""
        assert of(lambda c: drip(c, head), timeout=0.3) == "no answer in time"

    def test_attempts_and_waits_end_at_the_deadline(self, server: Server) -> None:
        server.reply = lambda request: (503, {}, {"Retry-After": "60"})
        scores = remote(server.url, ["a"] * 40, [""] * 40, rows_per_request=1, deadline=0.5, backoff=60)
        assert set(scores.causes) <= {"HTTP 503", "no answer in time"}
        assert scores.scores.isnan().all()

    def test_a_long_answer(self, server: Server) -> None:
        server.reply = lambda request: (200, b'{"results": [1' + b" " * 2**21 + b"]}", {})
        causes = remote(server.url, ["a"], [""], largest_answer_mb=1).causes
        assert "longer than 1048576 bytes" in causes["wrong answer"].detail
        assert remote(server.url, ["a"], [""]).scores.tolist() == [1]


class TestOneRowCostsItself:
    def test_an_answer_that_is_circular(self, server: Server) -> None:
        server.reply = lengths
        circle: list[Any] = []
        circle.append(circle)
        deep: Any = "x"
        for _ in range(10**5):
            deep = [deep]
        scores = remote(server.url, ["a", "bc", "d", "ef", "g"], ["", circle, deep, object(), np.float32(1)])
        assert scores.scores.nan_to_num(-1).tolist() == [1, -1, -1, -1, 1]
        assert scores.causes["not JSON"].rows == 3

    @pytest.mark.parametrize("reply", [b'{"results": ' + b"[" * 10**5, b"<html>"])
    def test_deep_json_for_one_of_many(self, server: Server, reply: bytes) -> None:
        server.reply = lambda request: (200, reply, {}) if "bad" in request["responses"] else lengths(request)
        responses = ["x" * n for n in range(16)]
        responses[5] = "bad"
        scores = remote(server.url, responses, [""] * 16)
        assert [n for n in range(16) if math.isnan(scores.scores[n])] == [5]
        assert len(server.requests) == 17

    @pytest.mark.parametrize("refusal", [400, 413, 422])
    def test_a_row_that_the_server_refuses(self, server: Server, refusal: int) -> None:
        server.reply = lambda request: (refusal, {}, {}) if "bad" in request["responses"] else lengths(request)
        scores = remote(server.url, ["a", "bad", "cd"], [""] * 3)
        assert scores.scores.nan_to_num(-1).tolist() == [1, -1, 2]

    @pytest.mark.parametrize("asked", ["²", "soon", "-1", "1e9", "", "9" * 400, "Wed, 99 Oct 2015 07:28:00 GMT"])
    def test_a_retry_after_that_cannot_be_read(self, server: Server, asked: str) -> None:
        waits = Waits()
        server.reply = lambda request: (503, {}, {"Retry-After": asked.encode().decode("latin-1")})
        with pytest.raises(RemoteError, match="HTTP 503"):
            send(server.url, waits, retries=1)
        assert 4 <= waits[0] <= 12

    def test_a_retry_after_that_is_a_date(self, server: Server) -> None:
        waits = Waits()
        server.reply = lambda request: (503, {}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
        with pytest.raises(RemoteError):
            send(server.url, waits, retries=1)
        assert waits == [0.0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_no_credential_leaves_the_host(
    server: Server, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "canary")
    with Server() as other:
        server.reply = lambda request: (status, {}, {"Location": other.url})
        causes = remote(server.url, ["a"], [""], key="SCORER_KEY").causes
        assert "redirects are not followed" in causes[f"HTTP {status}"].detail
        assert len(server.requests) == 1
        assert not other.requests


def test_no_cookie_is_sent_back_and_no_bytes_are_inflated(server: Server) -> None:
    """An encoding could make a small answer large, so none is accepted."""
    server.reply = lambda request: (200, b"\x1f\x8b\x08", {"Content-Encoding": "gzip", "Set-Cookie": "a=b"})
    causes = remote(server.url, ["a", "b"], ["", ""]).causes
    assert "no JSON" in causes["wrong answer"].detail
    assert len(server.requests) == 3
    assert all("Cookie" not in headers for headers in server.headers)
    assert {headers["Accept-Encoding"] for headers in server.headers} == {"identity"}


def test_a_run_names_the_file_and_a_missing_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = lengths
    fn = {"fn": f"{SCRIPT}:remote", "server": {"url": server.url, "retries": 0}}
    reward = RewardConfig.model_validate({"fn": fn, "per": "batch", "name": "served"})
    assert RewardConfig.model_validate(reward.model_dump(mode="json")) == reward
    scored = several([Reward(reward.fn.fn, per="batch", options=dict(reward.fn.bound))], ["a", "bc"], ["", ""])
    assert scored.scores.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"server=.* has the wrong type: .*limits above 0"):
        BoundFunction.model_validate(fn | {"server": {"url": server.url, "timeout": 0}})
    monkeypatch.setitem(sys.modules, "httpx2", None)
    for name in [name for name, module in sys.modules.items() if getattr(module, "__file__", "") == str(SCRIPT)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"remote_reward\.py, line \d+: ModuleNotFoundError: .*httpx2"):
        BoundFunction.model_validate(fn)


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@contextmanager
def killing(pool: Pool, every: float) -> Iterator[list[int]]:
    """End one worker after another, as a machine that is out of memory does."""
    stop, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not stop.wait(every):
            with suppress(OSError, IndexError):
                worker = children(pool._servers[0]._process.pid)[0]
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
class TestAPoolUnderFire:
    @pytest.mark.slow
    def test_a_kill_every_10_ms_keeps_what_was_scored(self) -> None:
        """It gave up after a few, and what was scored before went with the rest."""
        with Pool(slowly, workers=2, seconds=5) as pool:
            assert pool(["1"] * 4, [""] * 4).scores.tolist() == [1] * 4
            with killing(pool, 0.01) as killed:
                scores = pool([str(n) for n in range(150)], [""] * 150)
            good = scores.scores.isfinite()
            assert killed
            assert good.sum() > 15
            assert scores.scores[good].tolist() == good.nonzero().flatten().tolist()
            assert set(scores.causes) <= {"killed by SIGKILL", "no worker"}
            assert pool(["1"] * 4, [""] * 4).scores.tolist() == [1] * 4, "it goes on afterwards"

    def test_a_worker_that_is_killed_while_it_waits_costs_nothing(self) -> None:
        with Pool(slowly, workers=2, seconds=5) as pool:
            pool(["1"] * 4, [""] * 4)
            os.kill(children(pool._servers[0]._process.pid)[0], signal.SIGKILL)
            assert pool([str(n) for n in range(20)], [""] * 20).scores.tolist() == list(range(20))

    @pytest.mark.slow
    def test_the_pools_server_is_started_again(self) -> None:
        with Pool(slowly, workers=2, seconds=5) as pool:
            pool(["1"] * 4, [""] * 4)
            first = pool._servers[0]._process.pid
            threading.Timer(0.05, os.kill, [first, signal.SIGKILL]).start()
            assert pool([str(n) for n in range(150)], [""] * 150).scores.tolist() == list(range(150))
            assert pool._servers[0]._process.pid != first


LOOK_UPS = """
import socket, sys, time
from tests.rewards.test_remote import remote

known = socket.getaddrinfo

def getaddrinfo(host, *others, **settings):
    if "silent.example" in str(host):
        time.sleep(1000)  # a name server that does not answer
    return known(host, *others, **settings)

socket.getaddrinfo = getaddrinfo
limits = {"timeout": 0.2, "deadline": 2.0, "rows_per_request": 1, "retries": 1, "backoff": 0.01}
rows = ["a"] * 40
failures = remote("http://silent.example/", rows, rows, concurrency=40, **limits).failures
print({failure.cause for failure in failures})
print(remote(sys.argv[1], ["ab"], [""]).scores.tolist(), flush=True)
"""


@pytest.mark.slow
def test_names_that_are_never_looked_up_hold_neither_other_names_nor_the_process(server: Server) -> None:
    server.reply = lengths
    url = server.url.replace("127.0.0.1", "localhost")
    done = subprocess.run([sys.executable, "-c", LOOK_UPS, url], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "{'no answer in time'}\n[2.0]\n", done.stderr
