"""Stored rows with images: their ids are the processor's, their loss is that of each row alone, and a run resumes."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlprims import losses
from rlprims.algorithms import use
from rlprims.cli import main
from rlprims.execution import Kind, ModelConfig, OptimizerConfig
from rlprims.execution.hf import StoredTraining, with_counts
from rlprims.execution.hf._vision import placeholders
from rlprims.fit.config import FitConfig, FitDataConfig
from rlprims.fit.loop import reference_log_probs
from rlprims.fit.rows import Reader, StoredRow, StoredRows, as_batch
from rlprims.runs.rows import OnDisk
from rlprims.vision.processor import ImageChat, load_processor
from tests import tiny
from tests.execution import vision_zoo
from tests.trainer.runs import metrics_of, rlprims
from tests.vision.made import BLUE, GREEN, RED, build_processor, encoded, picture

from warm_up import build_model  # isort: skip - of examples/dots, whose folder tests.vision.made adds

TEMPLATE = (
    "{% for m in messages %}{{ 'b' if m.role == 'user' else 'c' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<begin>IMAGE<end>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<eos>' if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}c{% endif %}"
)
PICTURES = [vision_zoo.picture(i, *size) for i, size in enumerate([(20, 12), (8, 30), (16, 16)])]
IMAGE = {"type": "image"}
Saved = Callable[[str], Path]


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def said(*contents: Any) -> list[dict[str, Any]]:
    """The user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS = (
    said([words("a"), IMAGE, words("1+2=")], "3", [words("d"), IMAGE, IMAGE], "ef"),
    said([IMAGE, words("1=")], "12", "2=", "3"),
    said("2+2=", "4"),
)
USED = (PICTURES, PICTURES[1:2], [])
"""The images of each chat. The first has two in its second turn."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    made: dict[str, Path] = {}

    def get(kind: str, seed: int = 0) -> Path:
        name = f"{kind}-{seed}"
        if name not in made:
            made[name] = vision_zoo.save(kind, tmp_path_factory.mktemp(name), seed=seed)
            token = load_processor(str(made[name])).image_token
            (made[name] / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", token))
            load_processor.cache_clear()
        return made[name]

    return get


def read(folder: Path, path: Path, *rows: Any, kind: Kind = "demonstrations", window: int = 200, **data: Any) -> Any:
    tokenizer = load_processor(str(folder)).tokenizer
    tokenizer.name_or_path = str(folder)
    tiny.write_jsonl(path, list(rows))
    return Reader(FitDataConfig(train=path, **data), kind, tokenizer, [1], window).read(path)


def stored(folder: Path, path: Path) -> StoredRows:
    chats = zip(CHATS, USED, strict=True)
    return read(folder, path, *({"messages": chat, "images": [uri(x) for x in used]} for chat, used in chats))


def by_transformers(processor: Any, chat: list[dict[str, Any]], images: list[bytes]) -> dict[str, Tensor]:
    """What the processor of transformers makes of a whole chat by itself."""
    given = iter(images)
    parts = [[words(m["content"])] if isinstance(m["content"], str) else m["content"] for m in chat]
    shown = [
        [{**IMAGE, "image": vision_zoo.opened(next(given))} if part == IMAGE else part for part in content]
        for content in parts
    ]
    messages = [{**m, "content": content} for m, content in zip(chat, shown, strict=True)]
    return dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt"))


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_ids_are_the_processors_and_what_the_assistant_wrote_is_learned(
    kind: str, saved: Saved, tmp_path: Path
) -> None:
    processor = load_processor(str(saved(kind)))
    rows = stored(saved(kind), tmp_path / "rows.jsonl").rows
    for row, chat, images in zip(rows, CHATS, USED, strict=True):
        (response,) = row.responses
        ids = by_transformers(processor, chat, images)["input_ids"][0].tolist()
        assert row.prompt_ids + response.ids == ids
        learned = [token for token, own in zip(response.ids, response.learned, strict=True) if own]
        assert processor.tokenizer.decode(learned) == "".join(m["content"] + "<eos>" for m in chat[1::2])
        assert row.images == tuple(images)
    assert isinstance(rows, OnDisk)
    assert not rows._in_memory


def alone(model: Any, processor: Any, row: StoredRow, answer: int, chat: Any) -> Tensor:
    """The log-prob of what is learned of a row, by one forward pass of transformers on it alone."""
    inputs, response = by_transformers(processor, chat, list(row.images)), row.responses[answer]
    model.base_model.rope_deltas = None
    logits = model(**inputs, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1].float()
    logits[:, placeholders(model.config)] = -torch.inf
    ids, own = inputs["input_ids"][0, len(row.prompt_ids) :], torch.tensor(response.learned)
    assert ids.tolist() == response.ids
    return logits[own].log_softmax(-1).gather(-1, ids[own][:, None]).sum()


def gradients(value: Tensor, module: Any) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, [*module.parameters()], allow_unused=True, materialize_grads=True)
    return dict(zip((name for name, _ in module.named_parameters()), found, strict=True))


def same_step(training: StoredTraining, batch: Any, units: int, expected: Tensor, model: Any) -> None:
    """The loss and the gradient of a step are those of ``expected``."""
    whole, totals = with_counts(batch, training.algorithm)
    parts, forward = list(training._micro_batches(whole)), training._forward(units)
    assert len(parts) > 1
    losses_ = [forward({**part.data, **totals})[0] for part in parts]  # type: ignore[dict-item]
    found = torch.stack(losses_).sum()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    ours, theirs = gradients(found, training.policy.module), gradients(expected, model)
    largest = max(float(x.abs().max()) for x in theirs.values())
    assert largest > 1e-2
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * max(1, largest), msg=name)


def training_of(folder: Path, loss: Any, **model: Any) -> StoredTraining:
    how: dict[str, Any] = {"aggregation": use(losses.token_mean), "tokenizer": vision_zoo.tokenizer(), "updates": 2}
    settings = ModelConfig(path=str(folder), device="cpu", **{"vision": "trained", **model})
    return StoredTraining(settings, OptimizerConfig(lr=1e-2), loss=loss, **how)


STEPS = ["qwen2_5_vl", "idefics3", "gemma3", "llava"]


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_on_demonstrations_is_that_of_each_alone(kind: str, saved: Saved, tmp_path: Path) -> None:
    rows = list(stored(saved(kind), tmp_path / "rows.jsonl").rows)
    processor, model = load_processor(str(saved(kind))), AutoModelForImageTextToText.from_pretrained(saved(kind)).eval()
    tokens = sum(sum(row.responses[0].learned) for row in rows)
    sums = [alone(model, processor, row, 0, chat) for row, chat in zip(rows, CHATS, strict=True)]
    batch, loss = as_batch(rows, 0), use(losses.nll)
    budget = int(batch["attention_mask"].sum(-1).max()) + 1
    training = training_of(saved(kind), loss, max_tokens_per_micro_batch=budget)
    same_step(training, batch, 3, -torch.stack(sums).sum() / tokens, model)
    report = training.update_rows(batch)
    assert not report.skipped


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_of_dpo_is_that_of_each_alone(kind: str, saved: Saved, tmp_path: Path) -> None:
    """The reference is another model."""
    asked = [said([IMAGE, words("1+2="), IMAGE]), said("2="), said([words("a"), IMAGE])]
    used, answers, beta = (PICTURES[:2], [], PICTURES[2:]), (("3", "4a"), ("2", "5"), ("ab", "c")), 0.3
    given = [
        {"prompt": prompt, "chosen": said("", a)[1:], "rejected": said("", b)[1:], "images": [uri(x) for x in images]}
        for prompt, (a, b), images in zip(asked, answers, used, strict=True)
    ]
    rows = list(read(saved(kind), tmp_path / "rows.jsonl", *given, kind="pairs").rows)
    assert [row.images for row in rows] == [tuple(images) for images in used]
    processor = load_processor(str(saved(kind)))
    model, other = (AutoModelForImageTextToText.from_pretrained(saved(kind, seed)).eval() for seed in (0, 1))

    def reward(policy: Any, i: int, answer: int) -> Tensor:
        chat = [*asked[i], *said("", answers[i][answer])[1:]]
        return alone(policy, processor, rows[i], answer, chat)

    with torch.no_grad():
        reference = torch.stack([reward(other, i, j) for i in range(3) for j in (0, 1)])
    loss = use(losses.dpo, beta=beta)
    config = FitConfig(run_dir=tmp_path, loss=loss, model={"path": str(saved(kind))}, data={"train": tmp_path})
    found = reference_log_probs(training_of(saved(kind, 1), loss), rows, config, 0)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)
    ratios = [reward(model, i, j) - reference[2 * i + j] for i in range(3) for j in (0, 1)]
    margins = torch.stack([ratios[2 * i] - ratios[2 * i + 1] for i in range(3)])
    batch = as_batch(rows, 0)
    batch["ref_sequence_log_probs"] = found
    budget = 2 * int(batch["attention_mask"].sum(-1).max()) + 1
    training = training_of(saved(kind), loss, max_tokens_per_micro_batch=budget)
    same_step(training, batch, 3, -torch.nn.functional.logsigmoid(beta * margins).mean(), model)


def layouts(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """One demonstration in several layouts, with settings."""
    for name, data in (("a", RED), ("b", BLUE)):
        (folder / f"{name}.png").write_bytes(data)
    names, text = ["a.png", "b.png"], words("How many?")
    urls = [{"type": "image_url", "image_url": {"url": uri(data)}} for data in (RED, BLUE)]
    turns = [{"from": "human", "value": "<image><image>How many?"}, {"from": "gpt", "value": "2"}]
    return {
        "trl messages": ({"messages": said([IMAGE, IMAGE, text], "2"), "images": names}, {}),
        "trl without places": ({"messages": said("How many?", [words("2")]), "images": names}, {}),
        "openai": ({"messages": said([*urls, text], "2")}, {}),
        "texts": ({"prompt": "How many?", "response": "2", "images": names}, {"template": "chat"}),
        "marks": ({"prompt": "<image><image>How many?", "response": "2", "images": names}, {"template": "chat"}),
        "trl": (
            {"prompt": said([IMAGE, IMAGE, text]), "completion": said("", "2")[1:], "pictures": names},
            {"images": "pictures"},
        ),
        "sharegpt": ({"conversations": turns, "image": names}, {"images": "image"}),
    }


@pytest.fixture(scope="module")
def dots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, processor = tmp_path_factory.mktemp("dots"), build_processor(64)
    torch.manual_seed(0)
    build_model(processor).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def test_every_layout_is_the_same_row(dots: Path, tmp_path: Path) -> None:
    end = load_processor(str(dots)).tokenizer.eos_token_id
    found = {}
    for name, (row, settings) in layouts(tmp_path).items():
        tokenizer = load_processor(str(dots)).tokenizer
        path = tiny.write_jsonl(tmp_path / "rows.jsonl", [row])
        (found[name],) = (
            Reader(FitDataConfig(train=path, **settings), "demonstrations", tokenizer, [end], 64).read(path).rows
        )
    assert all(row == found["openai"] for row in found.values())
    assert found["openai"].images == (RED, BLUE)


def test_chosen_and_rejected_may_be_whole_chats(saved: Saved, tmp_path: Path) -> None:
    folder, path = saved("idefics3"), tmp_path / "rows.jsonl"
    chats = {name: said([IMAGE, words("1")], answer) for name, answer in (("chosen", "2"), ("rejected", "3"))}
    (row,) = read(folder, path, {**chats, "images": uri(RED)}, kind="pairs").rows
    explicit = {"prompt": "1", "chosen": "2", "rejected": "3", "images": uri(RED)}
    (same,) = read(folder, path, explicit, kind="pairs", template="chat").rows
    assert row == same
    own = {name: said([{**IMAGE, "image": uri(data)}], "2") for name, data in (("chosen", RED), ("rejected", BLUE))}
    with pytest.raises(ValueError, match="the two chats of a pair have different images"):
        read(folder, path, own, kind="pairs")


def test_a_tokenizer_that_reads_the_expanded_text_otherwise_is_refused(dots: Path) -> None:
    chat = ImageChat(tiny.tokenizer(), {}, load_processor(str(dots)), (RED,))
    with pytest.raises(ValueError, match="the model's processor makes other tokens of the chat"):
        chat.answered(said([IMAGE], "1"), None, first=0, end_ids=[1], end=1)


def test_the_digest_sees_images(saved: Saved, tmp_path: Path) -> None:
    rows = [{"messages": said([IMAGE, words("1")], "2"), "images": uri(data)} for data in (RED, GREEN, RED)]
    one, other, same = (read(saved("idefics3"), tmp_path / "rows.jsonl", row).digest() for row in rows)
    assert one == same != other


BAD = {
    "an answer": (said("1", [IMAGE]), {}, "got one in an answer: it cannot be learned"),
    "no place": (said([IMAGE, IMAGE], "1"), {}, "got 1 images for 2"),
    "a placeholder": (said([IMAGE, words("<image>")], "1"), {}, "expected 1 placeholders <image> in the text"),
    "a video": (said([IMAGE, {"type": "video"}], "1"), {}, "expected a text in role and content"),
    "a template": ("1", {"prompt": "messages", "response": "messages", "messages": "no"}, "data.template: chat"),
    "a prompt": (
        said([IMAGE], "1"),
        {"max_prompt_length": 9, "overlong_prompts": "truncate"},
        "overlong_prompts: filt",
    ),
    "a row": (said([IMAGE], "1" * 300), {}, "and images cannot be cut: set data.overlong_rows: filter"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_with_images_is_one_line(name: str, saved: Saved, tmp_path: Path) -> None:
    messages, settings, message = BAD[name]
    with pytest.raises(ValueError, match=message) as found:
        read(saved("idefics3"), tmp_path / "rows.jsonl", {"messages": messages, "images": uri(RED)}, **settings)
    assert str(found.value).startswith(f"{tmp_path / 'rows.jsonl'}:1: ")
    assert "\n" not in str(found.value)
    if "overlong" in message:
        short = {"messages": said([words("1")], "1")}
        filters = settings | {"overlong_prompts": "filter", "overlong_rows": "filter"}
        long = {"messages": messages, "images": uri(RED)}
        rows = read(saved("idefics3"), tmp_path / "rows.jsonl", short, long, **filters)
        assert (len(rows.rows), rows.filtered) == (1, 1)


@pytest.fixture
def settings(dots: Path, tmp_path: Path) -> dict[str, Any]:
    colours = ("red", "green", "blue")
    rows = [
        {"prompt": "How many dots?", "response": f"<answer>{i}</answer>", "images": uri(encoded(picture(c)))}
        for i, c in enumerate((*colours, *colours))
    ]
    rows.append({"prompt": "Where?", "response": "top left"})
    path = str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))
    return {
        "run_dir": str(tmp_path / "run"),
        "epochs": 2,
        "rows_per_step": 3,
        "model": {"path": str(dots)},
        "data": {"train": path, "eval": path, "template": "chat"},
        "optimizer": {"lr": 1e-3},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2, "keep": 3},
    }


def pairs_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings on pairs."""
    path = Path(settings["data"]["train"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tiny.write_jsonl(path, [{**row, "chosen": row["response"], "rejected": "red"} for row in rows])
    return {**settings, "loss": "dpo"}


def written(settings: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "model"), [("sft", {"vision": "trained", "vision_lr": 1e-4}), ("dpo", {"lora": {"rank": 2}})]
)
def test_a_resumed_run_has_the_same_numbers(
    loss: str, model: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    settings["model"] |= model
    settings = pairs_of(settings) if loss == "dpo" else settings
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    rlprims("fit", written(settings, tmp_path / "run.yaml"), f"run_dir={whole}")
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000005")
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    (resumed / "summary.json").unlink()
    rlprims("resume", resumed)
    assert metrics_of(resumed) == metrics_of(whole)
    summary = json.loads((whole / "summary.json").read_text())
    name = "nll" if loss == "sft" else "pairs/loss"
    assert summary["after"][name] < summary["before"][name]
    assert load_processor(str(whole / "checkpoints" / "step_000005" / "policy")).image_token == "<image>"


REFUSED = {
    "vision": ({"model": {"vision": "none"}}, "a idefics3 is refused|model.vision: none reads texts"),
    "packing": ({"model": {"packing": True}}, "model.packing: true: not yet with a model that reads images"),
    "head": ({"model": {"fused_head": True}}, "model.fused_head: true: not yet"),
    "scores": ({"loss": "bradley_terry"}, "a reward model reads texts, and rows have images"),
    "reference": ({"loss": "dpo", "model": {"reference": "TEXT"}}, "expected a idefics3 as model.path is"),
    "text": ({"model": {"path": "TEXT"}}, "expected a model with a processor of images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_possible_is_refused_before_a_run_begins(
    name: str, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = REFUSED[name]
    text = tiny.save_model(tmp_path / "text")
    settings = pairs_of(settings) | {"loss": changes.get("loss", "sft")}
    settings["model"] |= {key: str(text) if x == "TEXT" else x for key, x in changes.get("model", {}).items()}
    assert main(["fit", str(written(settings, tmp_path / "run.yaml"))]) != 0
    said_ = " ".join(capsys.readouterr().err.split())
    assert any(each in said_ for each in message.split("|")), said_
    assert not (tmp_path / "run").exists()


def test_data_shows_rows_with_images(settings: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert main(["data", str(written({**settings, "loss": "sft"}, tmp_path / "run.yaml"))]) == 0
    out = capsys.readouterr().out
    assert "How many dots?⟦<answer>0</answer><end_of_utterance>⟧" in out.replace("\n", "")
    assert "rows that cannot be used: 0" in out
