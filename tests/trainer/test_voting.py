"""What a response votes for, and the maj@k of an evaluation."""

import json

import pytest
import torch

from rlprims.data_proto import DataProto
from rlprims.trainer.config import EvaluationConfig
from rlprims.trainer.evaluation import answer_of, metrics_of
from rlprims.trainer.session import start


@pytest.mark.parametrize(
    ("vote", "response", "answer"),
    [
        ("boxed", r"\boxed{1} then \boxed{ x + 1 }", "x+1"),
        ("boxed", "4", None),
        ("tag", "<answer> yes </answer>", "yes"),
        ("text", " 4 2\n", "42"),
    ],
)
def test_answer_of_a_response_is_what_it_votes_for(vote, response: str, answer: str | None) -> None:
    assert answer_of(response, vote) == answer


def test_an_evaluation_has_them_with_their_intervals() -> None:
    """Two questions of three responses; 4 4 5, of which 4 is right, and 1 2 and none, of which none is."""
    texts = ["4", "it is 4", "5", "1", "2", "?"]
    scores = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    tensors = {"scores": scores, "response_mask": torch.ones(6, 2, dtype=torch.bool), "ended": torch.zeros(6).long()}
    tensors["sample_id"] = torch.arange(6)
    names = {"response": texts, "data_source": ["x"] * 6}
    rows = DataProto.from_dict(tensors=tensors, non_tensors=names)
    got = metrics_of(rows, 3, "number")
    assert got["maj@3"] == 0.5
    assert got["maj@2"] == pytest.approx(1 / 3)  # of the three pairs one is 4 4, two are ties
    assert got["pass@2"] == pytest.approx(0.5)
    margin = 1.96 * 0.5**0.5 / 2**0.5
    assert (got["maj@3_low"], got["maj@3_high"]) == (max(0.0, 0.5 - margin), min(1.0, 0.5 + margin))
    assert {"pass@2_low", "pass@2_high", "maj@2_low"} <= got.keys()
    assert not any(
        name.startswith("maj") for name in metrics_of(DataProto.from_dict(tensors=tensors, non_tensors=names), 3)
    )


def test_a_run_reports_maj_at_k(load, settings, console) -> None:
    evaluation = {"every": 1, "samples": 3, "limit": 2, "vote": "text"}
    config = load(settings | {"steps": 1, "evaluation": evaluation})
    assert start(config, console) == 0
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "sampled/maj@3" in line]
    assert found
    for line in found:
        assert {"sampled/maj@2", "sampled/maj@3_low", "sampled/pass@2_high"} <= line.keys()
        assert line["sampled/maj@3"] <= line["sampled/pass"]
        for name in [name for name in line if name.startswith(("greedy/", "sampled/"))]:
            EvaluationConfig(best=name)  # every metric that an evaluation writes may be the best's
