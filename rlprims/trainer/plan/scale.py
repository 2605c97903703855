"""The bytes and seconds of a step, phase by phase, by formula: nothing is loaded and nothing is run.

A phase takes at least as long as the slower of its arithmetic, its reads of a device's memory and its network. The
rates are given: those that devices reach, not those of a data sheet. What the processor of rank 0 does in a sync, and
the trainer's process in a recording, was measured on one core by ``benchmarks/host.py``. The memory of a step is in
:mod:`rlprims.trainer.plan.memory`.

n is tokens read (a shared prompt once), r those of responses, Σn² the sum of squared lengths of rows, N parameters, L
layers, d the width of attention, V x h the head.
"""

import math
from typing import Any, NamedTuple

from rlprims.trainer.config import Config
from rlprims.trainer.plan.memory import (
    Prompts,
    Shape,
    engine_count,
    engine_width,
    micro_batches,
    rows_sampled,
    shape_of,
    text_of,
    widths,
)


class Rates(NamedTuple):
    """Per second."""

    flops: float
    """Operations that a device reaches in large matrix products of the model."""
    memory: float
    """Bytes that a device reads of its memory."""
    network: float
    """Bytes that a device receives from the others."""
    disk: float | None = None
    """Bytes that a process writes."""
    host: float = 1.3e9
    """Bytes that one thread of rank 0 casts, packs and sums for the engines; one core of an AMD EPYC."""
    wire: float = 2.1e9
    """Bytes that gloo sends to a receiver in a second of its own core; the same core."""
    record: float = 50e6
    """Bytes of rollouts that the trainer's process writes as JSON; the same core."""


class Job(NamedTuple):
    """One step: all ranks, and all engines."""

    rows: float
    groups: float
    prompt: float
    """Tokens."""
    response: float
    """Tokens of the mean response."""
    longest: float
    """Tokens of the longest response."""

    @property
    def answers(self) -> float:
        return self.rows * self.response

    @property
    def squares(self) -> float:
        return self.rows * (self.prompt + self.response) ** 2


class Phase(NamedTuple):
    what: str
    flops: float
    """Of all devices that take part."""
    read: float
    """Bytes of memory that each device reads; only where that counts."""
    moved: float
    """Bytes that each device or process receives, sends or writes."""
    seconds: float | None
    """At least; None: the rate was not given."""
    how: str
    lower: str
    """The setting that moves it."""


# Sampling


def kv_bytes(shape: Shape, width: int) -> int:
    """Of a token, in the cache: 2 L d_kv numbers."""
    return 2 * shape.layers * shape.keys * width


def read_bytes(shape: Shape, width: int) -> int:
    """The weights that a forward pass reads: layers and head; of the embedding it looks a row up."""
    return (shape.body + shape.vocabulary * shape.hidden) * width


def decode_steps(job: Job, at_once: float) -> float:
    """Of an engine: until its longest response ends, and until every response had its turn."""
    return max(job.longest, job.answers / at_once)


def decode_bytes(shape: Shape, job: Job, at_once: float, width: int) -> float:
    """steps x weights, and for each new token the cache of those before it: r (prompt + response / 2) x 2 L d_kv."""
    cached = job.answers * (job.prompt + job.response / 2)
    return decode_steps(job, at_once) * read_bytes(shape, width) + cached * kv_bytes(shape, width)


# Arithmetic of the ranks


def product_flops(shape: Shape, tokens: float, answers: float) -> float:
    """2 N_body n + 2 V h r: a forward pass without its attention."""
    return 2 * shape.body * tokens + 2 * shape.vocabulary * shape.hidden * answers


def attention_flops(shape: Shape, squares: float) -> float:
    """4 L d Σn²; the causal half is not subtracted, as is usual."""
    return 4 * shape.layers * shape.queries * squares


def forward_flops(shape: Shape, tokens: float, answers: float, squares: float) -> float:
    return product_flops(shape, tokens, answers) + attention_flops(shape, squares)


