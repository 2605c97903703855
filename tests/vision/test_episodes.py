"""Episodes with images: their prompts, rows and numbers, and what a bad image costs."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.environments import ChatRenderer, Episode, Step, answer_calls, rollout, tool
from rlprims.execution import ModelConfig, Sampling
from rlprims.execution.hf import Generation, Training
from rlprims.execution.hf._vision import placeholders
from rlprims.trainer.data import Example
from rlprims.trainer.sources.episodes import TurnPrompt, completions_of, episode_rows, turn_rows
from rlprims.trainer.sources.images import ImageRenderer
from rlprims.turns import Turn, explain, merge, to_batch
from rlprims.vision.processor import load_processor
from tests import tiny
from tests.environments.letters import says as says_letters
from tests.execution import vision_zoo
from tests.execution.execution_contract import OPTIMIZER
from tests.vision.made import BLUE, GREEN, PATCHES, RED, encoded, model, picture
from tests.vision.test_rows import uri

SIZES = ((20, 12), (8, 30), (16, 16), (12, 20))


def template(image: str, end: str) -> str:
    parts = "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}"
    text = "{% for m in messages %}" + parts + "{% if m.role == 'assistant' %}END{% endif %}{% endfor %}"
    return text.replace("IMAGE", image).replace("END", end)


class Shows:
    """One or two pictures in each message, as bytes, data URIs and images of PIL; three turns."""

    def __init__(self, number: int) -> None:
        self.images = [vision_zoo.picture(10 * number + i, *size) for i, size in enumerate(SIZES)]
        self.texts = ["ab", "d", "1+2="]

    def message(self, *images: Any) -> list[Any]:
        parts = [{"type": "image", "image": image} for image in images]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.texts.pop(0)}]}]

    def reset(self) -> Any:
        return self.message(self.images[0])

    def step(self, message: Any) -> Step:
        if len(self.texts) == 2:
            parts = self.message(vision_zoo.opened(self.images[1]))
            url = {"type": "image_url", "image_url": {"url": uri(self.images[2])}}
            return Step([{**parts[0], "content": [*parts[0]["content"], url]}])
        return Step(self.message(self.images[3])) if self.texts else Step(done=True, reward=1.0)


def play_by_model(folder: str, processor: Any, count: int) -> tuple[list[Episode], Training]:
    config = ModelConfig(path=folder, device="cpu")
    training = Training(config, OPTIMIZER, algorithm=algorithms.reinforce(), temperature=1.0, updates=2)
    generation = Generation(training.policy.module, processor.tokenizer, max_rows=64, model=config)
    generation.end_ids = [1, *range(5, 12)]

    def sample(prompt_ids: Any, sample_id: int, turn: int, images: Any) -> Any:
        rows = turn_rows([TurnPrompt(sample_id, turn, prompt_ids, images)])
        sampled = generation.generate(rows, Sampling(max_new_tokens=5), seed=0, prompt_width=None)
        sampled["weights_version"] = torch.zeros(1, dtype=torch.int64)
        return completions_of(sampled)[0]

    how = {"chat_template": template(f"<begin>{processor.image_token}<end>", tiny.EOS)}
    episodes = [
        asyncio.run(rollout(Shows(i), sample, ImageRenderer(processor, (), **how), sample_id=i)) for i in range(count)
    ]
    return episodes, training


def alone(model: Any, processor: Any, episode: Episode) -> list[torch.Tensor]:
    """The log-probs of each turn by one pass of transformers over the whole conversation with its images."""
    images = [vision_zoo.opened(each) for each in Shows(episode.sample_id).images]
    how: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": False}
    read = dict(processor(text=[processor.image_token * 4], images=[images], **how))
    image, parts, end = f"<begin>{processor.image_token}<end>", dict[str, list[torch.Tensor]](), ""
    each = [(f"{image}ab", images[:1]), (f"{image}d{image}", images[1:3]), (f"{image}1+2=", images[3:])]
    for (text, own), turn in zip(each, episode.turns, strict=True):
        said = processor(text=[end + text], images=[own], **how)
        end = tiny.EOS if turn.finish == "length" else ""
        sampled = torch.tensor([turn.sampled_ids])
        for name in read.keys() & {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}:
            fill = sampled if name == "input_ids" else torch.full_like(sampled, name == "attention_mask")
            parts.setdefault(name, []).extend([said[name], fill])
    read |= {name: torch.cat(part, 1) for name, part in parts.items()}
    assert read["input_ids"][0].tolist() == list(episode.turns[-1].token_ids)
    model.base_model.rope_deltas = None
    with torch.no_grad():
        logits = model(**read, use_cache=False).logits[0].float()
    logits[:, placeholders(model.config)] = -torch.inf
    found = logits[:-1].log_softmax(-1).gather(-1, read["input_ids"][0, 1:, None])[:, 0]
    return [found[len(t.prompt_ids) - 1 : len(t.token_ids) - 1] for t in episode.turns]


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


def gradient(training: Training, batch: DataProto) -> torch.Tensor:
    """Of a sum over sampled tokens, each with a weight of its own."""
    batch["advantages"] = torch.where(batch["response_mask"], batch["rollout_log_probs"].sin(), 0.0)
    module, total = training.policy.module, torch.zeros(())
    for part in training._parts(batch, False, None):
        scores = training._policy_scorer().token_scores(part.data, ["log_probs"])["log_probs"]
        total = total + torch.where(part.data["response_mask"], scores * part.data["advantages"], 0.0).sum()
    trained = [x for x in module.parameters() if x.requires_grad]
    grads = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return torch.cat([total.detach()[None], *(x.flatten() for x in grads)])


@pytest.mark.parametrize("kind", vision_zoo.KINDS)
def test_a_merged_row_has_the_numbers_of_its_turns_and_of_transformers_alone(kind: str, tmp_path: Path) -> None:
    folder = str(vision_zoo.save(kind, tmp_path))
    processor, module = load_processor(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
    episodes, training = play_by_model(folder, processor, 3)
    assert not any(episode.failure for episode in episodes)
    banned = placeholders(module.config)
    how: dict[str, Any] = {"tokenizer": processor.tokenizer, "pad_token_id": 0, "version": 0, "image_ids": banned}
    batch = episode_rows(episodes, [Example("", [], "", "")] * 3, [0, 0, 1], **how)
    assert len(batch) == 3, "turns extend their rows"
    mask = batch["response_mask"]
    assert [list(row) for row in batch["images"]] == [Shows(i).images for i in range(3)]
    whole = torch.isin(batch["responses"], torch.tensor(banned))
    assert whole.any()
    assert not (whole & (mask | batch["observation_mask"])).any()
    found = training.log_probs(batch)
    close(found[mask], batch["rollout_log_probs"][mask])
    for row, episode in enumerate(episodes):
        close(found[row][mask[row]], torch.cat(alone(module, processor, episode)))

    order = torch.tensor([2, 0, 1])
    close(training.log_probs(batch[order]), found[order])
    others = batch[torch.arange(3)]
    others.non_tensor_batch["images"][:] = batch["images"][order.numpy()]
    assert (training.log_probs(others) - found)[mask].abs().max() > 1e-4

    merged = to_batch([episode.rows() for episode in episodes], [0, 0, 1], pad_id=0)
    turns = to_batch([[merge([t])[0] for t in e.turns] for e in episodes], [0, 0, 1], pad_id=0)
    assert [len(row) for row in turns["images"]] == [1, 3, 4] * 3
    one, other = gradient(training, merged), gradient(training, turns)
    assert one.abs().max() > 1e-2
    close(one, other, atol=2e-5 * float(one.abs().max()))


# Without a model:


class Once:
    """One message, one answer, and the end."""

    def __init__(self, *content: Any) -> None:
        self.content = content

    def reset(self) -> Any:
        return [{"role": "user", "content": "How many dots?"}]

    def step(self, message: Any) -> Step:
        content, self.content = self.content[:1], self.content[1:]
        return Step([{"role": "user", "content": content[0]}]) if content else Step(done=True, reward=1.0)


def says(word: str) -> Callable[..., Any]:
    """A sampler of dots' tokenizer, for prompts with or without images."""
    ids = [*load_processor(str(model())).tokenizer.encode(word), 1]

    def sample(prompt_ids: Any, sample_id: int, turn: int, images: Any = ()) -> Any:
        return says_letters("")(prompt_ids, sample_id, turn).__class__(ids, [-0.5] * len(ids))

    return sample


