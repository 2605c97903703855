"""The loaders, on files as their writers write them."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from examples.recorded_log_probs import log_probs
from examples.simulate import compare, simulate
from rlprims import algorithms, lab
from rlprims.cli import main
from rlprims.data_proto import DataProto
from rlprims.runs.records import read_rollouts
from tests import tiny
from tests.trainer.runs import small_run


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_json_lines_by_the_vocabulary(tmp_path):
    rows = [
        {"prompt": "2+2", "response_tokens": ["4"], "old_log_probs": [-0.5], "log_probs": [-0.25], "score": 1},
        {"prompt": "2+2", "response_tokens": ["5", "!"], "old_log_probs": [-2, -1], "log_probs": [-2, -1], "score": 0},
    ]
    batch = lab.load_jsonl(written(tmp_path / "rows.jsonl", rows))
    assert batch["response_mask"].tolist() == [[True, False], [True, True]]
    assert batch["old_log_probs"].tolist() == [[-0.5, 0.0], [-2.0, -1.0]]
    assert batch["group_ids"].tolist() == [0, 0]
    table = simulate(algorithms.rloo(), batch)
    assert table["token"] == ["4", "5", "!"]
    assert table["ratio"] == pytest.approx([math.exp(0.25), 1.0, 1.0])
    assert table["advantage"] == [1.0, -1.0, -1.0]


def test_a_mask_of_one_s_own_is_kept(tmp_path):
    rows = [{"response_tokens": ["call", "result", "so"], "response_mask": [1, 0, 1], "scores": 1.0, "group_ids": 0}]
    batch = lab.load_jsonl(written(tmp_path / "rows.jsonl", rows))
    assert batch["response_mask"].tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no responses"),
        ([[1]], r"rows\.jsonl:1: expected an object with fields, got list"),
        ([{"response": "a", "score": 1}, {"response": "b"}], "differ in \\['scores'\\]"),
        (
            [{"response_tokens": ["a"], "log_probs": [1.0, 2.0]}],
            "expected as many per-token entries",
        ),
    ],
)
def test_load_jsonl_names_rows_that_do_not_fit(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        lab.load_jsonl(written(tmp_path / "rows.jsonl", rows))


def test_a_run_directory(tmp_path):
    line = {"prompt": "2+2", "answer": "4", "data_source": "sums", "ended": "stop", "prompt_ids": [1, 2], "step": 3}
    line |= {"response": "4.", "response_tokens": ["4", "."], "response_ids": [4, 5], "rollout_log_probs": [-0.5, -0.1]}
    rows = [
        {**line, "group": 8, "score": 1.0, "acc": 1.0, "status": "trained", "advantages": [1, 1]},
        {**line, "group": 8, "score": 0.0, "acc": 0.0, "status": "trained", "advantages": [-1, -1]},
        {**line, "group": 9, "score": 0.0, "acc": 0.0, "status": "surplus", "advantages": None},
        {**line, "group": 8, "score": 0.0, "status": "greedy baseline", "advantages": None},
    ]
    (tmp_path / "rollouts").mkdir()
    written(tmp_path / "rollouts" / "step_000003.jsonl", rows)
    batch = lab.load_run(tmp_path)
    assert len(batch) == 3
    assert batch["responses"].tolist() == [[4, 5]] * 3
    torch.testing.assert_close(batch["rollout_log_probs"], torch.tensor([[-0.5, -0.1]] * 3))
    table = simulate(algorithms.dapo(), batch)
    assert table["cause"][4:] == ["dropped: acc is 0 throughout"] * 2
    assert table["gradient"][0] > 0 > table["gradient"][2]


def test_groups_may_have_names(tmp_path):
    rows = [
        {"group": name, "response": "it is", "score": score}
        for name, score in [("math-7", 1.0), ("math-2", 0.0), ("math-7", 0.0)]
    ]
    batch = lab.load_jsonl(written(tmp_path / "rows.jsonl", rows))
    assert batch["group_ids"].tolist() == [0, 1, 0]
    assert list(batch["group"]) == ["math-7", "math-2", "math-7"]
    assert simulate(algorithms.rloo(), batch)["advantage"] == [1.0, 1.0, 0.0, 0.0, -1.0, -1.0]
    named = {**dict(batch.batch.items()), "group_ids": ["math-7", "math-2", "math-7"]}
    assert simulate(algorithms.rloo(), named)["advantage"] == [1.0, 1.0, 0.0, 0.0, -1.0, -1.0]


def recorded_run(folder: Path, settings: dict) -> Path:
    """A run of four steps that records; its algorithm reads the sampler's log-probs."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings | {"run_dir": str(folder / "run"), "steps": 4}))
    assert main(["train", str(path)]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    questions = tiny.write_jsonl(folder / "sums.jsonl", tiny.sums(20))
    return recorded_run(folder, small_run(tiny.save_model(folder / "model"), questions, folder / "run"))


def test_a_recorded_run_has_its_old_log_probs_and_several_steps(trained):
    whole = lab.load_run(trained, range(1, 5))
    assert sorted(set(whole["step"].tolist())) == [1, 2, 3, 4]
    used = [
        label for label, status in zip(whole["group_ids"].tolist(), whole["status"], strict=True) if status == "trained"
    ]
    assert max(used.count(label) for label in set(used)) == 3  # the group's size: none is there twice
    one = lab.load_run(trained, 3)  # sampled by the policy that the step begins with, as no surplus is in it
    assert set(one["step"].tolist()) == {3}
    mask = one["response_mask"]
    torch.testing.assert_close(one["old_log_probs"][mask], one["rollout_log_probs"][mask], atol=1e-4, rtol=0)
    table = compare([algorithms.dapo(), algorithms.rloo()], whole).responses
    assert {"step", "group", "score", "answer", "push dapo"} <= table.columns.keys()
    for row, label, score in zip(table["row"], table["group"], table["score"], strict=True):
        assert (label, score) == (int(whole["group_ids"][row]), float(whole["scores"][row]))


def with_log_probs(run, step, policy):
    return lab.load_run(run, step).union(DataProto.from_dict({"log_probs": log_probs(run, step, policy)}))


def test_ratios_of_a_checkpoint_to_what_was_sampled(trained):
    """Of the policy before the step they are 1; of the one after it they are those that transformers gives."""
    policies = {step: trained / f"checkpoints/step_{step:06d}/policy" for step in (2, 4)}
    before = simulate(algorithms.dapo(), with_log_probs(trained, 3, policies[2]))
    assert before["ratio"] == pytest.approx([1.0] * len(before), abs=1e-4)
    table = simulate(algorithms.dapo(), with_log_probs(trained, 4, policies[4]))
    assert max(abs(ratio - 1) for ratio in table["ratio"]) > 1e-3
    row = next(row for row in read_rollouts(trained, 4) if row.status == "trained")
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    logits = AutoModelForCausalLM.from_pretrained(policies[4])(ids).logits[0, len(row.prompt_ids) - 1 : -1]
    now = logits.log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
    expected = (now - torch.tensor(row.old_log_probs)).exp()
    assert table.where(row=0)["ratio"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_truncated_sampler_has_no_ratio_of_whole_distributions(trained):
    config = (trained / "config.yaml").read_text()
    (trained / "config.yaml").write_text(config.replace("top_p: 1.0", "top_p: 0.9"))
    with pytest.raises(ValueError, match="sampled with top_k, top_p or min_p"):
        log_probs(trained, 4, trained / "checkpoints/step_000004/policy")
    (trained / "config.yaml").write_text(config)


def test_load_jsonl_leaves_what_an_episode_read_outside_its_mask(tmp_path):
    line = {"prompt": "2+2", "ended": "stop", "prompt_ids": [1], "step": 1, "group": 0, "status": "trained"}
    line |= {"response_tokens": ["call", "result", "so"], "rollout_log_probs": [-0.5, 0.0, -0.25]}
    line |= {"turn_ids": [0, 0, 1], "observation": [0, 1, 0], "turn_rewards": {"0": 0.0, "1": 1.0}}
    (tmp_path / "rollouts").mkdir()
    rows = [{**line, "score": 1.0, "advantages": [1, 0, 1]}, {**line, "score": 0.0, "advantages": [-1, 0, -1]}]
    written(tmp_path / "rollouts" / "step_000001.jsonl", rows)
    batch = lab.load_run(tmp_path)
    assert batch["response_mask"].tolist() == [[True, False, True]] * 2
    assert batch["turn_ids"].tolist() == [[0, 0, 1]] * 2
    table = simulate(algorithms.rloo(), batch)
    assert table["cause"] == ["", "masked", ""] * 2
    assert table["advantage"] == [1.0, 0.0, 1.0, -1.0, 0.0, -1.0]


def test_load_jsonl_reads_verls_dumps(tmp_path):
    rows = [
        {"input": "user\n2+2", "output": "it is 4", "gts": "4", "score": 1.0, "step": 7, "acc": True},
        {"input": "user\n2+2", "output": "5", "gts": "4", "score": 0.0, "step": 7, "acc": False},
    ]
    batch = lab.load_verl(written(tmp_path / "7.jsonl", rows))
    assert batch["response_mask"].sum(-1).tolist() == [3, 1]
    assert list(batch["answer"]) == ["4", "4"]
    table = simulate(algorithms.dapo(), batch)
    assert table["token"] == ["it", " is", " 4", "5"]
    assert table["coefficient"] == [1.0] * 4


def test_load_jsonl_reads_trls_logs():
    rows = [
        {"step": 1, "prompt": "2+2", "completion": "it is 4", "right": 1.0, "format": 0.5, "advantage": 0.7},
        {"step": 1, "prompt": "2+2", "completion": [{"role": "assistant", "content": "5"}], "right": 0.0,
         "format": math.nan, "advantage": -0.7},
    ]  # fmt: skip
    batch = lab.load_trl(rows)
    assert batch["scores"].tolist() == [1.5, 0.0]
    assert batch["response_mask"].sum(-1).tolist() == [3, 1]
    assert batch["trl_advantages"].tolist() == pytest.approx([0.7, -0.7])
    assert lab.load_trl(rows, rewards={"right": 2.0})["scores"].tolist() == [2.0, 0.0]
    assert simulate(algorithms.rloo(), batch)["advantage"] == [1.5, 1.5, 1.5, -1.5]
    with pytest.raises(ValueError, match="wrong"):
        lab.load_trl(rows, rewards=["wrong"])


def test_trl_s_parquet_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"step": 1, "prompt": "2+2", "completion": "4", "right": 1.0, "advantage": 0.0}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions_00001.parquet")
    assert lab.load_trl(tmp_path / "completions_00001.parquet")["scores"].tolist() == [1.0]
