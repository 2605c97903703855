"""Real solutions, real model answers with people's labels, and real code."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from rlprims import advantage, filters, rewards
from rlprims.rewards import sandbox, verifiers
from rlprims.rewards.pool import Pool
from rlprims.rewards.scoring import naive
from tests.rewards.real_data import WHOLE, gold_solutions, humaneval, model_answers, mutants

isolated = pytest.mark.skipif(sandbox.isolation() != "namespaces", reason="no user namespaces here")


@pytest.mark.parametrize("strict", [True, False])
def test_gold_solutions_score_one(strict: bool) -> None:
    gold = gold_solutions()
    scores = naive(verifiers.gsm8k, gold, gold, strict=strict)
    assert scores.scores.eq(1).all()
    assert scores.columns["format"].eq(1).all()


@pytest.mark.parametrize("strict", [True, False])
def test_model_answers_score_as_people_label_them(strict: bool) -> None:
    responses, answers, labels = zip(*model_answers(), strict=True)
    scores = naive(verifiers.gsm8k, responses, answers, strict=strict).scores
    disagree = [(r, a, label) for r, a, label, s in zip(responses, answers, labels, scores, strict=True) if s != label]
    assert disagree == []


def test_verifiers_agree_on_rows_of_gsm8k() -> None:
    pytest.importorskip("math_verify")
    for response, answer, label in model_answers():
        gold = answer.rpartition("A:")[2].strip()
        said, mark, number = response.rpartition("A:")
        assert verifiers.numeric(response, gold)["score"] == label
        boxed = f"{said}\\boxed{{{number.strip()}}}" if mark else said
        assert verifiers.math(boxed, gold)["score"] == label


@WHOLE
def test_the_whole_sets_are_whole() -> None:
    assert len(gold_solutions()) == 8792
    answers = model_answers()
    assert len(answers) == 5276
    assert sum(label for *_, label in answers) == 2001
    assert len(humaneval()) == 164


def groups() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    responses, answers, _ = zip(*model_answers(), strict=True)
    scores = naive(verifiers.gsm8k, responses, answers).scores
    return scores, torch.arange(len(scores) // 4).repeat_interleave(4), list(responses)


ADVANTAGES = {1: (1.5, -0.5), 2: (3**0.5 / 2, -(3**0.5) / 2), 3: (0.5, -1.5)}
"""Of a right and a wrong answer, by the number of right ones of four: (s - mean) / std with ddof 1, by hand."""


def test_groups_of_four_through_filter_and_grpo() -> None:
    scores, ids, _ = groups()
    kept = filters.varied_scores(scores, ids)
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    advantages = advantage.grpo(scores[:, None], ids, mask).squeeze(1)
    right = scores.reshape(-1, 4).sum(1).repeat_interleave(4)
    assert torch.equal(kept, (right > 0) & (right < 4))
    assert advantages[~kept].eq(0).all()
    for count, (of_right, of_wrong) in ADVANTAGES.items():
        want = torch.where(scores[right == count] == 1, of_right, of_wrong)
        torch.testing.assert_close(advantages[right == count], want, atol=1e-5, rtol=0)


@WHOLE
def test_the_table_of_the_docs() -> None:
    scores, ids, responses = groups()
    right = scores.reshape(-1, 4).sum(1)
    assert [int((right == count).sum()) for count in range(5)] == [432, 290, 236, 205, 156]
    assert int(filters.varied_scores(scores, ids).sum()) == 731 * 4
    # The trap: on the shaped score, groups that are wrong throughout differ by their lengths, and are kept.
    words = torch.tensor([len(response.split()) for response in responses])
    mask = torch.arange(int(words.max())) < words[:, None]
    shaped = scores + rewards.overlong_penalty(mask, max_length=128, buffer_length=64)
    kept = filters.varied_scores(shaped, ids).reshape(-1, 4)[:, 0]
    assert [int((kept & (right == count)).sum()) for count in range(5)] == [278, 289, 236, 205, 23]


def answer_of(problem: dict[str, str]) -> dict[str, str]:
    return {name: problem[name] for name in ("prompt", "test", "entry_point")}


@isolated
@pytest.mark.slow
def test_canonical_solutions_pass_and_mutants_fail() -> None:
    problems = humaneval()
    answers = [answer_of(problem) for problem in problems]
    with Pool(verifiers.code_asserts, {"seconds": 20}, workers=2, seconds=120) as pool:
        solutions = pool([problem["canonical_solution"] for problem in problems], answers)
        assert [p["task_id"] for p, s in zip(problems, solutions.scores, strict=True) if s != 1] == []
        assert solutions.causes == {}
    left = list(range(0, len(problems), 8))
    with Pool(verifiers.code_asserts, {"seconds": 3}, workers=2, seconds=120) as pool:  # many mutants never end
        for attempt in range(8):  # some mutants are no mutants: the tests do not tell them from the solution
            changed = [next(islice(mutants(problems[i]), attempt, None), "") for i in left]
            blocks = [f"```python\n{code}\n```" for code in changed]
            scores = pool(blocks, [answers[i] for i in left]).scores
            left = [i for i, score in zip(left, scores, strict=True) if score != 0]
    assert [problems[i]["task_id"] for i in left] == []


@pytest.mark.slow
def test_the_example_runs() -> None:
    script = Path(__file__).parents[2] / "examples" / "real_answers.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "kept by the score: 12 of 20 groups" in done.stdout
