"""Rows with images: in a batch, sampled and trained they have the numbers that each has alone in transformers."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, Sampling
from rlprims.execution._columns import left_padded, right_padded
from rlprims.execution.hf import Generation, Training, with_counts
from rlprims.execution.hf._families import VISION_MODELS
from rlprims.execution.hf._vision import placeholders
from rlprims.vision.processor import load_processor
from tests.execution import vision_zoo
from tests.execution.execution_contract import OPTIMIZER

PICTURES = [vision_zoo.picture(i, *size) for i, size in enumerate([(20, 12), (8, 30), (16, 16), (33, 9)])]
ROWS = (
    ("ab{}c", PICTURES[:1]),
    ("d{}{}", PICTURES[1:3]),
    ("1+2=", []),
    ("ab{}c", PICTURES[3:]),
    ("ab{}c", PICTURES[:1]),
)
"""The second ends with an image. The first, fourth and last have the same text."""
KINDS = [pytest.param(kind, id=kind) for kind in vision_zoo.KINDS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a type's model, its processor, and the model as transformers alone loads it."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = vision_zoo.save(kind, tmp_path_factory.mktemp(kind))
            model = AutoModelForImageTextToText.from_pretrained(folder).eval()
            made[kind] = str(folder), load_processor(str(folder)), model
        return made[kind]

    return get


def read_by(processor, text, images):
    """What the processor of transformers makes of a prompt."""
    text = text.format(*[f"<begin>{processor.image_token}<end>"] * len(images))
    pictures = [[vision_zoo.opened(image) for image in images]] if images else None
    return dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))


def prompts_of(processor, rows=ROWS):
    ids = [read_by(processor, *row)["input_ids"][0].tolist() for row in rows]
    columns = {"prompt_ids": ids, "images": [tuple(images) for _, images in rows]}
    return DataProto.from_dict({"sample_id": torch.arange(len(rows))}, columns)


def batch_of(processor, rows=ROWS):
    """Ragged prompts and responses."""
    prompts = prompts_of(processor, rows)
    lengths = [(6, 3, 5, 1, 4)[i % 5] for i in range(len(rows))]
    generator = torch.Generator().manual_seed(1)
    responses = [torch.randint(5, 30, (n,), generator=generator).tolist() for n in lengths]
    ids = list(prompts["prompt_ids"])
    left, in_prompt = left_padded(ids, max(map(len, ids)), 0)
    right, mask = right_padded(responses, 6, 0)
    tensors = {"prompts": left, "responses": right, "attention_mask": torch.cat([in_prompt, mask], 1)}
    return DataProto.from_dict(
        {**tensors, "response_mask": mask, "advantages": mask * 1.0}, {"images": prompts["images"]}
    )


def alone(model, processor, row, response, **changes):
    """(t,): the log-probs of a response by one forward pass of transformers, without padding, cache or library."""
    read = read_by(processor, *row)
    read["input_ids"] = torch.cat([read["input_ids"], response[None]], 1)
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in read:
            read[name] = torch.nn.functional.pad(read[name], (0, len(response)), value=int(name == "attention_mask"))
    model.base_model.rope_deltas = None
    logits = model(**read, use_cache=False).logits[0, -len(response) - 1 : -1].float()
    logits[:, placeholders(model.config)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]


def each_alone(model, processor, batch, rows=ROWS):
    found = torch.zeros(batch["responses"].shape)
    for i, row in enumerate(rows):
        length = int(batch["response_mask"][i].sum())
        found[i, :length] = alone(model, processor, row, batch["responses"][i, :length])
    return found


def training_of(folder, updates=2, algorithm=None, optimizer=OPTIMIZER, **changes):
    config = ModelConfig(path=folder, device="cpu", **changes)
    return Training(config, optimizer, algorithm=algorithm or algorithms.reinforce(), temperature=1.0, updates=updates)


def update(training, batch):
    whole, totals = with_counts(batch, algorithms.reinforce())
    return training.update(whole, algorithms.reinforce(), totals)


def close(actual, expected, atol=1e-5):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=atol)


def test_every_type_has_a_tiny_model():
    assert {*vision_zoo.KINDS} == {*VISION_MODELS}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_a_batch_are_those_alone(saved, kind):
    folder, processor, model = saved(kind)
    batch = batch_of(processor)
    with torch.no_grad():
        expected = each_alone(model, processor, batch)
    training = training_of(folder)
    found = training.log_probs(batch)
    close(found, expected)
    assert torch.equal(training.log_probs(batch), found)
    longest = int(batch["attention_mask"].sum(-1).max())
    small = training_of(folder, max_tokens_per_micro_batch=longest).log_probs(batch)
    close(small, expected)
    blind = batch[torch.arange(len(batch))]
    blind.non_tensor_batch["images"][:] = [tuple(row[::-1]) for row in batch["images"]]
    swapped = training.log_probs(blind)
    close(swapped[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    assert (swapped[1] - expected[1]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_rows_are_those_alone(saved, kind):
    """Two samples of each prompt, most of which end before the others."""
    folder, processor, model = saved(kind)
    rows = [row for row in ROWS for _ in range(2)]
    training = training_of(folder)
    generation = Generation(training.policy.module, vision_zoo.tokenizer(), max_rows=64, model=training.model)
    generation.end_ids = [*range(1, 12)]
    batch = generation.generate(prompts_of(processor, rows), Sampling(max_new_tokens=12), seed=3, prompt_width=None)
    lengths = batch["response_mask"].sum(-1)
    assert lengths.min() < 6 < lengths.max()
    with torch.no_grad():
        close(batch["rollout_log_probs"], each_alone(model, processor, batch, rows))
    close(training.log_probs(batch), batch["rollout_log_probs"])
    first = {tuple(row) for i in (0, 1, 8, 9) for row in [batch["responses"][i].tolist()]}
    assert len(first) > 1
