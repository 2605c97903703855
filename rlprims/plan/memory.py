"""The memory that a run will use, computed from its config before anything is loaded.

Every line of the table is one product that can be checked by hand. The sizes of the model come from its
``config.json``; the weights are not needed. Bytes are those of one training process or of one engine. The peak is a sum
of three: the memory that is always used, that of a checkpoint, and the largest of sampling, an update and a sync.
"""

import math
import re
from typing import Any, NamedTuple

import torch

from rlprims.execution import ModelConfig
from rlprims.trainer.config import Config
from rlprims.trainer.data import load_examples

_PROCESS = 0.42 * 2**30
"""Bytes of a CPU process with Python, torch and transformers (in a rank also Ray), without a model. On a GPU: 0."""

_FILE = 2**28
"""Bytes of one file of a checkpoint that ranks write."""
_ENGINE_PROCESS = 0.65 * 2**30
"""Bytes of the same process with vLLM and its engine."""

_COPIES_OF_LOGITS = 4
"""The logits, their softmax for the entropies, and in the backward pass the gradient and an intermediate result."""

_TILE = 2**26
"""The approximate bytes that a fused head uses for a tile."""

_SAMPLER_COPIES = 4
"""The number of float32 arrays of rows x vocabulary at the peak of a sampler's step.

They are the softmax and its cumulative sums, both in float64. The two arrays of logits are freed before.
"""


class Line(NamedTuple):
    """One row of the table: a product."""

    what: str
    bytes: float
    how: str
    lower: str
    """The settings that lower it."""


class Plan(NamedTuple):
    """The memory of a training process: always, and during sampling, an update, a checkpoint and a sync.

    ``engine`` has the memory of an engine, and ``sync`` the bytes of a transfer of weights.
    """

    rank: list[Line]
    sampling: list[Line]
    update: list[Line]
    saving: list[Line]
    sending: list[Line]
    engine: list[Line]
    sync: list[Line]

    @property
    def peak(self) -> float:
        """The peak memory of a training process while a checkpoint is written.

        With ``execution: local`` the same process samples.
        """
        return total(self.rank) + total(self.saving) + max(map(total, (self.sampling, self.update, self.sending)))


class Prompts(NamedTuple):
    """The tokens of the mean and the longest prompt, and the number of responses that an evaluation samples."""

    mean: int
    longest: int
    evaluated: int = 0


class Shape(NamedTuple):
    """The sizes of a model."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    queries: int
    """The number of heads x the width of a head."""
    keys: int
    """The number of key-value heads x the width of a head."""
    inner: int
    vocabulary: int
    body: int
    """The parameters of the layers: all but the embedding, the head and the last norm."""


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
    tokens_of_step: float
    """Tokens of all ranks, updates and micro-batches."""


def total(lines: list[Line]) -> float:
    return sum(line.bytes for line in lines)


def shape_of(model: ModelConfig) -> Shape:
    """Return the sizes of a model. It is built on the device ``meta``, so tied weights and adapters are counted.

    Raises:
        ValueError: the config of the model cannot be loaded.
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
    """Return the lengths of the prompts in the config's data; with ``prompt_tokens`` all prompts have this length.

    Raises:
        ValueError: the data or the tokenizer cannot be read, or an environment makes the prompts.
    """
    if prompt_tokens is not None:
        return Prompts(prompt_tokens, prompt_tokens, 0)
    if config.data.environment is not None:
        raise ValueError("data.environment writes the prompts: give their length, such as --prompt-tokens 512")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        rows = load_examples(config.data.train, config.data, tokenizer, max_prompt_length=2**31).rows
        evaluated = (
            config.data.eval and load_examples(config.data.eval, config.data, tokenizer, max_prompt_length=2**31).rows
        )
    except (OSError, ValueError) as error:
        what = str(error).splitlines()[0]
        raise ValueError(f"{what}; without the data give the length of prompts, such as --prompt-tokens 512") from None
    lengths = [len(row.prompt_ids) for row in rows]
    questions = len(evaluated[: config.evaluation.limit]) if evaluated else 0
    return Prompts(round(sum(lengths) / len(lengths)), max(lengths), questions * config.evaluation.samples)


