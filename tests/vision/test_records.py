"""A record has the images of a group once, and the page of rollouts shows them."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprims.data_proto import DataProto
from rlprims.reports.rollouts import write_page
from rlprims.runs.records import read_rollouts, record_lines
from tests.reports.made_runs import MakeRun, sample
from tests.reports.test_rollout_page import Reader, embedded
from tests.vision.made import BLUE, RED

TEXT = [base64.b64encode(data).decode() for data in (RED, BLUE)]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str = "run", *, rollouts: dict[int, list[Any]]) -> Path:
        folder = tmp_path / name / "rollouts"
        folder.mkdir(parents=True)
        for step, rows in rollouts.items():
            lines = [json.dumps(row) + "\n" for row in rows]
            (folder / f"step_{step:06d}.jsonl").write_text("".join(lines))
        return folder.parent

    return make


def batch(images: list[tuple[bytes, ...]] | None) -> DataProto:
    ones = torch.ones(4, 2, dtype=torch.int64)
    texts = {name: ["a"] * 4 for name in ("prompt", "response", "answer", "data_source", "failure")}
    texts |= {"prompt_ids": [[1, 1]] * 4} | ({} if images is None else {"images": images})
    tensors = {"prompts": ones, "responses": ones, "response_mask": ones.bool(), "rollout_log_probs": ones * -0.5}
    tensors |= {"attention_mask": torch.ones(4, 4, dtype=torch.bool), "scores": torch.zeros(4)}
    tensors |= {name: torch.tensor([5, 5, 7, 7]) for name in ("group", "sample_id")} | {"ended": torch.zeros(4)}
    return DataProto.from_dict(tensors, texts)


def test_the_first_row_of_a_group_has_its_images(make_run: MakeRun) -> None:
    lines = list(record_lines(1, batch([(RED, BLUE), (RED, BLUE), (), ()]), "trained", str))
    assert [line.get("images") for line in lines] == [TEXT, None, [], None]
    rows = read_rollouts(make_run(rollouts={1: lines}))
    assert [row.images for row in rows] == [TEXT, None, [], None]
    assert all("images" not in line for line in record_lines(1, batch(None), "trained", str))


def test_the_page_has_the_images_of_a_group_and_no_other_content(make_run: MakeRun, tmp_path: Path) -> None:
    hostile = ["<img src=x>", 'AAAA" onerror="alert(1)', "javascript:alert(1)", "data:text/html;base64,AAAA", "%3Csvg"]
    rows = [sample(0, images=[TEXT[0], *hostile]), sample(1, group=1), sample(2, group=2, images=[TEXT[1]])]
    page = write_page(make_run(rollouts={1: rows}), tmp_path / "page.html")
    assert [group["images"] for group in embedded(page)["steps"][0]["groups"]] == [TEXT[:1], [], TEXT[1:]]
    policy = next(a["content"] for _, a in Reader(page.read_text()).tags if a.get("http-equiv"))
    assert policy is not None
    assert "img-src data:;" in policy
    large = make_run("large", rollouts={1: [sample(0, images=["A" * 2_000_004, TEXT[0]])]})
    assert embedded(write_page(large, tmp_path / "page.html"))["steps"][0]["groups"][0]["images"] == TEXT[:1]


def test_a_damaged_record_of_images_is_named(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match=r"line 1: images is no list"):
        read_rollouts(make_run(rollouts={1: [sample(0, images="text")]}))
