"""Evaluations with a verifier, sampling and questions of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprims.cli import main
from rlprims.data_proto import DataProto
from rlprims.trainer.evaluation import metrics_of
from rlprims.trainer.session import start
from tests import tiny


def of_evaluations(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"]


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Any]:
    """One whose every response is right, and one whose every response is wrong."""
    right = {"file": str(tiny.write_jsonl(tmp_path / "right.jsonl", tiny.sums(3))), "samples": 4}
    wrong = {"file": str(tiny.write_jsonl(tmp_path / "wrong.jsonl", tiny.sums(2))), "limit": 1}
    named = {"right": right, "all.wrong-2": wrong}
    right["verifier"] = "tests.trainer.verifiers.always_right"
    wrong["verifier"] = "tests.trainer.verifiers.always_wrong"
    return named


def test_every_set_has_its_questions_its_verifier_and_its_name(load, settings, console, sets) -> None:
    settings |= {"steps": 1, "evaluation": {"samples": 2, "limit": 5, "sets": sets, "best": "right/sampled/acc"}}
    config = load(settings)
    assert start(config, console) == 0
    before, after = of_evaluations(config.run_dir)
    for line in (before, after):
        assert line["right/sampled/acc"] == line["right/greedy/acc"] == 1
        assert line["right/sampled/best@2"] == line["right/sampled/pass@2"] == 1  # of its four samples
        assert line["all.wrong-2/sampled/acc"] == line["all.wrong-2/sampled/pass"] == 0
        assert "all.wrong-2/sampled/acc_low" not in line  # one question has no interval
        assert {"sampled/acc", "sampled/acc_low", "greedy/acc"} <= line.keys()
    shown = console.file.getvalue()
    assert "step 1, right: accuracy 1.000 sampled" in shown
    assert json.loads((config.run_dir / "best.json").read_text())["metric"] == "right/sampled/acc"


def test_the_command_eval_has_them_too(write_config, settings, capsys, sets) -> None:
    settings |= {"evaluation": {"samples": 1, "limit": 2, "sets": sets}}
    assert main(["eval", str(write_config(settings))]) == 0
    shown = capsys.readouterr().out
    assert "right/greedy/acc" in shown
    assert "all.wrong-2/sampled/acc" in shown


def test_a_verifier_of_the_evaluation_does_not_score_the_training(load, settings, console) -> None:
    evaluation = {"samples": 1, "limit": 2, "verifier": "tests.trainer.verifiers.always_wrong"}
    config = load(settings | {"steps": 1, "evaluation": evaluation})
    assert start(config, console) == 0
    assert {line["sampled/acc"] for line in of_evaluations(config.run_dir)} == {0.0}
    (training,) = (
        json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines() if '"train"' in line
    )
    assert training["trained_score"] > 0


def test_sampling_of_an_evaluation(load, settings) -> None:
    """What it leaves out is the run's; a set's replaces that of all sets; a stored config says the same."""
    sets = {"near": {"file": "a.jsonl", "sampling": {"top_p": 0.5}}, "other": {"file": "b.jsonl", "samples": 9}}
    evaluation = {"sampling": {"temperature": 0.25, "top_k": 7}, "samples": 3, "vote": "boxed", "sets": sets}
    config = load(settings | {"evaluation": evaluation})
    for each in (config, type(config).model_validate(config.model_dump(mode="json"))):
        found = each.evaluations()
        assert list(found) == ["", "near", "other"]
        sampling = {name: one.sampling.over(each.sampling) for name, one in found.items()}
        assert {one.max_new_tokens for one in sampling.values()} == {8}
        of = {name: (one.temperature, one.top_k, one.top_p) for name, one in sampling.items()}
        assert of == {"": (0.25, 7, 1.0), "near": (1.0, 0, 0.5), "other": (0.25, 7, 1.0)}
        assert [one.samples for one in found.values()] == [3, 3, 9]
        assert {one.vote for one in found.values()} == {"boxed"}
        assert each.sampling.temperature == 1.0


def test_a_cold_evaluation_is_almost_greedy(load, settings, console) -> None:
    """At a temperature near 0 every sample is the greedy response, so both lengths are the same."""
    evaluation = {"samples": 3, "limit": 4, "sampling": {"temperature": 1e-4}}
    config = load(settings | {"steps": 1, "evaluation": evaluation})
    assert start(config, console) == 0
    for line in of_evaluations(config.run_dir):
        assert line["sampled/length"] == line["greedy/length"]
        assert line["sampled/acc"] == line["greedy/acc"]


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"sets": {"a/b": {"file": "x"}}}, "evaluation.sets.a/b"),
        ({"sets": {"a": {"fil": "x"}}}, "did you mean 'file'?"),
        ({"sets": {"a": {"file": "x"}}, "best": "b/sampled/acc"}, "no metric 'b/sampled/acc'"),
        ({"sampling": {"temperature": 0}}, "evaluation.sampling.temperature: Input should be greater than 0"),
        ({"verifier": "tests.trainer.verifiers.none_of_them"}, "none_of_them"),
    ],
)
def test_what_is_refused(load, settings, evaluation, message: str) -> None:
    with pytest.raises(ValueError, match="evaluation") as refused:
        load(settings | {"evaluation": evaluation})
    assert message in str(refused.value)


def test_sets_are_besides_data_eval(load, settings) -> None:
    with pytest.raises(ValueError, match=r"evaluation.sets are besides data.eval"):
        load(settings | {"evaluation": {"sets": {"a": {"file": "x"}}}}, "data.eval=null")


def test_episodes_score_themselves(load, settings) -> None:
    del settings["verifier"]
    settings["data"]["environment"] = "tests.trainer.environments.OneTurn"
    load(settings)
    with pytest.raises(ValueError, match="leave verifier out"):
        load(settings, "evaluation.verifier=tests.trainer.verifiers.always_right")


def test_a_file_that_is_not_there_is_told_at_once(load, settings, console) -> None:
    config = load(settings | {"evaluation": {"sets": {"a": {"file": "none.jsonl"}}}})
    with pytest.raises(ValueError, match=r"none.jsonl"):
        start(config, console)


def test_answers_are_checked_by_the_verifier_of_their_set(load, settings, console, tmp_path: Path) -> None:
    rows = [{"question": "1+1=", "answer": "no number"}]
    words = {"file": str(tiny.write_jsonl(tmp_path / "words.jsonl", rows))}
    evaluation = {"every": 9, "before_training": False}
    for own, refused in (("rewards.verifiers.gsm8k", True), ("rewards.verifiers.exact", False)):
        config = load(
            settings | {"steps": 1, "evaluation": evaluation | {"sets": {"words": words | {"verifier": own}}}}
        )
        if refused:
            with pytest.raises(ValueError, match=r"words.jsonl:1: the answer cannot be scored"):
                start(config, console)
        else:
            assert start(config, console) == 0


def test_best_at_k_is_the_mean_over_all_choices() -> None:
    """Scores 3, 1, 2 and 0, 0, 6: of the three pairs the best are 3, 3, 2 and 0, 6, 6."""
    tensors = {
        "scores": torch.tensor([3.0, 1, 2, 0, 0, 6]),
        "response_mask": torch.ones(6, 1, dtype=torch.bool),
        "ended": torch.zeros(6).long(),
        "sample_id": torch.arange(6),
    }
    rows = DataProto.from_dict(tensors=tensors, non_tensors={"data_source": ["x"] * 6})
    got = metrics_of(rows, 3)
    assert got["best@2"] == pytest.approx((8 / 3 + 4) / 2)
    assert got["pass@2"] == pytest.approx((1 + 2 / 3) / 2)