def update_flops(shape: Shape, tokens: float, answers: float, squares: float, *, recomputed: bool = False) -> float:
    """Three forward passes, and the layers once more if they are recomputed; a frozen weight has no gradient."""
    products, attention = product_flops(shape, tokens, answers), attention_flops(shape, squares)
    of_weights = products if shape.trained >= shape.parameters else 2 * shape.trained * tokens
    again = 2 * shape.body * tokens + attention if recomputed else 0.0
    return 2 * products + of_weights + 3 * attention + again


# Bytes between the ranks: FSDP2 gathers a layer in forward and once more in backward, what is outside the layers once


def others(ranks: int) -> float:
    """The share of a tensor that is on the other ranks."""
    return (ranks - 1) / ranks


def gathered_bytes(shape: Shape, ranks: int, width: int, micro_batches: float) -> float:
    """That a rank receives of weights in an update."""
    outside = shape.parameters - shape.body
    return others(ranks) * (2 * shape.body + outside) * width * micro_batches


def scored_bytes(shape: Shape, ranks: int, width: int, micro_batches: float) -> float:
    """That a rank receives of weights in a forward pass over its rows: what is outside the layers stays whole."""
    outside = shape.parameters - shape.body
    return others(ranks) * (shape.body * micro_batches + outside) * width


def reduced_bytes(shape: Shape, ranks: int, times: float) -> float:
    """That a rank receives of gradients, in float32: once for an update, or once for each micro-batch."""
    return others(ranks) * shape.trained * 4 * times


def exchanged_bytes(shape: Shape, ranks: int, copies: int, times: float) -> float:
    """That a rank receives of its shard's gradients, in float32, from the other copies of the weights."""
    return 2 * others(copies) * shape.trained * 4 / ranks * times


# Weights to the engines, checkpoints, records


def sync_bytes(shape: Shape, width: int) -> int:
    """To every process of every engine."""
    return shape.parameters * width


def copies_sent(receivers: int) -> int:
    """By rank 0: gloo broadcasts along a binomial tree."""
    return math.ceil(math.log2(receivers + 1))


def sync_seconds(size: float, receivers: int, rates: Rates) -> float:
    """Rank 0 packs a layer while the one before it is sent."""
    return max(size / rates.host, size * copies_sent(receivers) / rates.wire)


def checkpoint_bytes(shape: Shape, *, policy_width: int = 4, masters: int = 0) -> float:
    """Of the policy: Adam's two moments, the model for Hugging Face, and the trained weights beside it.

    ``masters`` is 4 where these are stored: by ranks always, by one process if it computes in 16 bits.
    ``policy_width`` is 0 where the model is not: in most checkpoints of ranks.
    """
    return shape.trained * (8 + masters) + shape.parameters * policy_width


_FLOATS = 21
"""Characters of a float32 as JSON."""


def recorded_bytes(vocabulary: int, rows: float, prompt: float, response: float, *, characters: float = 4.0) -> float:
    """Of a step's rollouts: for each token of a response its id, its text twice, and three numbers."""
    digits = len(str(vocabulary))
    of_prompt = digits + 2 + characters
    of_response = digits + 2 + 2 * characters + 4 + 3 * (_FLOATS + 2)
    return rows * (400 + prompt * of_prompt + response * of_response)


# All of a step


def job_of(config: Config, prompts: Prompts, response_tokens: float | None = None) -> Job:
    """``response_tokens`` of the mean response; None: of the longest."""
    longest = config.sampling.max_new_tokens
    rows = config.prompts_per_step * config.algorithm.group_size
    return Job(rows, config.prompts_per_step, prompts.mean, response_tokens or longest, longest)


