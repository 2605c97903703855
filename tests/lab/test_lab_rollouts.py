"""The loaders, on files as their writers write them."""

import json
import math
from pathlib import Path

import pytest
import torch

from rlprims import algorithms, lab


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
    table = lab.simulate(algorithms.rloo(), batch)
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
        ([{"response": "a", "score": 1}, {"response": "b"}], "differ in \\['scores'\\]"),
        ([{"response_tokens": ["a"], "log_probs": [1.0, 2.0]}], "as long as the response"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        lab.load_jsonl(written(tmp_path / "rows.jsonl", rows))


def test_a_run_directory(tmp_path):
    line = {"prompt": "2+2", "answer": "4", "data_source": "sums", "ended": "stop", "prompt_ids": [1, 2], "step": 3}
    line |= {"response": "4.", "response_tokens": ["4", "."], "response_ids": [4, 5], "rollout_log_probs": [-0.5, -0.1]}
    rows = [
        {**line, "group": 8, "score": 1.0, "acc": 1.0, "fate": "trained", "advantages": [1, 1]},
        {**line, "group": 8, "score": 0.0, "acc": 0.0, "fate": "trained", "advantages": [-1, -1]},
        {**line, "group": 9, "score": 0.0, "acc": 0.0, "fate": "surplus", "advantages": None},
        {**line, "group": 8, "score": 0.0, "fate": "greedy baseline", "advantages": None},
    ]
    (tmp_path / "rollouts").mkdir()
    written(tmp_path / "rollouts" / "step_000003.jsonl", rows)
    batch = lab.load_run(tmp_path)
    assert len(batch) == 3
    assert batch["responses"].tolist() == [[4, 5]] * 3
    torch.testing.assert_close(batch["rollout_log_probs"], torch.tensor([[-0.5, -0.1]] * 3))
    table = lab.simulate(algorithms.dapo(), batch)
    assert table["cause"][4:] == ["dropped: acc is 0 throughout"] * 2
    assert table["gradient"][0] > 0 > table["gradient"][2]


def test_what_verl_dumps(tmp_path):
    rows = [
        {"input": "user\n2+2", "output": "it is 4", "gts": "4", "score": 1.0, "step": 7, "acc": True},
        {"input": "user\n2+2", "output": "5", "gts": "4", "score": 0.0, "step": 7, "acc": False},
    ]
    batch = lab.load_verl(written(tmp_path / "7.jsonl", rows))
    assert batch["response_mask"].sum(-1).tolist() == [3, 1]
    assert list(batch["answer"]) == ["4", "4"]
    table = lab.simulate(algorithms.dapo(), batch)
    assert table["token"] == ["it", " is", " 4", "5"]
    assert table["coefficient"] == [1.0] * 4


def test_what_trl_logs():
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
    assert lab.simulate(algorithms.rloo(), batch)["advantage"] == [1.5, 1.5, 1.5, -1.5]
    with pytest.raises(ValueError, match="wrong"):
        lab.load_trl(rows, rewards=["wrong"])


def test_trl_s_parquet_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"step": 1, "prompt": "2+2", "completion": "4", "right": 1.0, "advantage": 0.0}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions_00001.parquet")
    assert lab.load_trl(tmp_path / "completions_00001.parquet")["scores"].tolist() == [1.0]
