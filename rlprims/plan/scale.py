"""The bytes and seconds of each phase of a step, computed from formulas; nothing is loaded or run.

The time of a phase is the longest of three: its arithmetic, its reads of device memory, and its network transfers. This
is a lower bound. The rates are inputs; use rates that were measured on the devices, because data sheets have higher
ones. The default rates of rank 0's processor in a sync, and of the trainer's process in a recording, were measured on
one core by ``benchmarks/host.py``. The memory of a step is in :mod:`rlprims.plan.memory`.

Symbols: n is the number of tokens that are read (a shared prompt counts once), r the number of tokens of responses, Σn²
the sum of the squared lengths of rows, N the parameters, L the layers, d the width of attention, V x h the head.
"""

import math
from typing import Any, NamedTuple

from rlprims.execution._ray_config import backend_of
from rlprims.plan import sizes
from rlprims.plan.sizes import Prompts, Shape, shape_of, text_of
from rlprims.trainer.config import Config


class Rates(NamedTuple):
    """The rates of the hardware, per second."""

    flops: float
    """Floating-point operations that a device reaches in the model's large matrix products."""
    memory: float
    """Bytes that a device reads from its memory."""
    network: float
    """Bytes that a device receives from other devices."""
    disk: float | None = None
    """Bytes that a process writes to disk."""
    host: float = 1.3e9
    """Bytes that one thread of rank 0 casts, packs and sums for the engines (default: one core of an AMD EPYC)."""
    wire: float = 2.1e9
    """Bytes that gloo sends to one receiver with one core of its own (default: the same core)."""
    record: float = 50e6
    """Bytes of rollouts that the trainer's process writes as JSON (default: the same core)."""


class Job(NamedTuple):
    """The sizes of one step, over all ranks and engines."""

    rows: float
    groups: float
    prompt: float
    """Tokens of the mean prompt."""
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
    """The floating-point operations, of all devices together."""
    read: float
    """Bytes that each device reads from its memory; 0: not counted."""
    moved: float
    """Bytes that each device or process receives, sends or writes."""
    seconds: float | None
    """A lower bound of the seconds; None: a rate was not given."""
    how: str
    lower: str
    """The settings that change it."""


# Sampling


def kv_bytes(shape: Shape, width: int) -> int:
    """Bytes of one token in the KV cache: 2 L d_kv numbers."""
    return 2 * shape.layers * shape.keys * width


def read_bytes(shape: Shape, width: int) -> int:
    """Bytes of the weights that a forward pass reads: layers and head. It reads only a few rows of the embedding."""
    return (shape.body + shape.vocabulary * shape.hidden) * width


def decode_steps(job: Job, at_once: float) -> float:
    """Steps of an engine until all its responses have ended, the longest one included."""
    return max(job.longest, job.answers / at_once)


def decode_bytes(shape: Shape, job: Job, at_once: float, width: int) -> float:
    """Bytes that an engine reads: steps x weights, and for each new token the cache of the tokens before it.

    The reads of the cache are r (prompt + response / 2) x 2 L d_kv numbers.
    """
    cached = job.answers * (job.prompt + job.response / 2)
    return decode_steps(job, at_once) * read_bytes(shape, width) + cached * kv_bytes(shape, width)


# Arithmetic of the ranks


def product_flops(shape: Shape, tokens: float, answers: float) -> float:
    """Operations of a forward pass without attention: 2 N_body n + 2 V h r."""
    return 2 * shape.body * tokens + 2 * shape.vocabulary * shape.hidden * answers


def attention_flops(shape: Shape, squares: float) -> float:
    """Operations of attention: 4 L d Σn². As is usual, the causal half is not subtracted."""
    return 4 * shape.layers * shape.queries * squares


def forward_flops(shape: Shape, tokens: float, answers: float, squares: float) -> float:
    """Operations of a forward pass."""
    return product_flops(shape, tokens, answers) + attention_flops(shape, squares)


