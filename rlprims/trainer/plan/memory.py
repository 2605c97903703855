"""The memory that a run will take, by its config: arithmetic that can be checked by hand, before anything is loaded.

Every line is one product. The model's sizes are read from its ``config.json`` alone; the weights need not be there.
Bytes are those of a process that trains, or of an engine; a peak is the larger of sampling and updating.
"""

import math
import re
from typing import Any, NamedTuple

import torch

from rlprims.execution import ModelConfig
from rlprims.trainer.config import Config
from rlprims.trainer.data import load_examples

_PROCESS = 0.42 * 2**30
"""Python, torch and transformers (of a rank: and Ray) without a model, in a CPU process. A GPU's memory has none."""

_FILE = 2**28
"""Bytes of a file of a checkpoint, as ranks write it."""
_ENGINE_PROCESS = 0.65 * 2**30
"""The same with vLLM and its engine."""

_COPIES_OF_LOGITS = 4
"""Logits, their softmax for the entropies, and in the backward pass the gradient and what makes it."""

_TILE = 2**26
"""What a fused head holds at once, roughly."""

_SAMPLER_COPIES = 4
"""float32 arrays of rows x vocabulary in a step of the sampler: two logits; a softmax and its sums in float64 are more,
but the logits are gone by then."""


class Line(NamedTuple):
    """One product of the table."""

    what: str
    bytes: float
    how: str
    lower: str
    """The setting that lowers it."""


class Plan(NamedTuple):
    """The memory that is always used, that of sampling, of an update, a checkpoint and a sync; that of an engine."""

    rank: list[Line]
    sampling: list[Line]
    update: list[Line]
    saving: list[Line]
    sending: list[Line]
    engine: list[Line]
    sync: list[Line]

    @property
    def peak(self) -> float:
        """Of a process that trains, and in ``execution: local`` samples too. A checkpoint is written meanwhile."""
        return total(self.rank) + total(self.saving) + max(map(total, (self.sampling, self.update, self.sending)))


class Prompts(NamedTuple):
    """Tokens of the mean prompt and of the longest, and how many responses an evaluation samples."""

    mean: int
    longest: int
    evaluated: int = 0


class Shape(NamedTuple):
    """Numbers of a model."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    queries: int
    """Heads x their width."""
    keys: int
    """Key-value heads x their width."""
    inner: int
    vocabulary: int
    body: int
    """Parameters of the layers; the others are the embedding, the head and the last norm."""


class MicroBatches(NamedTuple):
    """Of a rank in one update, and the tokens that they read; a shared prompt once if the rows are packed."""

    number: int
    tokens: float
    """Of the largest one, as are the next two."""
    answers: float
    """Tokens of responses."""
    slots: float
    """Tokens with a shared prompt once for each response."""
    tokens_of_step: float
    """Of all ranks, updates and micro-batches."""


def total(lines: list[Line]) -> float:
    return sum(line.bytes for line in lines)


def shape_of(model: ModelConfig) -> Shape:
    """Built without memory, so that ties and adapters are counted as they will be.

    Raises:
        ValueError: there is no config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlprims.execution.hf._adapters import adapt

    try:
        config = AutoConfig.from_pretrained(model.path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: cannot load {model.path!r}: {str(error).splitlines()[0]}") from None
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in module.parameters())
    with torch.device("meta"):
        adapted = adapt(module, model.lora)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    text = config.get_text_config()
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Shape(
        parameters=parameters,
        trained=trained,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=heads * width,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * width,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        body=sum(p.numel() for name, p in module.named_parameters() if re.search(r"\.\d+\.", name)),
    )


def lengths_of(config: Config, prompt_tokens: int | None = None) -> Prompts:
    """The prompts of a config's data, or of so many tokens each.

    Raises:
        ValueError: the data or the tokenizer cannot be read, or the prompts are an environment's.
    """
    if prompt_tokens is not None:
        return Prompts(prompt_tokens, prompt_tokens, 0)
    if config.data.environment is not None:
        raise ValueError("data.environment writes the prompts: say how long they are, --prompt-tokens 512")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        rows = load_examples(config.data.train, config.data, tokenizer, max_prompt_length=2**31).rows
        asked = (
            config.data.eval and load_examples(config.data.eval, config.data, tokenizer, max_prompt_length=2**31).rows
        )
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"{what}; without the data say how long prompts are: --prompt-tokens 512") from None
    lengths = [len(row.prompt_ids) for row in rows]
    questions = len(asked[: config.evaluation.limit]) if asked else 0
    return Prompts(round(sum(lengths) / len(lengths)), max(lengths), questions * config.evaluation.samples)


