"""Real model answers to GSM8K, scored by rule: rows that people have labelled, so that the error is a share of rows.

The rows are the excerpt beside the tests, or all 5,276 of the folder that RLPRIMS_DATA names, with ``#### N`` or
``\\boxed{N}`` at the end, as each peer's function expects. A pool's workers are other processes, whose time is not
counted here: its row is what scoring in a pool of one worker costs the trainer.

``python -m benchmarks.rewards [rows]`` measures by the clock instead, as what waits takes no CPU time: 2,000 rows one
by one, through a pool, async functions and a server, beside verl's and TRL's functions.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._harness import Case
from benchmarks._peers import peer
from examples.remote_reward import Server, remote
from rlprims.rewards import verifiers
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import batch, naive
from rlprims.rewards.several import Reward, several

EXCERPT = Path("tests/rewards/data/gsm8k_model_answers.jsonl")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def cases(quick: bool) -> Iterator[Case]:
    said, golds, labels = _rows(400 if quick else 5276)
    marked = [f"{work}#### {number}" for work, number in said]
    yield _gsm8k(marked, golds, labels)
    boxed = [f"{work}So the answer is $\\boxed{{{number}}}$." for work, number in said]
    yield _math("math, numbers", boxed[:400], golds[:400], labels[:400])
    halved = [f"{work}So the answer is $\\boxed{{\\frac{{{number}}}{{2}}}}$." for work, number in said]
    dfracs = [f"\\dfrac{{{gold}}}{{2}}" for gold in golds]
    yield _math("math, fractions", halved[:400], dfracs[:400], labels[:400])
    roots = [f"{work}So the answer is $\\boxed{{{number}\\sqrt{{2}}+x}}$." for work, number in said]
    sums = [f"x+{gold}\\sqrt{{2}}" for gold in golds]
    yield _math("math, roots", roots[:400], sums[:400], labels[:400])


def _rows(count: int) -> tuple[list[tuple[str, str]], list[str], list[bool]]:
    folder = os.environ.get("RLPRIMS_DATA")
    file = Path(folder, "gsm8k", "example_model_solutions.jsonl") if folder else EXCERPT
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    all_said = [(row[m], row["ground_truth"]) for row in rows for m in MODELS if "A:" in row[m]["solution"]]
    chosen = [all_said[i % len(all_said)] for i in range(count)]
    said = [
        (answer["solution"].rpartition("A:")[0], answer["solution"].rpartition("A:")[2].strip()) for answer, _ in chosen
    ]
    golds = [gold.rpartition("A:")[2].strip().replace(",", "") for _, gold in chosen]
    return said, golds, [answer["is_correct"] for answer, _ in chosen]


def _gsm8k(responses: list[str], golds: list[str], labels: list[bool]) -> Case:
    peers: dict[str, Callable[[], Any]] = {}
    if (module := peer("verl.utils.reward_score.gsm8k")) is not None:
        peers["verl gsm8k"] = partial(_one_by_one, module.compute_score, responses, golds)
    pool = Pool(verifiers.gsm8k, workers=1)
    peers["rlprims, pool"] = lambda: pool(responses, golds).scores
    return _case(f"gsm8k, {len(responses)} rows", partial(_scores, verifiers.gsm8k, responses, golds), peers, labels)


def _math(name: str, responses: list[str], golds: list[str], labels: list[bool]) -> Case:
    peers: dict[str, Callable[[], Any]] = {}
    if (module := peer("verl.utils.reward_score.math_reward")) is not None:
        peers["verl math_reward"] = partial(_one_by_one, module.compute_score, responses, golds)
    if peer("math_verify") is not None and (rewards := peer("trl.rewards")) is not None:
        completions = [[{"role": "assistant", "content": response}] for response in responses]
        dollars = [f"${gold}$" for gold in golds]
        peers["trl accuracy_reward"] = lambda: rewards.accuracy_reward(completions, dollars)
    if (module := peer("math_verify")) is not None:
        peers["math-verify"] = partial(_one_by_one, _by_math_verify, responses, golds)
    name = f"{name}, {len(responses)} rows"
    return _case(name, partial(_scores, verifiers.math, responses, golds), peers, labels)


def _by_math_verify(response: str, gold: str) -> float:
    import math_verify

    expected, found = math_verify.parse(f"${gold}$"), math_verify.parse(response)
    return float(math_verify.verify(expected, found))


def _case(name: str, ours: Callable[[], Any], peers: dict[str, Callable[[], Any]], labels: list[bool]) -> Case:
    def wrong(scores: Any) -> float:
        values = scores.tolist() if isinstance(scores, Tensor) else scores
        return sum((value == 1) != label for value, label in zip(values, labels, strict=True)) / len(labels)

    return Case(family="rewards", name=name, ours=ours, peers=peers, error=wrong)


def _scores(verifier: Callable[..., Any], responses: list[str], golds: list[str]) -> Tensor:
    return naive(verifier, responses, golds).scores


def _one_by_one(score: Callable[[str, str], float], responses: list[str], golds: list[str]) -> list[float]:
    return [score(response, gold) for response, gold in zip(responses, golds, strict=True)]


WAIT = 0.05  # seconds of one call of a service


async def gsm8k_by_a_service(response: str, answer: str) -> dict[str, float]:
    """As a client of something that answers in 50 ms."""
    await asyncio.sleep(WAIT)
    return verifiers.gsm8k(response, answer)


def by_the_clock(count: int) -> None:
    """Rows a second, the whole way from texts to a tensor of scores, of processes that are started already."""
    said, golds, labels = _rows(count)
    marked = [f"{work}#### {number}" for work, number in said]
    boxed = [f"{work}So the answer is $\\boxed{{{number}}}$." for work, number in said]
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.rewards", "serve"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}/"
    workers = min(8, os.cpu_count() or 1)
    try:
        with (
            Pool(verifiers.gsm8k, workers=workers) as pool,
            Pool(verifiers.math, workers=workers, preload=["sympy"]) as math_pool,
        ):
            ways: dict[str, Callable[[], Any]] = {
                "gsm8k, one by one": lambda: naive(verifiers.gsm8k, marked, golds).scores,
                f"gsm8k, pool of {workers}": lambda: pool(marked, golds).scores,
                f"gsm8k, async, {WAIT * 1000:g} ms a call, 256 at once": lambda: (
                    several([Reward(gsm8k_by_a_service, concurrency=256)], marked, golds).scores
                ),
                "gsm8k, server, 16 rows a request": lambda: batch(remote, marked, golds, server=Server(url)).scores,
                "gsm8k, server, 1 row a request": lambda: (
                    batch(remote, marked, golds, server=Server(url, rows_per_request=1)).scores
                ),
                "gsm8k, all three at once": lambda: several(
                    [
                        Reward(pool, 1 / 3, "pool", per="scores"),
                        Reward(gsm8k_by_a_service, 1 / 3, concurrency=256),
                        Reward(remote, 1 / 3, "server", per="batch", options={"server": Server(url)}),
                    ],
                    marked,
                    golds,
                ).scores.round(decimals=3),
                "math, one by one": lambda: naive(verifiers.math, boxed, golds).scores,
                f"math, pool of {workers}": lambda: math_pool(boxed, golds).scores,
            }
            if (module := peer("verl.utils.reward_score.gsm8k")) is not None:
                ways["verl gsm8k, one by one"] = partial(_one_by_one, module.compute_score, marked, golds)
            if (module := peer("verl.utils.reward_score.math_reward")) is not None:
                ways["verl math_reward, one by one"] = partial(_one_by_one, module.compute_score, boxed, golds)
            if peer("math_verify") is not None and (trl := peer("trl.rewards")) is not None:
                completions = [[{"role": "assistant", "content": response}] for response in boxed]
                dollars = [f"${gold}$" for gold in golds]
                ways["trl accuracy_reward, one by one"] = lambda: trl.accuracy_reward(completions, dollars)
            print(f"{'':52}{'rows/s':>10}{'seconds':>10}{'wrong':>8}")
            for name, way in ways.items():
                best, scores = _best_of_three(way)
                values = torch.as_tensor([float("nan") if x is None else float(x) for x in scores])
                wrong = (values == 1) != torch.tensor(labels)
                print(f"{name:52}{count / best:10,.0f}{best:10.2f}{float(wrong.float().mean()):8.2%}", flush=True)
    finally:
        server.kill()
        server.wait()


def _best_of_three(way: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        scores = way()
        times.append(time.perf_counter() - began)
    return min(times), scores


def serve() -> None:
    """A server of gsm8k, as ``examples/remote_reward.py`` asks it; its port on the first line."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            scored = list(map(verifiers.gsm8k, rows["responses"], rows["answers"]))
            body = json.dumps({"results": scored}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        by_the_clock(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
