"""Several reward functions, sync and async, per answer, group and batch: what each is given, what a failure costs."""

import asyncio
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from rlprims.rewards import verifiers
from rlprims.rewards.scoring import Cause, batch, naive
from rlprims.rewards.several import Reward, several
from tests.rewards.server import Server
from tests.rewards.test_remote import lengths, remote

NAN = float("nan")


def right(response: str, answer: Any) -> dict[str, float]:
    return {"score": float(response == answer), "acc": float(response == answer)}


async def slow(response: str, *, seconds: float = 0.5) -> float:
    await asyncio.sleep(seconds)
    return float(len(response))


async def of_the_batch(responses: list[str], answers: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(responses))] * len(responses)


def rank(responses: list[str], answers: list[Any]) -> list[float]:
    return [float(sorted(responses).index(response)) for response in responses]


class TestTheListIsWeighed:
    def test_sync_and_async_per_answer_group_batch_and_by_a_server(self, server: Server) -> None:
        server.reply = lengths
        rewards = [
            Reward(right),
            Reward(slow, 0.5, options={"seconds": 0.01}),
            Reward(rank, 0.25, per="group"),
            Reward(of_the_batch, 0.125, per="batch"),
            Reward(partial(remote, server.url), 2.0, "served", per="scores"),
            Reward(partial(naive, verifiers.gsm8k), 0.0, "gsm8k", per="scores"),
        ]
        said = several(rewards, ["b", "a", "dd", "c"], ["b", "b", "b", "c"], group_ids=[7, 7, 3, 3])
        assert list(said.parts) == ["right", "slow", "rank", "of_the_batch", "served", "gsm8k"]
        columns = torch.stack([said.columns[name] for name in list(said.parts)[:5]], 1)
        assert columns.tolist() == [[1, 1, 1, 4, 1], [0, 1, 0, 4, 1], [0, 2, 1, 4, 2], [1, 1, 0, 4, 1]]
        assert said.scores.tolist() == (columns @ torch.tensor([1, 0.5, 0.25, 0.125, 2.0])).tolist()
        assert said.columns["right/acc"].tolist() == [1, 0, 0, 1]
        assert said.columns["served/acc"].tolist() == [0, 0, 1, 0]

    def test_a_failure_has_the_name_of_its_function(self) -> None:
        def picky(response: str) -> float:
            return {"a": 1.0}[response]

        def watched(response: str) -> Any:
            return None if response == "a" else NAN

        said = several([Reward(right), Reward(picky, 0.5), Reward(watched, 0.0)], ["a", "b"], ["a", "b"])
        assert said.scores.nan_to_num(-1).tolist() == [1.5, -1.0]
        assert [[f.cause for f in failures] for failures in said.failures] == [
            ["watched returned None"], ["picky raised KeyError", "watched returned nan"]
        ]  # fmt: skip
        assert said.parts["picky"].causes == {"raised KeyError": Cause(1, 1, "'b'")}
        assert said.columns["right"].tolist() == [1, 1]

    def test_none_may_say_that_it_does_not_apply(self) -> None:
        def of_code(response: str) -> float | None:
            return 0.5 if "def" in response else None

        said = several([Reward(right), Reward(of_code, skips=True)], ["def", "b"], ["def", "b"])
        assert said.scores.tolist() == [1.5, 1.0]
        assert said.failures == [[], []]

    def test_a_list_of_another_length_costs_its_call(self) -> None:
        said = several([Reward(lambda r, a: [1.0], name="two", per="group")], "abc", "abc",
                       group_ids=["x", "y", "x"])  # fmt: skip
        assert said.parts["two"].causes["wrong length"].rows == 2
        assert said.scores.nan_to_num(-1).tolist() == [-1, 1, -1]

    def test_no_rows(self) -> None:
        assert several([Reward(right), Reward(slow), Reward(of_the_batch, per="batch")], [], []).scores.shape == (0,)