def play(environment: Any, images: Any = (), **how: Any) -> Episode:
    renderer = ImageRenderer(load_processor(str(model())), images, **how)
    return asyncio.run(rollout(environment, says("red"), renderer))


def counts(turns: Any) -> list[int]:
    token = load_processor(str(model())).image_token_id
    return [list(turn.token_ids).count(token) for turn in turns]


def image(value: Any) -> list[Any]:
    return [{"type": "image", "image": value}, {"type": "text", "text": "Where?"}]


def test_the_images_of_a_row_are_before_the_text_of_the_first_message_alone() -> None:
    episode = play(Once("Where?", image(GREEN)), (RED, BLUE))
    assert [turn.images for turn in episode.turns] == [(RED, BLUE), (RED, BLUE), (RED, BLUE, GREEN)]
    assert counts(episode.turns) == [2 * PATCHES, 2 * PATCHES, 3 * PATCHES]
    (row,) = episode.rows()
    assert row.images == (RED, BLUE, GREEN)
    assert not any(row.response_mask[i] for i, token in enumerate(row.token_ids) if token == 4)
    assert [turn.images for turn in play(Once("Where?")).turns] == [(), ()]


BAD = {
    "damaged": (image(RED[:60]), "image in the row: "),
    "large": (image(encoded(picture("red", 20_000, 1))), "got 20000 x 1"),
    "url": ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}], "nothing is opened or fetched"),
    "path": (image(str(Path(__file__))), "nothing is opened or fetched"),
    "number": (image(3), "got int"),
    "no image": ([{"type": "image"}], "expected an image for each <image> or image part, got 0 images for 1"),
    "video": ([{"type": "video"}], "expected a text in role and content"),
    "a placeholder": ("<image>", "expected 0 placeholders <image>"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_image_that_cannot_be_used_ends_its_episode_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, message = BAD[name]
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("fetched"))
    episode = play(Once(content), (RED,))
    assert episode.failure is not None
    assert message in episode.failure
    assert "\n" not in episode.failure
    assert (episode.ended, math.isnan(episode.score), len(episode.turns)) == ("error", True, 1)
    assert dict(episode.causes) == {"messages that cannot be rendered": 1}


