"""Rows with images become examples whose images follow them: from the file to what verifiers read, in every layout."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Image
from torch import Tensor
from transformers import AutoTokenizer

from rlprims.data_proto import DataProto
from rlprims.doctor.rows import of_file, survey
from rlprims.execution import BatchStream
from rlprims.rewards._outcome import encoded as encoded_row
from rlprims.trainer.data import DataConfig, Example, Examples, load_examples
from rlprims.trainer.scoring.rewards import answer_check, call_rewards
from rlprims.trainer.scoring.settings import RewardConfig, ScoringConfig
from rlprims.trainer.sources.group import Group
from rlprims.trainer.sources.responses import Responses
from tests import tiny
from tests.vision.made import BLUE, GREEN, PATCHES, RED, encoded, picture, tokenizer

IMAGE = {"type": "image"}
LAYOUTS = ("a text", "trl", "trl without places", "verl", "openai")
BROKEN = ("missing", "damaged", "large", "url", "no place", "no image", "template", "teacher", "video")


def load(path: Path, **settings: Any) -> Examples:
    config = DataConfig(train=path, **{"template": "chat", **settings})
    return load_examples(path, config, tokenizer(), max_prompt_length=settings.pop("most", 60))


def rows_of(tmp_path: Path, *rows: dict[str, Any], **settings: Any) -> list[Example]:
    return list(load(tiny.write_jsonl(tmp_path / "rows.jsonl", list(rows)), **settings).rows)


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def tokens(example: Example) -> int:
    """Placeholders in the prompt."""
    return tokenizer().convert_ids_to_tokens(example.prompt_ids).count("<image>")


def layouts(folder: Path) -> dict[str, dict[str, Any]]:
    """One row, in several layouts."""
    for name, data in (("a", RED), ("b", BLUE)):
        (folder / f"{name}.png").write_bytes(data)
    text = {"type": "text", "text": "How many?"}
    parts = [{"type": "image_url", "image_url": {"url": uri(data)}} for data in (RED, BLUE)]
    return {
        "a text": {"question": "How many?", "answer": "2", "images": ["a.png", "b.png"]},
        "trl": {
            "prompt": [{"role": "user", "content": [IMAGE, IMAGE, text]}],
            "images": [{"path": "a.png"}, {"bytes": base64.b64encode(BLUE).decode()}],
            "solution": "2",
        },
        "trl without places": {
            "prompt": [{"role": "user", "content": "How many?"}],
            "images": ["a.png", "b.png"],
            "solution": "2",
        },
        "verl": {
            "prompt": [{"role": "user", "content": "<image><image>How many?"}],
            "images": [{"path": "a.png", "bytes": None}, {"path": "b.png", "bytes": None}],
            "reward_model": {"ground_truth": "2"},
            "data_source": "geometry",
        },
        "openai": {"prompt": [{"role": "user", "content": [*parts, text]}], "answer": "2"},
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_example(name: str, tmp_path: Path) -> None:
    (example,) = rows_of(tmp_path, layouts(tmp_path)[name])
    assert example.prompt == "<image><image>How many?"
    assert (example.question, example.answer, example.images) == ("How many?", "2", (RED, BLUE))
    assert tokens(example) == 2 * PATCHES
    assert "images" not in example.fields  # they are once in an example


@pytest.mark.parametrize("suffix", ["parquet", "folder"])
def test_a_column_of_datasets(suffix: str, tmp_path: Path) -> None:
    """As stored bytes, and as the decoded image of PIL."""
    made = Dataset.from_dict({"question": ["How many?"], "answer": ["1"], "image": [{"bytes": RED, "path": None}]})
    made = made.cast_column("image", Image())
    path = tmp_path / f"rows.{suffix}"
    made.to_parquet(path) if suffix == "parquet" else made.save_to_disk(path)
    (example,) = load(path, images="image").rows
    assert example.images == ((RED,) if suffix == "parquet" else (encoded(picture("red")),))
    assert tokens(example) == PATCHES


def test_rows_with_and_without_images_are_in_one_file(tmp_path: Path) -> None:
    rows = [{"question": "How many dots?", "answer": "1", "images": None}]
    rows += [{"question": "Where?", "answer": "2", "images": [uri(GREEN)]}]
    plain, seen = rows_of(tmp_path, *rows)
    assert (plain.images, plain.prompt, tokens(plain)) == ((), "How many dots?", 0)
    assert (seen.images, seen.prompt) == ((GREEN,), "<image>Where?")


def test_the_key_of_an_example_has_its_images(tmp_path: Path) -> None:
    rows = [{"question": "Where?", "answer": "1", "images": [uri(data)]} for data in (RED, GREEN, RED)]
    one, other, same = (example.key for example in rows_of(tmp_path, *rows))
    assert one == same != other


def test_a_system_message_and_tools_stay(tmp_path: Path) -> None:
    (example,) = rows_of(tmp_path, {"question": "Where?", "answer": "1", "images": uri(RED)}, system="dots")
    assert example.prompt == "dots<image>Where?"


def broken(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """Rows that cannot be used, their settings, and the error."""
    (folder / "half.png").write_bytes(RED[:50])
    row = {"question": "Where?", "answer": "1"}
    return {
        "missing": ({**row, "images": "none.png"}, {}, "image none.png: no such file in "),
        "damaged": ({**row, "images": "half.png"}, {}, "image half.png: "),
        "large": ({**row, "images": uri(encoded(picture("red", 20_000, 1)))}, {}, "got 20000 x 1"),
        "url": ({**row, "images": "http://127.0.0.1:9/a.png"}, {}, "nothing is fetched: set data.images_from: http"),
        "no place": ({**row, "question": "<image><image>", "images": uri(RED)}, {}, "got 1 images for 2"),
        "no image": ({**row, "question": "<image>", "images": []}, {}, "got 0 images for 1"),
        "template": ({**row, "images": uri(RED)}, {"template": "{question}"}, "expected data.template: chat"),
        "teacher": ({**row, "images": uri(RED)}, {"teacher_template": "{question}"}, "leave it out"),
        "video": (
            {**row, "question": [{"role": "user", "content": [IMAGE, {"type": "video"}]}], "images": uri(RED)},
            {},
            "expected a text in role and content",
        ),
    }


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_row_is_one_line_with_its_place(name: str, tmp_path: Path) -> None:
    row, settings, message = broken(tmp_path)[name]
    good = {"question": "Where?", "answer": "1"}
    with pytest.raises(ValueError, match=message) as found:
        rows_of(tmp_path, good, row, **settings)
    line = str(found.value)
    assert line.startswith(f"{tmp_path / 'rows.jsonl'}:2: ")
    assert "\n" not in line
    kept = load(tmp_path / "rows.jsonl", on_bad_row="skip", **settings)
    assert (len(kept.rows), kept.bad.count) == (1, 1)


def test_a_model_of_text_refuses_images_unless_the_field_is_not_read(tmp_path: Path) -> None:
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+1=", "answer": "2", "images": [uri(RED)]}])
    of_text = AutoTokenizer.from_pretrained(tiny.save_model(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: model\.path: expected a model with a processor of images"):
        load_examples(path, DataConfig(train=path, template="chat"), of_text, max_prompt_length=50)
    (example,) = load_examples(path, DataConfig(train=path, images=None), of_text, max_prompt_length=50).rows
    assert example.images == ()


def test_a_prompt_with_images_is_left_out_but_not_cut(tmp_path: Path) -> None:
    rows = [{"question": "Where?", "answer": "1", "images": [uri(RED)] * n} for n in (1, 4)]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    found = load(path)
    assert (len(found.rows), found.filtered) == (1, 1)
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: the prompt has 78 tokens, .*images cannot be cut"):
        load(path, overlong_prompts="truncate")


def test_examples_are_on_disk(tmp_path: Path) -> None:
    """Also the images of a large file are not in memory."""
    rows = [{"question": "Where?", "answer": str(i), "images": [uri(RED)]} for i in range(5)]
    found = load(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))
    assert not found.rows._in_memory  # type: ignore[attr-defined]
    assert [example.images for example in found.rows] == [(RED,)] * 5


def answers(prompts: DataProto, *args: Any, **how: Any) -> DataProto:
    """Every prompt with the response of one token."""
    width = max(map(len, prompts["prompt_ids"]))
    ones = torch.ones(len(prompts), 1, dtype=torch.int64)
    padded = torch.stack([torch.tensor([0] * (width - len(ids)) + list(ids)) for ids in prompts["prompt_ids"]])
    columns: dict[str, Tensor] = {"prompts": padded, "responses": 9 * ones, "response_mask": ones.bool()}
    columns["attention_mask"] = torch.cat([padded > 0, ones.bool()], 1)
    return prompts.union(DataProto.from_dict(columns))


def groups_of(examples: list[Example], *, has_images: bool) -> list[DataProto]:
    source = Responses(BatchStream(answers), tokenizer(), has_images=has_images)
    for i, example in enumerate(examples):
        source.begin(Group(i, example, range(4 * i, 4 * i + 4)))
    return list(source.take().values())


def same(response: str, answer: str, images: tuple[bytes, ...]) -> float:
    return float(images == {"red": (RED,), "two": (RED, BLUE), "none": ()}[answer])


def test_a_group_has_its_images_once_and_verifiers_get_them(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "red", "images": [uri(RED)]}, {"question": "b", "answer": "none"}]
    rows += [{"question": "c", "answer": "two", "images": [uri(RED), uri(BLUE)]}]
    examples = rows_of(tmp_path, *rows)
    groups = groups_of(examples, has_images=True)
    assert all(len({id(cell) for cell in group["images"]}) == 1 for group in groups)
    batch = DataProto.concat(groups)
    reward = RewardConfig(fn=f"{__name__}.same")
    scores = call_rewards([reward], batch, ScoringConfig()).scores
    assert scores.tolist() == [1.0] * 12
    answer_check([reward])("red", "", {"images": ()})


def test_rows_with_other_images_are_no_duplicates(tmp_path: Path) -> None:
    rows = [{"question": "Where?", "answer": "1", "images": [name]} for name in ("a.png", "b.png", "a.png")]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", rows)
    assert sorted(survey(of_file(path, "prompts", None, "chat", None)).contents.values()) == [1, 2]


def test_workers_and_servers_get_base64() -> None:
    assert json.loads(encoded_row((RED, b""))) == [base64.b64encode(RED).decode(), ""]


def test_batches_of_texts_have_no_column(tmp_path: Path) -> None:
    (example,) = rows_of(tmp_path, {"question": "How many?", "answer": "1"})
    (group,) = groups_of([example], has_images=False)
    assert "images" not in group


@pytest.mark.parametrize(
    "row",
    [
        {"question": "<image>How many?"},
        {"question": [{"role": "user", "content": "<image>How many?"}]},
        {"question": "<image>How many?", "image": uri(RED)},
    ],
    ids=["a text", "a chat", "LLaVA's name of the field"],
)
def test_a_place_of_an_image_in_a_row_without_one_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the text has <image>, the place of an image, and the row no image"):
        rows_of(tmp_path, {**row, "answer": "4"})