class TestNothingWaitsForTheOthers:
    def test_64_async_rows_of_half_a_second(self) -> None:
        """In about one second; one after the other they take 32."""
        running, most = 0, 0

        async def judge(response: str) -> float:
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.5)
            running -= 1
            return 1.0

        said = several([Reward(judge)], ["x"] * 64, [""] * 64)
        assert said.scores.tolist() == [1] * 64
        assert most == 64
        several([Reward(judge, concurrency=5)], ["x"] * 10, [""] * 10)
        assert most == 64

    def test_a_bound_is_kept(self) -> None:
        running, most = 0, 0

        async def judge(response: str) -> float:
            nonlocal running, most
            running, most = running + 1, max(most, running + 1)
            await asyncio.sleep(0.01)
            running -= 1
            return 1.0

        several([Reward(judge, concurrency=5)], ["x"] * 23, [""] * 23)
        assert most == 5

    def test_functions_run_while_others_wait(self) -> None:
        met = threading.Event()

        async def waits(response: str) -> float:
            return float(await asyncio.to_thread(met.wait, 20))

        def in_a_thread(response: str) -> float:
            return float(met.wait(20))

        def goes_on(response: str) -> float:
            met.set()
            return 1.0

        said = several([Reward(waits), Reward(in_a_thread, concurrency=2), Reward(goes_on)], ["a"], [""])
        assert said.scores.tolist() == [3]

    def test_a_client_that_a_function_keeps_lives_from_step_to_step(self) -> None:
        kept: list[asyncio.AbstractEventLoop] = []

        async def client(response: str) -> float:
            kept.append(asyncio.get_running_loop())
            return 1.0

        for _ in range(2):
            several([Reward(client)], ["a"], [""])
        assert kept[0] is kept[1]
        assert kept[0].is_running()

    def test_within_a_running_loop(self) -> None:
        async def notebook() -> list[float]:
            return several([Reward(slow, options={"seconds": 0.0})], ["abc"], [""]).scores.tolist()

        assert asyncio.run(notebook()) == [3]

    def test_an_async_reward_that_hangs_raises_or_is_cancelled(self) -> None:
        async def bad(response: str) -> Any:
            match response:
                case "hang":
                    await asyncio.sleep(1000)
                case "raise":
                    raise TimeoutError("its own")
                case "cancel":
                    raise asyncio.CancelledError
                case "exit":
                    raise SystemExit(3)
            return response and 1.0

        said = several([Reward(bad, seconds=0.2)], ["hang", "raise", "cancel", "exit", "", "fine"], [""] * 6)
        assert [f[0].cause if f else None for f in said.failures] == [
            "bad timeout", "bad raised TimeoutError", "bad raised CancelledError", "bad raised SystemExit",
            "bad returned str", None,
        ]  # fmt: skip

    def test_rates_by_calls_and_by_tokens(self) -> None:
        times: list[float] = []

        async def paid(response: str) -> float:
            times.append(time.monotonic())
            return 1.0

        several([Reward(paid, requests_per_minute=1200)], ["x"] * 5, [""] * 5)
        assert times[-1] - times[0] > 0.15  # 50 ms apart
        times.clear()
        several([Reward(paid, tokens_per_minute=60_000)], ["x" * 196] * 5, [""] * 5)  # 50 tokens: 50 ms
        assert times[-1] - times[0] > 0.15


class TestWhatAFunctionIsGiven:
    EXTRA = {"level": [1, None], "source": ["a", "b"], "parts": [[1], [2, 3]]}  # noqa: RUF012

    def given(self, function: Any, **settings: Any) -> list[float]:
        return several([Reward(function, **settings)], ["x", "yy"], [{"gold": 1}, 2.5], self.EXTRA).scores.tolist()

    def test_columns_by_name_with_defaults_optional(self) -> None:
        def reward(response: str, answer: Any, source: str, level: int = 9, missing: int = 100) -> float:
            return {"a": 1000, "b": 2000}[source] + level + missing

        assert self.given(reward) == [1101, 2109]

    def test_the_rest_by_kwargs(self) -> None:
        seen: list[Any] = []

        def reward(response: str, answer: Any, level: int = 0, **others: Any) -> float:
            seen.append((answer, others))
            return 0.0

        self.given(reward)
        assert seen == [({"gold": 1}, {"source": "a", "parts": [1]}), (2.5, {"source": "b", "parts": [2, 3]})]

    def test_no_answer_or_another_name_for_it(self) -> None:
        assert self.given(lambda text: len(text), name="f") == [1, 2]
        assert self.given(lambda text, **all_: len(all_), name="f") == [4, 4]
        assert self.given(lambda text, ground_truth: 1.0 if isinstance(ground_truth, dict) else 2.0, name="f") == [1, 2]
        assert self.given(lambda response, level=7: level, name="f") == [1, 7]

    def test_a_missing_column_is_said_with_a_near_one(self) -> None:
        with pytest.raises(ValueError, match=r"needs the columns \['sorce'\].*did you mean 'source'"):
            self.given(lambda r, a, sorce: 1.0, name="f")

    def test_batches_and_groups_get_lists(self) -> None:
        def reward(responses: list[str], answers: list[Any], parts: list[Any], none: Any = 5) -> list[float]:
            return [len(part) + none for part in parts]

        assert self.given(reward, per="batch") == [6, 7]
        assert batch(reward, ["x", "yy"], [1, 2], self.EXTRA).scores.tolist() == [6, 7]

    @pytest.mark.slow
    def test_in_a_pool_too(self) -> None:
        from rlprims.rewards.pool import Pool
        from tests.rewards.misbehaving import columns

        with Pool(columns, workers=1) as pool:
            said = several([Reward(pool, per="scores", name="pool")], ["x", "yy"], [{"gold": 1}, [2]], self.EXTRA)
        assert said.scores.tolist() == [1 + 1 + 2, 1 + 9 + 2]


def test_settings() -> None:
    with pytest.raises(ValueError, match="different names"):
        several([Reward(right), Reward(right)], ["a"], ["a"])
    with pytest.raises(ValueError, match="different names, got \\[\\]"):
        several([], ["a"], ["a"])
    with pytest.raises(ValueError, match="has seconds, expected an async function"):
        Reward(right, seconds=1.0)
    with pytest.raises(ValueError, match="expected concurrency above 0"):
        Reward(right, concurrency=0)
    with pytest.raises(ValueError, match="group_ids"):
        several([Reward(rank, per="group")], ["a"], ["a"])