def update_flops(shape: Shape, tokens: float, answers: float, squares: float, *, recomputed: bool = False) -> float:
    """Operations of an update: three forward passes, of recomputed layers four, no gradients of frozen weights."""
    products, attention = product_flops(shape, tokens, answers), attention_flops(shape, squares)
    of_weights = products if shape.trained >= shape.parameters else 2 * shape.trained * tokens
    again = 2 * shape.body * tokens + attention if recomputed else 0.0
    return 2 * products + of_weights + 3 * attention + again


# Bytes between the ranks. FSDP2 gathers a layer in the forward and in the backward pass, and other weights once.


def remote_share(ranks: int) -> float:
    """The share of a tensor that the other ranks hold."""
    return (ranks - 1) / ranks


def gathered_bytes(shape: Shape, ranks: int, width: int, micro_batches: float) -> float:
    """Bytes of weights that a rank receives in an update."""
    outside = shape.parameters - shape.body
    return remote_share(ranks) * (2 * shape.body + outside) * width * micro_batches


def scored_bytes(shape: Shape, ranks: int, width: int, micro_batches: float) -> float:
    """Bytes of weights that a rank receives in a forward pass over its rows; weights outside the layers only once."""
    outside = shape.parameters - shape.body
    return remote_share(ranks) * (shape.body * micro_batches + outside) * width


def reduced_bytes(shape: Shape, ranks: int, times: float) -> float:
    """Bytes of float32 gradients that a rank receives: once for an update, or once for each micro-batch."""
    return remote_share(ranks) * shape.trained * 4 * times


def exchanged_bytes(shape: Shape, ranks: int, copies: int, times: float) -> float:
    """Bytes of float32 gradients of its shard that a rank receives from the other copies of the weights."""
    return 2 * remote_share(copies) * shape.trained * 4 / ranks * times


def summed_bytes(shape: Shape, tensor: int, tokens: float, width: int, passes: float) -> float:
    """Bytes of hidden states that a rank receives if ``tensor`` ranks divide the layers: 2 sums per layer and pass."""
    return 2 * remote_share(tensor) * 2 * shape.layers * shape.hidden * tokens * width * passes


# Bytes of transfers to the engines, of checkpoints and of recordings


def sync_bytes(shape: Shape, width: int) -> int:
    """Bytes that each process of each engine receives."""
    return shape.parameters * width


def copies_sent(receivers: int) -> int:
    """The number of copies that rank 0 sends; gloo broadcasts along a binomial tree."""
    return math.ceil(math.log2(receivers + 1))


def gloo_seconds(size: float, receivers: int, rates: Rates) -> float:
    """Seconds of a sync by gloo, in which rank 0 packs a layer while it sends the layer before."""
    return max(size / rates.host, size * copies_sent(receivers) / rates.wire)


def gathered_seconds(size: float, rates: Rates) -> float:
    """Seconds of a sync between GPUs: every rank gathers ``size`` bytes while engines receive as many, or fewer."""
    return size / rates.network


def checkpoint_bytes(shape: Shape, *, policy_width: int = 4, masters: int = 0) -> float:
    """Bytes of a checkpoint of the policy: Adam's two moments, the Hugging Face model, and the trained weights.

    ``masters`` is 4 if the trained weights are stored separately from the Hugging Face model. Ranks always do so; one
    process does so if it computes in 16 bits. ``policy_width`` is the bytes of a number of the Hugging Face model, or 0
    if the checkpoint does not have that model, as most checkpoints of ranks.
    """
    return shape.trained * (8 + masters) + shape.parameters * policy_width


_FLOATS = 21
"""The number of characters of a float32 in JSON."""


def recorded_bytes(vocabulary: int, rows: float, prompt: float, response: float, *, characters: float = 4.0) -> float:
    """Bytes of a step's rollouts. A token of a response has its id, its text twice, and three numbers."""
    digits = len(str(vocabulary))
    of_prompt = digits + 2 + characters
    of_response = digits + 2 + 2 * characters + 4 + 3 * (_FLOATS + 2)
    return rows * (400 + prompt * of_prompt + response * of_response)


# A whole step


