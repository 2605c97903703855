"""A majority of k responses, by every choice of k."""

import json
from collections import Counter
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprims.data_proto import DataProto
from rlprims.trainer.evaluation import _metrics
from rlprims.trainer.session import start
from rlprims.trainer.voting import answer_of, majority_at


def by_every_choice(answers: list[str | None], right: dict[str, float], k: int) -> float:
    total = []
    for choice in combinations(answers, k):
        votes = Counter(answer for answer in choice if answer is not None)
        first = [answer for answer, count in votes.items() if count == max(votes.values())]
        total.append(sum(right[answer] for answer in first) / len(first) if first else 0.0)
    return sum(total) / len(total)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_it_is_the_mean_over_every_choice(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    right = {"a": 1.0, "b": 0.0, "c": 0.5, "d": 0.0}
    scores = [0.0 if answer is None else right[answer] for answer in answers]
    assert majority_at(answers, scores, k) == pytest.approx(by_every_choice(answers, right, k))


def test_by_hand() -> None:
    """Of 4 4 4 5 5: among the ten threes seven have two or three 4."""
    answers, right = ["4", "4", "4", "5", "5"], [1.0, 1.0, 1.0, 0.0, 0.0]
    assert [majority_at(answers, right, k) for k in (1, 3, 5)] == pytest.approx([0.6, 0.7, 1.0])
    assert majority_at(["4", "5"], [1.0, 0.0], 2) == 0.5  # a tie
    assert majority_at([None, None, "4"], [0.0, 0.0, 1.0], 2) == pytest.approx(2 / 3)
    assert majority_at(["4", "4"], [1.0, 0.0], 2) == 0.5  # one answer with two scores: their mean


def test_many_samples_are_no_trouble() -> None:
    answers = [i % 7 if i % 3 else 0 for i in range(64)]
    got = [majority_at(answers, [float(a == 0) for a in answers], k) for k in (1, 8, 32, 64)]
    assert got == sorted(got)
    assert got[-1] == 1.0


@pytest.mark.parametrize(
    ("vote", "response", "answer"),
    [
        ("boxed", r"\boxed{1} then \boxed{ x + 1 }", "x+1"),
        ("boxed", "4", None),
        ("tag", "<answer> yes </answer>", "yes"),
        ("text", " 4 2\n", "42"),
    ],
)
def test_what_a_response_votes_for(vote, response: str, answer: str | None) -> None:
    assert answer_of(response, vote) == answer


def test_k_beyond_the_samples() -> None:
    with pytest.raises(ValueError, match="k=3 with 2 answers"):
        majority_at(["1", "2"], [1.0, 0.0], 3)


def test_an_evaluation_has_them_with_their_intervals() -> None:
    """Two questions of three responses; 4 4 5, of which 4 is right, and 1 2 and none, of which none is."""
    texts = ["4", "it is 4", "5", "1", "2", "?"]
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    tensors = {"scores": scores, "response_mask": torch.ones(6, 2, dtype=torch.bool), "ended": torch.zeros(6).long()}
    tensors["sample_id"] = torch.arange(6)
    names = {"response": texts, "data_source": ["x"] * 6}
    rows = DataProto.from_dict(tensors=tensors, non_tensors=names)
    got = _metrics(rows, 3, "number")
    assert got["maj@3"] == 0.5
    assert got["maj@2"] == pytest.approx(1 / 3)  # of the three pairs one is 4 4, two are ties
    assert got["pass@2"] == pytest.approx(0.5)
    margin = 1.96 * 0.5**0.5 / 2**0.5
    assert (got["maj@3_low"], got["maj@3_high"]) == (max(0.0, 0.5 - margin), min(1.0, 0.5 + margin))
    assert {"pass@2_low", "pass@2_high", "maj@2_low"} <= got.keys()
    assert not any(
        name.startswith("maj") for name in _metrics(DataProto.from_dict(tensors=tensors, non_tensors=names), 3)
    )


def test_a_run_reports_it(load, settings, console) -> None:
    evaluation = {"every": 1, "samples": 3, "limit": 2, "vote": "text"}
    config = load(settings | {"steps": 1, "evaluation": evaluation})
    assert start(config, console) == 0
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "sampled/maj@3" in line]
    assert found
    for line in found:
        assert {"sampled/maj@2", "sampled/maj@3_low", "sampled/pass@2_high"} <= line.keys()
        assert line["sampled/maj@3"] <= line["sampled/pass"]
