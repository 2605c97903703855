"""Scores by HTTP, from a server that is really there and misbehaves."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import pytest

from examples.remote_reward import RemoteError, post
from examples.remote_reward import Server as Remote
from examples.remote_reward import remote as of_rows
from rlprims.algorithms import BoundFunction
from rlprims.rewards._rates import Rates, tokens
from rlprims.rewards.scoring import Scores, batch
from tests.rewards.server import Reply, Server


def remote(
    url: str,
    responses: Sequence[str],
    answers: Sequence[Any],
    extra: Mapping[str, Sequence[Any]] | None = None,
    **limits: Any,
) -> Scores:
    return batch(of_rows, responses, answers, extra, server=Remote(url, **limits))


def send(url: str, waits: "Waits", **limits: Any) -> Any:
    async def sent() -> Any:
        async with httpx2.AsyncClient() as client:
            return await post(client, Remote(url, timeout=5, backoff=8.0, **limits), b"{}", sleep=waits.sleep)

    return asyncio.run(sent())


def lengths(request: Any) -> Reply:
    return 200, {"results": [{"score": len(r), "acc": len(r) > 1} for r in request["responses"]]}, {}


def test_rows_keep_their_order(server: Server) -> None:
    server.reply = lengths
    responses = ["x" * n for n in range(50)]
    scores = remote(server.url, responses, [""] * 50, {"data_source": ["a"] * 50}, rows_per_request=7)
    assert scores.scores.tolist() == list(range(50))
    assert scores.columns["acc"].tolist() == [0, 0] + [1] * 48
    assert len(server.requests) == 8
    assert all(set(request) == {"responses", "answers", "data_source"} for request in server.requests)


def test_a_server_that_recovers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the environment variable SCORER_KEY is not set"):
        asyncio.run(of_rows(["ab"], [""], server=Remote(server.url, key="SCORER_KEY")))
    monkeypatch.setenv("SCORER_KEY", "canary")
    replies = iter([(503, {}, {}), (429, {}, {"Retry-After": "0"}), (500, b"oh", {})])
    server.reply = lambda request: next(replies, None) or lengths(request)
    scores = remote(server.url, ["ab"], [""], backoff=0.01, key="SCORER_KEY")
    assert scores.scores.tolist() == [2]
    assert len(server.requests) == 4
    assert server.headers[0]["Authorization"] == "Bearer canary"


def test_a_request_that_fails_costs_its_rows(server: Server) -> None:
    server.reply = lambda request: (404, {}, {}) if "bad" in request["responses"] else lengths(request)
    scores = remote(server.url, ["a", "bc", "bad", "d"], [""] * 4, rows_per_request=2)
    assert scores.scores[:2].tolist() == [1, 2]
    assert scores.scores[2:].isnan().all()
    assert scores.causes["HTTP 404"].rows == 2
    assert "HTTP 404: {}, after 1 attempts" in scores.causes["HTTP 404"].detail


@pytest.mark.parametrize(
    ("answer", "cause", "detail"),
    [
        ({"results": [1.0] * 3}, "wrong length", "3 results for 1 rows"),
        ({"scores": [1.0, 2.0]}, "wrong answer", "an object with ['scores']"),
        ([1.0, 2.0], "wrong answer", "got list"),
        ({"results": {"score": 1.0}}, "wrong answer", "an object with ['results']"),
        (b"[" * 10**5, "wrong answer", "no JSON: nested too deeply"),
        (b"9" * 5000, "wrong answer", "no JSON"),
        (b"", "wrong answer", "no JSON"),
        (b"\xff\xfe", "wrong answer", "no JSON"),
    ],
    ids=range(8),
)
def test_answers_that_do_not_fit(server: Server, answer: Any, cause: str, detail: str) -> None:
    server.reply = lambda request: (200, answer, {})
    causes = remote(server.url, ["a", "b"], ["", ""]).causes
    assert list(causes) == [cause]
    assert causes[cause].rows == 2
    assert detail in causes[cause].detail


def test_results_that_are_no_scores(server: Server) -> None:
    server.reply = lambda request: (200, b'{"results": [1, null, NaN, "1", {"acc": 1}]}', {})
    scores = remote(server.url, ["a"] * 5, [""] * 5)
    assert [f.cause if f else None for f in scores.failures] == [
        None, "returned None", "returned nan", "returned str", "returned no score"
    ]  # fmt: skip


def test_no_json_is_not_asked_again(server: Server) -> None:
    server.reply = lambda request: (200, b"<html>", {})
    assert "no JSON" in remote(server.url, ["a"], [""]).causes["wrong answer"].detail
    assert len(server.requests) == 1


class Waits(list[float]):
    """The waits between attempts, noted instead of waited for."""

    async def sleep(self, seconds: float) -> None:
        self.append(seconds)


def test_waiting_doubles_and_is_asked_for(server: Server) -> None:
    server.reply = lambda request: (503, {}, {})
    waits = Waits()
    with pytest.raises(RemoteError, match=r"HTTP 503: .*, after 4 attempts"):
        send(server.url, waits, retries=3)
    assert all(0.5 * 8 * 2**k <= wait <= 1.5 * 8 * 2**k for k, wait in enumerate(waits))
    assert len(waits) == 3
    server.reply = lambda request: (429, {}, {"Retry-After": "7"})
    with pytest.raises(RemoteError):
        send(server.url, waits, retries=1)
    assert waits[3:] == [7.0]


def test_the_rate_is_bounded(server: Server) -> None:
    server.reply = lengths
    remote(server.url, ["a"] * 11, [""] * 11, rows_per_request=1, requests_per_minute=1200)
    assert max(server.times) - min(server.times) > 0.4  # ten gaps of 50 ms, less what the first was late


def test_tokens_are_paced_too(server: Server) -> None:
    rates = Rates(None, 100.0)
    assert [round(rates.turn(["a" * 196]), 1) for _ in range(3)] == [0.0, 0.5, 1.0]  # 50 each
    assert tokens(["a" * 40, ""]) == 11
    server.reply = lengths
    remote(server.url, ["a" * 396] * 3, [""] * 3, rows_per_request=1, tokens_per_minute=60_000)  # 100 each
    assert max(server.times) - min(server.times) > 0.15


def test_settings(server: Server) -> None:
    with pytest.raises(ValueError, match="above 0"):
        BoundFunction.model_validate({"fn": of_rows, "server": {"url": server.url, "requests_per_minute": -1}})
    with pytest.raises(ValueError, match="answers has 1 rows"):
        remote(server.url, ["a", "b"], [""])
    assert remote(server.url, [], []).scores.shape == (0,)
