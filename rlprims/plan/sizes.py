"""The sizes of a run: of its model, prompts, micro-batches and engines. The weights of the model are not needed."""

import math
import re
from typing import Any, NamedTuple

import torch

from rlprims.execution import ModelConfig
from rlprims.trainer.config import Config
from rlprims.trainer.data import load_examples


class Prompts(NamedTuple):
    """The tokens of the mean and the longest prompt, and the number of responses that an evaluation samples."""

    mean: int
    longest: int
    evaluated: int = 0
    pixels: float = 0
    """The numbers that the images of the mean prompt are to the model."""
    rows: int = 0
    """The number of prompts; 0: unknown."""


class Shape(NamedTuple):
    """The sizes of a model."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    queries: int
    """The number of heads x the width of a head; ``keys`` of those of keys and values."""
    keys: int
    inner: int
    vocabulary: int
    body: int
    """The parameters of the layers: all but the embedding, the head, the last norm and the part that sees."""
    seeing: int = 0
    """The parameters of the part that reads images, among all."""
    patch: int = 0
    """The numbers of an image's patch."""
    widths: tuple[int, int] = (0, 0)
    """The inputs and outputs of the linear layers that read a patch, of all of them and of the widest one."""


class MicroBatches(NamedTuple):
    """The micro-batches of one update on a rank, or on a group of ranks that divide the layers, and their tokens.

    With packing the tokens of a shared prompt count once, except in ``slots``.
    """

    number: int
    tokens: float
    """Tokens of the largest micro-batch."""
    answers: float
    """Tokens of responses in the largest micro-batch."""
    slots: float
    """Tokens of the largest micro-batch. A shared prompt counts once for each response."""


def shape_of(model: ModelConfig) -> Shape:
    """Return the sizes of a model. It is built on the device ``meta``, so tied weights and adapters are counted."""
    from rlprims.execution.hf._adapters import adapt
    from rlprims.execution.hf._families import auto_class, without_data
    from rlprims.execution.hf._vision import freeze, tower

    model = model.here(weights=False)
    module: Any = freeze(without_data(auto_class(model), model.path), model)
    parameters = sum(p.numel() for p in module.parameters())
    with torch.device("meta"):
        adapted = adapt(module, model.lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    text = module.config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    seeing = tower(module)
    blocks = [sum(x.shape) for n, x in seeing.items() if x.dim() == 2 and re.search(r"\.(layers?|blocks)\.\d+\.", n)]
    patches = [x[0].numel() for n, x in seeing.items() if "patch" in n and "position" not in n and x.dim() > 1]
    return Shape(
        parameters=parameters,
        trained=trained,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=heads * width,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * width,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        body=sum(x.numel() for n, x in module.named_parameters() if re.search(r"\.\d+\.", n) and n not in seeing),
        seeing=sum(x.numel() for x in seeing.values()),
        patch=patches[0] if patches else 0,
        widths=(sum(blocks), max(blocks, default=0)),
    )


def lengths_of(config: Config, prompt_tokens: int | None = None, prompt_pixels: int = 0) -> Prompts:
    """Return the lengths of the prompts in the config's data; with ``prompt_tokens`` all prompts have this length."""
    if prompt_tokens is not None:
        return Prompts(prompt_tokens, prompt_tokens, 0, prompt_pixels)
    data = config.data
    if data.environment is not None:
        raise ValueError("data.environment writes the prompts: give their length, such as --prompt-tokens 512")
    from transformers import AutoTokenizer

    from rlprims.execution.hf._vision import pixels_of

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.here(weights=False).path)
        rows = load_examples(data.train, data, tokenizer, max_prompt_length=2**31).rows
        asked = config.evaluations().values()
        evaluated = [load_examples(one.file, data, tokenizer, max_prompt_length=2**31).rows for one in asked]
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"{what}; without the data give the length of prompts, such as --prompt-tokens 512") from None
    lengths = [len(row.prompt_ids) for row in rows]
    pixels = pixels_of(config.model.here(weights=False), [row.images for row in rows[:64]])  # enough for a mean
    responses = (len(rows[: one.limit]) * one.samples for rows, one in zip(evaluated, asked, strict=True))
    return Prompts(round(sum(lengths) / len(lengths)), max(lengths), max(responses, default=0), pixels, len(rows))


def rows_sampled(config: Config) -> int:
    return (config.prompts_per_generation or config.prompts_per_step) * config.algorithm.group_size


def engine_count(config: Config) -> int:
    pool = config.ray.roles.rollout
    return config.ray.rollout_workers if pool == "main" else config.ray.pools[pool].workers


def engine_width(config: Config) -> int:
    """Return the bytes of a number in an engine."""
    is_vllm = config.execution == "ray" and config.ray.engine == "vllm"
    name = (config.ray.mixed_precision if is_vllm else None) or config.model.dtype
    size: int = getattr(torch, name).itemsize
    return size


def micro_batches(config: Config, prompts: Prompts) -> MicroBatches:
    """Return the micro-batches of an update, if all responses have the maximum length."""
    from rlprims.execution.hf._families import packs

    model, algorithm = config.model.here(weights=False), config.algorithm
    ranks = config.ray.training_workers // config.ray.training_tensor_parallel if config.execution == "ray" else 1
    response = config.sampling.max_new_tokens
    longest = prompts.longest + response
    rows = config.prompts_per_step * algorithm.group_size / algorithm.mini_batches / ranks
    groups = max(1.0, rows / algorithm.group_size)
    tokens = rows * response + (groups if packs(model) else rows) * prompts.mean
    budget = max(model.max_tokens_per_micro_batch or 16384, longest)
    share = min(1.0, budget / tokens)
    return MicroBatches(
        number=math.ceil(tokens / budget),
        tokens=share * tokens,
        answers=share * rows * response,
        slots=share * rows * (prompts.mean + response),
    )


def part_of(shape: Shape, tensor: int) -> Shape:
    """The sizes of a model's part on each of ``tensor`` ranks that divide its layers, embedding and head."""
    names = ("parameters", "trained", "body", "queries", "keys", "inner")
    return shape._replace(**{name: getattr(shape, name) // tensor for name in names})


def text_of(number: float) -> str:
    """Format a number of bytes."""
    for unit, divisor, least in (("TiB", 2**40, 2**40), ("GiB", 2**30, 2**28), ("MiB", 2**20, 2**18)):
        if number >= least:
            return f"{number / divisor:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"
