"""Scores of verifiers: in any thread, with any extras."""

from concurrent.futures import ThreadPoolExecutor

import torch

from rlprims.data_proto import DataProto
from rlprims.rewards.scoring import naive
from rlprims.rewards.verifiers import gsm8k
from rlprims.trainer.evaluation import metrics_of


def test_w1_w2_a_verifier_answers_in_any_thread() -> None:
    """verl#5635, 3a7376acf, trl 91e3da093: a limit by SIGALRM raises outside the main thread, and every score was 0."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gsm8k, "so it is #### 42", "42").result()["score"] == 1


def test_b20_extras_that_only_some_rows_have() -> None:
    """verl reads the names from the first row: the others' are lost, or a KeyError."""
    answers = {"a": {"score": 1.0}, "b": {"score": 0.0, "acc": 1.0}, "c": {"score": 0.0, "format": 1.0}}
    columns = naive(lambda response, _: answers[response], ["a", "b", "c"], [""] * 3).columns
    assert columns["acc"][1] == columns["format"][2] == 1
    assert columns["acc"][[0, 2]].isnan().all()
    assert columns["format"][:2].isnan().all()


def test_w11_an_answer_without_a_score_is_wrong_and_counted() -> None:
    """open-instruct 3dec8b9c7: those that hung were left out, so the accuracy rose with every timeout."""
    scores, mask = torch.tensor([1.0, torch.nan, 0.0, torch.nan]), torch.ones(4, 2, dtype=torch.bool)
    tensors = {"scores": scores, "response_mask": mask, "ended": torch.zeros(4, dtype=torch.int8)}
    tensors["sample_id"] = torch.arange(4)
    rows = DataProto.from_dict(tensors=tensors, non_tensors={"data_source": ["sums"] * 4})
    assert metrics_of(rows, samples=2)["acc"] == 0.25
    assert scores.nanmean() == 0.5