def phases(config: Config, prompts: Prompts, rates: Rates, response_tokens: float | None = None) -> list[Phase]:
    """Return the phases of a step in their order. ``response_tokens`` of the mean response; None: the maximum."""
    shape, groups, longest = shape_of(config.model), config.prompts_per_step, config.sampling.max_new_tokens
    job = Job(groups * config.algorithm.group_size, groups, prompts.mean, response_tokens or longest, longest)
    found = [_sampling(config, shape, job, rates), *_scoring(config, shape, job, prompts, rates)]
    found.append(_update(config, shape, job, prompts, rates))
    if config.execution == "ray":
        found.append(_sync(config, shape, rates))
    if config.record_rollouts:
        size = recorded_bytes(shape.vocabulary, job.rows, job.prompt, job.response)
        lower = "record_rollouts_every, record_rollouts: false"
        found.append(Phase("recording", 0, 0, size, size / rates.record, "JSON, in the next step", lower))
    return found


def step_seconds(config: Config, found: list[Phase]) -> float:
    """The seconds of a step. With ``max_staleness`` engines sample while ranks train; records are written beside."""
    seconds = {phase.what: phase.seconds or 0.0 for phase in found}
    sampling = seconds.pop("sampling")
    sync, recording = seconds.pop("sync", 0.0), seconds.pop("recording", 0.0)
    ranks = sum(seconds.values())
    ahead = config.max_staleness and not config.ray.colocate and config.execution == "ray"
    return max((max(sampling, ranks) if ahead else sampling + ranks) + sync, recording)


def checkpoint(config: Config, rates: Rates) -> Phase:
    """Return the phase of a checkpoint. Ranks write their shards during training; then the trainer writes the model."""
    shape, is_ray = shape_of(config.model), config.execution == "ray"
    stored, trained = sizes.widths(config.model)
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


def _divided(config: Config) -> tuple[int, int]:
    """The number of ranks over which FSDP2 shards one copy of the weights, and of those that divide its layers."""
    tensor = config.ray.training_tensor_parallel if config.execution == "ray" else 1
    return (config.ray.sharers if config.execution == "ray" else 1) // tensor, tensor


def _ranks(config: Config) -> int:
    return config.ray.training_workers if config.execution == "ray" else 1


def _sampling(config: Config, shape: Shape, job: Job, rates: Rates) -> Phase:
    is_ray, width = config.execution == "ray", sizes.engine_width(config)
    engines = sizes.engine_count(config) if is_ray else 1
    devices = config.ray.tensor_parallel_size if is_ray else 1
    rows = sizes.rows_sampled(config) / engines
    own = job._replace(rows=rows, groups=rows * job.groups / job.rows)
    at_once = min(rows, config.model.max_rows_per_generation)
    if is_ray and config.ray.kv_cache_bytes:
        fits = config.ray.kv_cache_bytes * devices / kv_bytes(shape, width) / (own.prompt + own.response)
        at_once = min(at_once, max(1.0, fits))
    read = decode_bytes(shape, own, at_once, width) / devices
    # The engine reads a prompt once for its group, and every token of a response.
    tokens = own.groups * own.prompt + own.answers
    flops = forward_flops(shape, tokens, own.answers, own.rows * own.response * (own.prompt + own.response / 2))
    seconds = max(read / rates.memory, flops / devices / rates.flops)
    how = f"{decode_steps(own, at_once):.0f} steps of {at_once:.0f} rows"
    lower = "ray.rollout_workers, ray.kv_cache_bytes" if is_ray else "model.max_rows_per_generation"
    return Phase("sampling", flops * engines, read, 0, seconds, how, lower)


def _scoring(config: Config, shape: Shape, job: Job, prompts: Prompts, rates: Rates) -> list[Phase]:
    ranks, (stored, _) = _ranks(config), sizes.widths(config.model)
    computed = 2 if config.execution == "ray" and config.ray.mixed_precision else stored
    micro = sizes.micro_batches(config, prompts, job.response)
    flops = forward_flops(shape, micro.tokens_of_step, job.answers, job.squares)
    number = micro.number * config.algorithm.mini_batches
    shards, tensor = _divided(config)
    moved = scored_bytes(sizes.part_of(shape, tensor), shards, computed, number)
    moved += summed_bytes(shape, tensor, micro.tokens_of_step * tensor / ranks, computed, 1)
    seconds = max(flops / ranks / rates.flops, moved / rates.network)
    roles = ["old log-probs"] if config.recompute_log_probs_every == 1 else []
    roles += ["reference"] if "ref_log_probs" in config.algorithm.needs else []
    old = "ray.training_workers" if config.execution == "ray" else "recompute_log_probs_every"
    lower = {"old log-probs": old, "reference": "algorithm.kl_coef: 0"}
    return [Phase(role, flops, 0, moved, seconds, "a forward pass", lower[role]) for role in roles]