def phases(config: Config, prompts: Prompts, rates: Rates, response_tokens: float | None = None) -> list[Phase]:
    """The phases of a step in their order.

    Raises:
        ValueError: there is no model config.
    """
    shape, job = shape_of(config.model), job_of(config, prompts, response_tokens)
    found = [_sampling(config, shape, job, rates), *_scoring(config, shape, job, prompts, rates)]
    found.append(_update(config, shape, job, prompts, rates))
    if config.execution == "ray":
        found.append(_sync(config, shape, rates))
    if config.record_rollouts:
        size = recorded_bytes(shape.vocabulary, job.rows, job.prompt, job.response)
        lower = "record_rollouts_every, record_rollouts: false"
        found.append(Phase("recording", 0, 0, size, size / rates.record, "JSON, by the trainer's process", lower))
    return found


def step_seconds(config: Config, found: list[Phase]) -> float:
    """One batch ahead, engines sample while ranks train."""
    seconds = {phase.what: phase.seconds or 0.0 for phase in found}
    sampling = seconds.pop("sampling")
    sync, recording = seconds.pop("sync", 0.0), seconds.pop("recording", 0.0)
    ranks = sum(seconds.values())
    ahead = config.staleness and not config.ray.colocate and config.execution == "ray"
    return (max(sampling, ranks) if ahead else sampling + ranks) + sync + recording


def checkpoint(config: Config, rates: Rates) -> Phase:
    """Of the policy. Ranks write their shards while training goes on; the trainer's process then writes the model."""
    shape, is_ray = shape_of(config.model), config.execution == "ray"
    stored, trained = widths(config.model)
    policy = trained if is_ray and not config.model.lora else stored
    model = shape.parameters * policy
    lower = "checkpoint.every, model.lora"
    if not is_ray:
        whole = checkpoint_bytes(shape, policy_width=policy, masters=4 if stored != trained else 0)
        return Phase("checkpoint", 0, 0, whole, whole / rates.disk if rates.disk else None, text_of(whole), lower)
    shards, ranks = checkpoint_bytes(shape, policy_width=0, masters=4), config.ray.training_workers
    with_model = config.checkpoint.hugging_face == "every"
    slowest = shards / ranks + model * with_model
    how = f"{text_of(shards / ranks)} by each rank, in the background; {text_of(model)} more "
    how += "by the trainer's process" if with_model else "at the end"
    moved = shards + model * with_model
    return Phase("checkpoint", 0, 0, moved, slowest / rates.disk if rates.disk else None, how, lower)


def _sharers(config: Config) -> int:
    """Ranks that share one copy of the weights."""
    return config.ray.sharers if config.execution == "ray" else 1


def _ranks(config: Config) -> int:
    return config.ray.training_workers if config.execution == "ray" else 1


def _sampling(config: Config, shape: Shape, job: Job, rates: Rates) -> Phase:
    is_ray, width = config.execution == "ray", engine_width(config)
    engines = engine_count(config) if is_ray else 1
    devices = config.ray.tensor_parallel_size if is_ray else 1
    rows = rows_sampled(config) / engines
    own = job._replace(rows=rows, groups=rows * job.groups / job.rows)
    at_once = min(rows, config.model.max_rows_per_generation)
    if is_ray and config.ray.kv_cache_bytes:
        fits = config.ray.kv_cache_bytes * devices / kv_bytes(shape, width) / (own.prompt + own.response)
        at_once = min(at_once, max(1.0, fits))
    read = decode_bytes(shape, own, at_once, width) / devices
    # Prompts are read once for a group; of a response every token is.
    tokens = own.groups * own.prompt + own.answers
    flops = forward_flops(shape, tokens, own.answers, own.rows * own.response * (own.prompt + own.response / 2))
    seconds = max(read / rates.memory, flops / devices / rates.flops)
    how = f"{decode_steps(own, at_once):.0f} steps of {at_once:.0f} rows"
    lower = "ray.rollout_workers, ray.kv_cache_bytes" if is_ray else "model.max_rows_per_generation"
    return Phase("sampling", flops * engines, read, 0, seconds, how, lower)