def test_a_class_without_has_images_is_told_so() -> None:
    renderer = ChatRenderer(load_processor(str(model())).tokenizer)
    episode = asyncio.run(rollout(Once(image(RED)), says("red"), renderer))
    assert "has_images = True" in str(episode.failure)


def test_a_tool_returns_a_picture() -> None:
    @tool
    def zoom(part: str) -> str:
        """A part of the picture."""
        return part

    class Zooms(Once):
        def step(self, message: Any) -> Step:
            (answer,) = answer_calls(message, [zoom])
            if not self.content:
                return Step(done=True)
            self.content = ()
            return Step([{**answer, "content": image(GREEN)}])

        def reset(self) -> Any:
            return super().reset(), [zoom]

    call = '<tool_call>{"name": "zoom", "arguments": {"part": "a"}}</tool_call>'
    processor = load_processor(str(model()))
    renderer = ImageRenderer(processor, (RED,))
    renderer.read = lambda ids, tools: ChatRenderer(Written(call)).read(ids, tools)  # type: ignore[method-assign]
    episode = asyncio.run(rollout(Zooms(1), says("red"), renderer))
    assert episode.failure is None
    assert [turn.images for turn in episode.turns] == [(RED,), (RED, GREEN)]
    assert len(episode.rows()) == 1


class Written:
    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: Any, **_: Any) -> str:
        return self.text


def test_a_template_that_rewrites_earlier_turns_makes_rows_of_their_own() -> None:
    """It writes only what the assistant said last."""
    rewrites = template("<image>", "<end_of_utterance>").replace(
        "{{ p.text }}", "{% if m.role == 'user' or m is sameas(messages[-1]) %}{{ p.text }}{% endif %}"
    )
    episode = play(Once(image(GREEN), image(BLUE)), (RED,), chat_template=rewrites)
    rows = episode.rows()
    assert [row.images for row in rows] == [(RED,), (RED, GREEN), (RED, GREEN, BLUE)]
    assert counts(rows) == [PATCHES, 2 * PATCHES, 3 * PATCHES]
    assert list(to_batch([rows], [0], pad_id=0)["images"]) == [row.images for row in rows]


def test_a_template_that_leaves_out_an_image_is_refused() -> None:
    last = template("{% if m is sameas(messages[-1]) %}<image>{% endif %}", "<end_of_utterance>")
    episode = play(Once(image(GREEN)), (RED,), chat_template=last)
    assert "it writes 0 of 1 images" in str(episode.failure)


def test_rows_with_equal_tokens_and_other_images_are_not_merged() -> None:
    turns = [Turn([1, 2], [3], [-0.5], images=[RED]), Turn([1, 2, 3, 8], [4], [-0.1], images=[GREEN])]
    assert [row.images for row in merge(turns)] == [(RED,), (GREEN,)]
    assert "other images" in str(explain(*turns))
    with pytest.raises(ValueError, match="other images"):
        merge(turns, strict=True)
    longer = Turn([1, 2, 3, 8], [4], [-0.1], images=[RED, GREEN])
    (row,) = merge([turns[0], longer])
    assert row.images == (RED, GREEN)
    batch = to_batch([[row], merge([turns[0]]), merge([turns[0]])], [0, 0, 0], pad_id=0)
    assert list(batch["images"]) == [(RED, GREEN), (RED,), (RED,)]
    assert batch["images"][1] is batch["images"][2]


def test_states_with_equal_tokens_and_other_images_differ() -> None:
    one, other, same = (play(Once(), (image,)).states for image in (RED, GREEN, RED))
    assert one == same != other