def plan(config: Config, prompts: Prompts) -> Plan:
    """The arithmetic of a config; it assumes that all responses have the maximum length.

    Raises:
        ValueError: there is no model config.
    """
    model, shape = config.model, shape_of(config.model)
    longest = prompts.longest
    (width, trained_width), response = widths(model), config.sampling.max_new_tokens
    is_ray = config.execution == "ray"
    ranks = config.ray.sharers if is_ray else 1  # that have a copy of the weights together
    half = is_ray and config.ray.mixed_precision is not None
    computed = 2 if half else width  # bytes of a number in forward and backward
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())

    frozen, over = (
        shape.parameters + (shape.trained if model.lora else 0) - shape.trained,
        f" / {ranks} ranks" * (ranks > 1),
    )
    rank = [Line("process", _PROCESS, "Python, torch, transformers", "")] if on_cpu else []
    if frozen:
        rank.append(
            Line("frozen weights", frozen * width / ranks, f"{frozen / 1e6:.1f} M x {width}{over}", "model.dtype")
        )
    more = ", ray.training_workers, ray.cpu_offload" if is_ray else ""
    if width < trained_width and not is_ray and not model.lora:
        how = f"{shape.trained / 1e6:.1f} M x {width}, rounded, to compute with"
        rank.append(Line("weights in 16 bits", shape.trained * width, how, "model.lora"))
    for what, copies, lower in (
        ("trained weights", 1, "model.lora"),
        ("gradients", 1, "model.lora"),
        ("optimizer", 2, "model.lora"),
    ):
        how = f"{shape.trained / 1e6:.1f} M x {trained_width} x {copies}{over}"
        rank.append(Line(what, shape.trained * trained_width * copies / ranks, how, f"{lower}{more}"))
    needs = config.algorithm.needs
    if "ref_log_probs" in needs and (model.reference or model.lora is None):
        how = f"{shape.parameters / 1e6:.1f} M x {width}{over}"
        rank.append(Line("reference", shape.parameters * width / ranks, how, "kl_coef: 0, model.lora"))
    if "values" in needs:
        size = shape.trained * trained_width * 4 + frozen * width
        rank.append(Line("critic with its optimizer", size / ranks, f"as the policy{over}", "another preset"))

    number, tokens, answers, slots, _ = micro_batches(config, prompts)
    checkpointed = is_ray and config.ray.activation_checkpointing
    update = [
        *([_gathered(shape, computed)] if ranks > 1 else []),
        *([_whole_gradients(config, shape, number)] if is_ray and config.ray.training_workers > 1 else []),
        *_activations(shape, tokens, slots if model.packing else tokens, computed, checkpointed),
        _logits(config, shape, answers),
    ]

    saving: list[Line] = []
    sending: list[Line] = []
    if is_ray and on_cpu:  # beside a GPU both are in the memory of the host
        if model.engine_lora is None:
            largest = shape.vocabulary * shape.hidden * width
            how = f"4 x {shape.vocabulary} words x {shape.hidden} x {width}: gathered, cast, packed, and one on its way"
            sending.append(Line("largest part of a sync", 4 * largest, how, "model.lora.sync: adapter"))
            how = f"{shape.trained / 1e6:.1f} M x {trained_width}{over}, for the engines"
            rank.append(
                Line("snapshot", shape.trained * trained_width / ranks, how, "model.lora, ray.training_workers")
            )
        how = f"{shape.trained / 1e6:.1f} M x {trained_width} x 3{over}, of weights and optimizer"
        copied = shape.trained * trained_width / ranks
        saving.append(Line("copies for a checkpoint", 3 * copied, how, "ray.training_workers"))
        saving.append(Line("a file of it", 2 * min(_FILE, 2 * copied), "2 x its size", ""))

    sampling: list[Line] = []
    engine: list[Line] = []
    sync: list[Line] = []
    of_engine = engine_width(config)
    per_token = 2 * shape.layers * shape.keys * of_engine
    if not is_ray:
        drawn = min(model.max_rows_per_generation, max(rows_sampled(config), prompts.evaluated))
        cache = drawn * (longest + response) * per_token
        how = f"{drawn} rows x {longest + response} tokens x {per_token / 1024:.1f} KiB"
        sampling.append(Line("KV cache", cache, how, "model.max_rows_per_generation"))
        size = _SAMPLER_COPIES * drawn * shape.vocabulary * 4
        how = f"{_SAMPLER_COPIES} x {drawn} rows x {shape.vocabulary} words x 4"
        sampling.append(Line("logits of a step", size, how, "model.max_rows_per_generation"))
    else:
        if on_cpu:
            engine.append(Line("process", _ENGINE_PROCESS, "Python, torch, transformers, vLLM", ""))
        devices = config.ray.tensor_parallel_size
        how = f"{shape.parameters / 1e6:.1f} M x {of_engine}" + f" / {devices} devices" * (devices > 1)
        engine.append(Line("weights", shape.parameters * of_engine / devices, how, "model.dtype"))
        cache_bytes = config.ray.kv_cache_bytes
        if cache_bytes is not None:
            fits = int(cache_bytes * devices // ((longest + response) * per_token))
            engine.append(
                Line("KV cache", cache_bytes, f"room for {fits} whole responses at once", "ray.kv_cache_bytes")
            )
        else:
            wanted = rows_sampled(config) / engine_count(config) * (longest + response) * per_token / devices
            engine.append(
                Line("KV cache, if all run at once", wanted, "the engine takes what is free", "ray.kv_cache_bytes")
            )
        adapters = model.engine_lora is not None
        if on_cpu and not adapters:
            largest = shape.vocabulary * shape.hidden * of_engine
            how = f"2 x {shape.vocabulary} words x {shape.hidden} x {of_engine}, the largest part"
            engine.append(Line("arriving weights", 2 * largest, how, "model.lora.sync: adapter"))
        sent = shape.trained * trained_width if adapters else shape.parameters * of_engine
        what = "adapters" if adapters else "whole weights"
        sync.append(Line("sync, to each engine", sent, f"{what}, after every step", "model.lora.sync: adapter"))
        sync.append(Line("sync, from each rank", sent / ranks, f"its shard of them{over}", "model.lora.sync: adapter"))
    return Plan(rank, sampling, update, saving, sending, engine, sync)


def rows_sampled(config: Config) -> int:
    return (config.prompts_per_generation or config.prompts_per_step) * config.algorithm.group_size


def engine_count(config: Config) -> int:
    pool = config.ray.roles.rollout
    return config.ray.rollout_workers if pool == "main" else config.ray.pools[pool].workers


def widths(model: ModelConfig) -> tuple[int, int]:
    """Bytes of a number of the model, and of a trained weight, of its gradient, and of each of Adam's moments."""
    return getattr(torch, model.dtype).itemsize, 4


def engine_width(config: Config) -> int:
    """Bytes of a number of an engine."""
    is_vllm = config.execution == "ray" and config.ray.engine == "vllm"
    name = (config.ray.mixed_precision if is_vllm else None) or config.model.dtype
    size: int = getattr(torch, name).itemsize
    return size


def micro_batches(config: Config, prompts: Prompts, response: float | None = None) -> MicroBatches:
    """As many rows as there are, or as the budget lets in; None: all responses have the maximum length."""
    model, algorithm = config.model, config.algorithm
    ranks = config.ray.training_workers if config.execution == "ray" else 1
    longest = prompts.longest + config.sampling.max_new_tokens
    response = response or config.sampling.max_new_tokens
    rows = config.prompts_per_step * algorithm.group_size / algorithm.mini_batches / ranks
    groups = max(1.0, rows / algorithm.group_size)
    tokens = rows * response + (groups if model.packing else rows) * prompts.mean
    budget = max(model.max_tokens_per_micro_batch or 16384, longest)
    share = min(1.0, budget / tokens)
    return MicroBatches(
        number=math.ceil(tokens / budget),
        tokens=share * tokens,
        answers=share * rows * response,
        slots=share * rows * (prompts.mean + response),
        tokens_of_step=tokens * algorithm.mini_batches * ranks,
    )


def _gathered(shape: Shape, width: int) -> Line:
    """FSDP holds the current layer whole and the next one, which is being gathered; and all that is outside them."""
    layer, outside = shape.body / shape.layers, shape.parameters - shape.body
    how = f"(2 x {layer / 1e6:.1f} M + {outside / 1e6:.1f} M) x {width}"
    return Line("gathered weights", (2 * layer + outside) * width, how, "ray.mixed_precision")


def _whole_gradients(config: Config, shape: Shape, micro_batches: int) -> Line:
    """Of all trained weights until the last micro-batch; if each is reduced, of what is outside the layers."""
    if config.ray.reduce_gradients == "once" and micro_batches > 1:
        how = f"{shape.trained / 1e6:.1f} M x 4, until the last of {micro_batches} micro-batches"
        return Line("whole gradients", shape.trained * 4, how, "ray.reduce_gradients: every_micro_batch")
    outside = 0 if config.model.lora else shape.parameters - shape.body
    return Line("whole gradients", outside * 4, f"{outside / 1e6:.1f} M x 4, outside the layers", "model.lora")


def _activations(shape: Shape, tokens: float, slots: float, width: int, checkpointed: bool) -> list[Line]:
    """What autograd keeps of a Llama's blocks for the backward pass.

    Of a token: two norms keep their input in float32, what they normalized and their output; the output layer of
    attention keeps its input, the gated MLP four arrays. Of a slot, where a shared prompt has one for each of its
    responses: queries, keys, values and the output of attention. What an adapter keeps, rank numbers, is left out.
    """
    of_token = 2 * shape.hidden * (4 + 2 * width) + (shape.queries + 4 * shape.inner) * width
    of_slot = 2 * (shape.queries + shape.keys) * width
    lower = "model.max_tokens_per_micro_batch"
    if checkpointed:
        size = tokens * shape.hidden * width * shape.layers + tokens * of_token + slots * of_slot
        how = f"{tokens:.0f} tokens x {shape.layers} layers x {shape.hidden} x {width}, and one layer whole"
        return [Line("activations", size, how, lower)]
    lower += ", ray.activation_checkpointing"
    parts = (("activations", tokens, of_token), ("inputs of attention", slots, of_slot))
    return [
        Line(what, count * size * shape.layers, f"{count:.0f} tokens x {shape.layers} layers x {text_of(size)}", lower)
        for what, count, size in parts
    ]


def _logits(config: Config, shape: Shape, answers: float) -> Line:
    whole = _COPIES_OF_LOGITS * answers * shape.vocabulary * 4
    if config.model.fused_head:
        gradient = shape.vocabulary * shape.hidden * 4 * (not config.model.lora)
        how = "a tile at a time, and the gradient of the head" if gradient else "a tile at a time"
        return Line("logits", min(whole, _TILE) + gradient, how, "model.lora")
    how = f"{_COPIES_OF_LOGITS} x {answers:.0f} response tokens x {shape.vocabulary} words x 4"
    return Line("logits", whole, how, "model.fused_head, model.max_tokens_per_micro_batch")


def table(found: Plan, *, measured: float | None = None) -> Any:
    """For a terminal."""
    from rlprims.reports.terminal import make_table

    rows: list[tuple[str, ...]] = []

    def add(title: str, lines: list[Line]) -> None:
        for i, line in enumerate(lines):
            rows.append((title if i == 0 else "", line.what, text_of(line.bytes), line.how, line.lower))

    is_ray = bool(found.engine)
    add("a rank" if is_ray else "always", found.rank)
    add("while sampling", found.sampling)
    add("in an update", found.update)
    add("while saving", found.saving)
    add("while sending", found.sending)
    rows.append(("", "peak of a rank" if is_ray else "peak", text_of(found.peak), "", ""))
    add("an engine", found.engine)
    if found.engine:
        rows.append(("", "an engine in all", text_of(total(found.engine)), "", ""))
    add("after a step", found.sync)
    if measured is not None:
        rows.append(("", "measured", text_of(measured), f"{found.peak / measured - 1:+.0%}", ""))
    return make_table(("", "what", "memory", "how", "what lowers it"), rows, title="rlprims plan")


def text_of(number: float) -> str:
    """Of bytes, for a person."""
    for unit, divisor, least in (("TiB", 2**40, 2**40), ("GiB", 2**30, 2**28), ("MiB", 2**20, 2**18)):
        if number >= least:
            return f"{number / divisor:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"
