"""Real model answers to GSM8K, scored by rule: rows that people have labelled, so that the error is a share of rows.

The rows are the excerpt beside the tests, or all 5,276 of the folder that RLPRIMS_DATA names, with ``#### N`` or
``\\boxed{N}`` at the end, as each peer's function expects. A pool's workers are other processes, whose time is not
counted here: its row is what scoring in a pool of one worker costs the trainer.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks._harness import Case
from benchmarks._peers import peer
from rlprims.rewards import verifiers
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import naive

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
    name = f"{name}, {len(responses)} rows"
    return _case(name, partial(_scores, verifiers.math, responses, golds), peers, labels)


def _case(name: str, ours: Callable[[], Any], peers: dict[str, Callable[[], Any]], labels: list[bool]) -> Case:
    def wrong(scores: Any) -> float:
        values = scores.tolist() if isinstance(scores, Tensor) else scores
        return sum((value == 1) != label for value, label in zip(values, labels, strict=True)) / len(labels)

    return Case(family="rewards", name=name, ours=ours, peers=peers, error=wrong)


def _scores(verifier: Callable[..., Any], responses: list[str], golds: list[str]) -> Tensor:
    return naive(verifier, responses, golds).scores


def _one_by_one(score: Callable[[str, str], float], responses: list[str], golds: list[str]) -> list[float]:
    return [score(response, gold) for response, gold in zip(responses, golds, strict=True)]