def plan(config: Config, prompts: Prompts) -> Plan:
    """Compute the memory of a run with this config, if all responses have the maximum length.

    Raises:
        ValueError: the config of the model cannot be loaded.
    """
    model, shape = config.model, shape_of(config.model)
    longest = prompts.longest
    (width, trained_width), response = widths(model), config.sampling.max_new_tokens
    is_ray = config.execution == "ray"
    ranks = config.ray.sharers if is_ray else 1  # the ranks that share one copy of the weights
    is_mixed = is_ray and config.ray.mixed_precision is not None
    computed = 2 if is_mixed else width  # bytes of a number in the forward and backward pass
    on_cpu = model.device == "cpu" or (model.device == "auto" and not torch.cuda.is_available())

    frozen, per_rank = (
        shape.parameters + (shape.trained if model.lora else 0) - shape.trained,
        f" / {ranks} ranks" * (ranks > 1),
    )
    rank = [Line("process", _PROCESS, "Python, torch, transformers", "")] if on_cpu else []
    if frozen:
        rank.append(
            Line("frozen weights", frozen * width / ranks, f"{frozen / 1e6:.1f} M x {width}{per_rank}", "model.dtype")
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
        how = f"{shape.trained / 1e6:.1f} M x {trained_width} x {copies}{per_rank}"
        rank.append(Line(what, shape.trained * trained_width * copies / ranks, how, f"{lower}{more}"))
    needs = config.algorithm.needs
    if "ref_log_probs" in needs and (model.reference or model.lora is None):
        how = f"{shape.parameters / 1e6:.1f} M x {width}{per_rank}"
        rank.append(Line("reference", shape.parameters * width / ranks, how, "kl_coef: 0, model.lora"))
    if config.algorithm.needs_teacher and (not is_ray or config.ray.roles.teacher == "main"):
        for name, path in model.teachers.items():
            count = shape_of(model.model_copy(update={"path": path, "lora": None})).parameters
            how = f"{count / 1e6:.1f} M x {width}{per_rank}"
            rank.append(Line(f"teacher {name}".strip(), count * width / ranks, how, "ray.roles.teacher"))
    if "values" in needs:
        size = shape.trained * trained_width * 4 + frozen * width
        rank.append(Line("critic with its optimizer", size / ranks, f"as the policy{per_rank}", "another preset"))

    number, tokens, answers, slots, _ = micro_batches(config, prompts)
    checkpointed = is_ray and config.ray.activation_checkpointing
    tensor = config.ray.training_tensor_parallel if is_ray else 1
    part = part_of(shape, tensor)
    update = [
        *([_gathered(part, computed, tensor)] if ranks > 1 else []),
        *([_whole_gradients(config, part, number)] if is_ray and config.ray.training_workers > 1 else []),
        *_activations(part, tokens, slots if model.packing else tokens, computed, checkpointed),
        _logits(config, shape, answers),
    ]

    saving: list[Line] = []
    sending: list[Line] = []
    if is_ray and on_cpu:  # with a GPU both are in host memory, which the plan does not count
        if model.engine_lora is None:
            largest = shape.vocabulary * shape.hidden * width
            how = f"4 x {shape.vocabulary} words x {shape.hidden} x {width}: gathered, cast, packed, and one being sent"
            sending.append(Line("largest part of a sync", 4 * largest, how, "model.lora.sync: adapter"))
            how = f"{shape.trained / 1e6:.1f} M x {trained_width}{per_rank}, for the engines"
            rank.append(
                Line("snapshot", shape.trained * trained_width / ranks, how, "model.lora, ray.training_workers")
            )
        how = f"{shape.trained / 1e6:.1f} M x {trained_width} x 3{per_rank}, of weights and optimizer"
        copied = shape.trained * trained_width / ranks
        saving.append(Line("copies for a checkpoint", 3 * copied, how, "ray.training_workers"))
        saving.append(Line("a file of it", 2 * min(_FILE, 2 * copied), "2 x its size", ""))

    sampling: list[Line] = []
    engine: list[Line] = []
    sync: list[Line] = []
    engine_bytes = engine_width(config)
    per_token = 2 * shape.layers * shape.keys * engine_bytes
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
        how = f"{shape.parameters / 1e6:.1f} M x {engine_bytes}" + f" / {devices} devices" * (devices > 1)
        engine.append(Line("weights", shape.parameters * engine_bytes / devices, how, "model.dtype"))
        cache_bytes = config.ray.kv_cache_bytes
        if cache_bytes is not None:
            fits = int(cache_bytes * devices // ((longest + response) * per_token))
            engine.append(
                Line(
                    "KV cache", cache_bytes, f"space for {fits} whole responses at the same time", "ray.kv_cache_bytes"
                )
            )
        else:
            wanted = rows_sampled(config) / engine_count(config) * (longest + response) * per_token / devices
            engine.append(
                Line("KV cache, if all run at once", wanted, "the engine takes what is free", "ray.kv_cache_bytes")
            )
        adapters = model.engine_lora is not None
        if on_cpu and not adapters:
            largest = shape.vocabulary * shape.hidden * engine_bytes
            how = f"2 x {shape.vocabulary} words x {shape.hidden} x {engine_bytes}, the largest part"
            engine.append(Line("arriving weights", 2 * largest, how, "model.lora.sync: adapter"))
        sent = shape.trained * trained_width if adapters else shape.parameters * engine_bytes
        what = "adapters" if adapters else "whole weights"
        sync.append(Line("sync, to each engine", sent, f"{what}, after every step", "model.lora.sync: adapter"))
        sync.append(
            Line("sync, from each rank", sent / ranks, f"its shard of them{per_rank}", "model.lora.sync: adapter")
        )
    return Plan(rank, sampling, update, saving, sending, engine, sync)


def rows_sampled(config: Config) -> int:
    return (config.prompts_per_generation or config.prompts_per_step) * config.algorithm.group_size


def engine_count(config: Config) -> int:
    pool = config.ray.roles.rollout
    return config.ray.rollout_workers if pool == "main" else config.ray.pools[pool].workers


def widths(model: ModelConfig) -> tuple[int, int]:
    """Return the bytes of a number of the model, and of a trained weight.

    A gradient and each of Adam's moments have as many bytes as a trained weight.
    """
    return getattr(torch, model.dtype).itemsize, 4


def engine_width(config: Config) -> int:
    """Return the bytes of a number in an engine."""
    is_vllm = config.execution == "ray" and config.ray.engine == "vllm"
    name = (config.ray.mixed_precision if is_vllm else None) or config.model.dtype
    size: int = getattr(torch, name).itemsize
    return size


def micro_batches(config: Config, prompts: Prompts, response: float | None = None) -> MicroBatches:
    """Return the micro-batches of an update. ``response``: tokens of the mean response; None: the maximum length."""
    model, algorithm = config.model, config.algorithm
    ranks = config.ray.training_workers // config.ray.training_tensor_parallel if config.execution == "ray" else 1
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


def part_of(shape: Shape, tensor: int) -> Shape:
    """The sizes of a model's part on each of ``tensor`` ranks that divide its layers, embedding and head."""
    names = ("parameters", "trained", "body", "queries", "keys", "inner")
    return shape._replace(**{name: getattr(shape, name) // tensor for name in names})


def _gathered(part: Shape, width: int, tensor: int) -> Line:
    """The weights that FSDP holds gathered: the current layer, the next layer, and all weights outside the layers.

    If ranks divide the layers, these are the rank's part of each layer, and the whole embedding.
    """
    layer, outside = part.body / part.layers, part.parameters - part.body
    embedding = part.vocabulary * part.hidden * (tensor > 1)
    how = f"(2 x {layer / 1e6:.1f} M + {(outside + embedding) / 1e6:.1f} M) x {width}"
    return Line("gathered weights", (2 * layer + outside + embedding) * width, how, "ray.mixed_precision")


def _whole_gradients(config: Config, shape: Shape, micro_batches: int) -> Line:
    """The gradients that a rank holds whole.

    With ``reduce_gradients: once`` these are the gradients of all trained weights, until the last micro-batch.
    Otherwise they are the gradients of the weights outside the layers.
    """
    if config.ray.reduce_gradients == "once" and micro_batches > 1:
        how = f"{shape.trained / 1e6:.1f} M x 4, until the last of {micro_batches} micro-batches"
        return Line("whole gradients", shape.trained * 4, how, "ray.reduce_gradients: every_micro_batch")
    outside = 0 if config.model.lora else shape.parameters - shape.body
    return Line("whole gradients", outside * 4, f"{outside / 1e6:.1f} M x 4, outside the layers", "model.lora")


def _activations(shape: Shape, tokens: float, slots: float, width: int, checkpointed: bool) -> list[Line]:
    """The tensors of a Llama's blocks that autograd keeps for the backward pass.

    Per token: each of the two norms keeps its input in float32, the normalized input and its output. The output layer
    of attention keeps its input, and the gated MLP keeps four arrays. Per slot: queries, keys, values and the output of
    attention. (A token of a shared prompt has one slot for each response.) The activations of adapters are small and
    not counted.
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
    """Return the plan as a table for the terminal."""
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
    """Format a number of bytes."""
    for unit, divisor, least in (("TiB", 2**40, 2**40), ("GiB", 2**30, 2**28), ("MiB", 2**20, 2**18)):
        if number >= least:
            return f"{number / divisor:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"