def _scoring(config: Config, shape: Shape, job: Job, prompts: Prompts, rates: Rates) -> list[Phase]:
    ranks, (stored, _) = _ranks(config), widths(config.model)
    computed = 2 if config.execution == "ray" and config.ray.mixed_precision else stored
    micro = micro_batches(config, prompts, job.response)
    flops = forward_flops(shape, micro.tokens_of_step, job.answers, job.squares)
    number = micro.number * config.algorithm.mini_batches
    moved = scored_bytes(shape, _sharers(config), computed, number)
    seconds = max(flops / ranks / rates.flops, moved / rates.network)
    roles = ["old log-probs"] if config.recompute_log_probs == 1 else []
    roles += ["reference"] if "ref_log_probs" in config.algorithm.needs else []
    old = "ray.training_workers" if config.execution == "ray" else "recompute_log_probs"
    lower = {"old log-probs": old, "reference": "algorithm.kl_coef: 0"}
    return [Phase(role, flops, 0, moved, seconds, "a forward pass", lower[role]) for role in roles]


def _update(config: Config, shape: Shape, job: Job, prompts: Prompts, rates: Rates) -> Phase:
    ranks, (stored, _) = _ranks(config), widths(config.model)
    is_ray, times = config.execution == "ray", config.algorithm.mini_batches * config.algorithm.epochs
    computed = 2 if is_ray and config.ray.mixed_precision else stored
    micro = micro_batches(config, prompts, job.response)
    recomputed = is_ray and config.ray.activation_checkpointing
    epochs = config.algorithm.epochs
    flops = epochs * update_flops(shape, micro.tokens_of_step, job.answers, job.squares, recomputed=recomputed)
    reductions = micro.number if is_ray and config.ray.reduce_gradients == "every_micro_batch" else 1
    sharers = _sharers(config)
    gathered = gathered_bytes(shape, sharers, computed, micro.number)
    reduced = reduced_bytes(shape, sharers, reductions)
    moved = times * (gathered + reduced + exchanged_bytes(shape, sharers, ranks // sharers, reductions))
    seconds = max(flops / ranks / rates.flops, moved / rates.network)
    how = f"{times} x {micro.number} micro-batches of a rank"
    lower = "ray.training_workers"
    if ranks > 1:
        lower += ", model.max_tokens_per_micro_batch"
    return Phase("update", flops, 0, moved, seconds, how, lower)


def _sync(config: Config, shape: Shape, rates: Rates) -> Phase:
    receivers = engine_count(config) * config.ray.tensor_parallel_size
    if config.model.engine_lora is not None:
        sent = shape.trained * 4
        return Phase("sync", 0, 0, sent, sent / rates.host, f"adapters to {receivers} processes", "")
    sent = sync_bytes(shape, engine_width(config))
    how = f"{receivers} processes; rank 0 sends {copies_sent(receivers)} copies"
    return Phase("sync", 0, 0, sent, sync_seconds(sent, receivers, rates), how, "model.lora.sync: adapter")


def table(config: Config, found: list[Phase], saved: Phase) -> Any:
    """For a terminal."""
    from rlprims.reports.terminal import make_table

    rows = [cells(phase) for phase in found]
    rows.append(("step", "", "", "", f"{step_seconds(config, found):.1f}", "", ""))
    rows.append(cells(saved))
    columns = ("phase", "operations", "read", "moved", "seconds", "how", "what moves it")
    return make_table(columns, rows, title="a step, at least")


def cells(phase: Phase) -> tuple[str, ...]:
    flops = f"{phase.flops:.1e}" if phase.flops else ""
    read, moved = (text_of(x) if x else "" for x in (phase.read, phase.moved))
    seconds = f"{phase.seconds:.1f}" if phase.seconds is not None else ""
    return (phase.what, flops, read, moved, seconds, phase.how, phase.lower)