def _update(config: Config, shape: Shape, job: Job, prompts: Prompts, rates: Rates) -> Phase:
    ranks, (stored, _) = _ranks(config), sizes.widths(config.model)
    is_ray, times = config.execution == "ray", config.algorithm.mini_batches * config.algorithm.epochs
    computed = 2 if is_ray and config.ray.mixed_precision else stored
    micro = sizes.micro_batches(config, prompts, job.response)
    recomputed = is_ray and config.ray.activation_checkpointing
    epochs = config.algorithm.epochs
    flops = epochs * update_flops(shape, micro.tokens_of_step, job.answers, job.squares, recomputed=recomputed)
    reductions = micro.number if is_ray and config.ray.reduce_gradients == "every_micro_batch" else 1
    shards, tensor = _divided(config)
    part, copies = sizes.part_of(shape, tensor), ranks // (shards * tensor)
    gathered = gathered_bytes(part, shards, computed, micro.number)
    reduced = reduced_bytes(part, shards, reductions)
    moved = times * (gathered + reduced + exchanged_bytes(part, shards, copies, reductions))
    moved += summed_bytes(shape, tensor, epochs * micro.tokens_of_step * tensor / ranks, computed, 2 + recomputed)
    seconds = max(flops / ranks / rates.flops, moved / rates.network)
    how = f"{times} x {micro.number} micro-batches of a rank"
    lower = "ray.training_workers" + ", model.max_tokens_per_micro_batch" * (ranks > 1)
    return Phase("update", flops, 0, moved, seconds, how, lower)


def _sync(config: Config, shape: Shape, rates: Rates) -> Phase:
    receivers = sizes.engine_count(config) * config.ray.tensor_parallel_size
    if config.model.engine_lora is not None:
        sent = shape.trained * 4
        return Phase("sync", 0, 0, sent, sent / rates.host, f"adapters to {receivers} processes", "")
    sent = sync_bytes(shape, sizes.engine_width(config))
    backend = backend_of(config.ray, "cuda" if config.ray.all_pools["main"].gpus else "cpu")
    if backend == "gloo":
        how = f"gloo, {receivers} processes; rank 0 sends {copies_sent(receivers)} copies"
        return Phase("sync", 0, 0, sent, gloo_seconds(sent, receivers, rates), how, "model.lora.sync: adapter")
    gathered = shape.parameters * sizes.widths(config.model)[0] if config.model.lora else sent
    how = f"{backend}, {receivers} processes; every rank gathers {text_of(gathered)}"
    return Phase("sync", 0, 0, sent, gathered_seconds(gathered, rates), how, "model.lora.sync: adapter")


def table(config: Config, found: list[Phase], saved: Phase) -> Any:
    """Return the phases as a table for the terminal."""
    from rlprims.reports.terminal import make_table

    rows = [cells(phase) for phase in found]
    rows.append(("step", "", "", "", f"{step_seconds(config, found):.1f}", "", ""))
    rows.append(cells(saved))
    columns = ("phase", "operations", "read", "moved", "seconds", "how", "what changes it")
    return make_table(columns, rows, title="a step, at least")


def cells(phase: Phase) -> tuple[str, ...]:
    flops = f"{phase.flops:.1e}" if phase.flops else ""
    read, moved = (text_of(x) if x else "" for x in (phase.read, phase.moved))
    seconds = f"{phase.seconds:.1f}" if phase.seconds is not None else ""
    return (phase.what, flops, read, moved, seconds, phase.how, phase.lower)
