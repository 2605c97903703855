"""The memory that a run will use, computed from its config before anything is loaded.

Every line of the table is one product that can be checked by hand. The sizes of the model come from its
``config.json``; the weights are not needed. Bytes are those of one training process or of one engine. The peak is a sum
of three: the memory that is always used, that of a checkpoint, and the largest of sampling, an update and a sync.
"""

from typing import Any, NamedTuple

import torch

from rlprims.plan import sizes
from rlprims.plan.sizes import Prompts, Shape, shape_of, text_of
from rlprims.trainer.config import Config

_PROCESS = 0.42 * 2**30
"""Bytes of a CPU process with Python, torch and transformers (in a rank also Ray), without a model. On a GPU: 0."""
_ENGINE_PROCESS = 0.65 * 2**30
"""Bytes of the same process with vLLM and its engine."""
_PIXELS = 2**30
"""Bytes of the images, as the model's inputs, that a process keeps at most."""
_FILE = 2**28
"""Bytes of one file of a checkpoint that ranks write."""
_COPIES_OF_LOGITS = 4
"""The logits, their softmax for the entropies, and in the backward pass the gradient and an intermediate result."""
_TILE, _GPU_TILE = 2**26, 2 * 4 * 2**28
"""The approximate bytes that a fused head uses for a tile; on a GPU its logits and their softmax, in float32."""
_SAMPLER_COPIES = 4
"""Float32 arrays of rows x vocabulary at a sampler's peak: the softmax and its cumulative sums, both in float64."""


class Line(NamedTuple):
    """One row of the table: a product."""

    what: str
    bytes: float
    how: str
    lower: str
    """The settings that lower it."""


class Plan(NamedTuple):
    """The memory of a training process, always and in each phase; that of an engine; and the bytes of a sync."""

    rank: list[Line]
    sampling: list[Line]
    update: list[Line]
    saving: list[Line]
    sending: list[Line]
    engine: list[Line]
    sync: list[Line]

    @property
    def peak(self) -> float:
        """The peak memory of a training process while a checkpoint is written; a local one also samples."""
        return total(self.rank) + total(self.saving) + max(map(total, (self.sampling, self.update, self.sending)))


def total(lines: list[Line]) -> float:
    return sum(line.bytes for line in lines)


def plan(config: Config, prompts: Prompts) -> Plan:
    """Compute the memory of a run with this config, if all responses have the maximum length."""
    of = _Parts(config, prompts)
    if not of.is_ray:
        return Plan(of.held(), of.sampling(), of.update(), [], [], [], [])
    return Plan(of.held(), [], of.update(), of.saving(), of.sending(), of.engine(), of.sync())


class _Parts:
    """The parts of a plan, from the numbers that several of them need."""

    def __init__(self, config: Config, prompts: Prompts) -> None:
        self.config, self.prompts, self.shape = config, prompts, shape_of(config.model)
        self.is_ray, device = config.execution == "ray", config.model.device
        self.on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        self.ranks = config.ray.sharers if self.is_ray else 1  # those that share one copy of the weights
        self.over_ranks = f" / {self.ranks} ranks" * (self.ranks > 1)
        self.width: int = getattr(torch, config.model.dtype).itemsize
        self.trained_width = 4  # bytes of a trained weight, its gradient and each of Adam's moments
        self.row = prompts.longest + config.sampling.max_new_tokens
        self.kv_of_token = 2 * self.shape.layers * self.shape.keys * sizes.engine_width(config)
        self.sends_weights = config.model.engine_lora is None
        self.computed = 2 if self.is_ray and config.ray.mixed_precision is not None else self.width
        self.frozen_width = 4 if self.is_ray and not config.model.lora else self.width  # of the policy's frozen weights

    def whole(self, width: int) -> int:
        """How many numbers each rank has all of: the part that reads images, frozen, in the dtype that computes."""
        return self.shape.seeing * (self.config.model.vision == "frozen" and width == self.computed)

    def weights(self, what: str, count: float, lower: str, whole: int = 0, width: int = 0) -> Line:
        """Frozen numbers of a model, over the ranks; ``whole`` are those of which each rank has all."""
        width = width or self.width
        how = f"{count / 1e6:.1f} M x {width}{self.over_ranks}"
        how += f", {whole / 1e6:.1f} M of it on each" * (whole > 0 and self.ranks > 1)
        return Line(what, ((count - whole) / self.ranks + whole) * width, how, lower)

    def trained(self, what: str, lower: str, copies: int, of: str = "") -> Line:
        """As many numbers as are trained, over the ranks."""
        size, width = self.shape.trained, self.trained_width
        how = f"{size / 1e6:.1f} M x {width} x {copies}{self.over_ranks}{of}"
        return Line(what, size * width * copies / self.ranks, how, lower)

    def largest(self, what: str, copies: int, width: int, of: str) -> Line:
        """Copies of the model's largest tensor."""
        words, hidden = self.shape.vocabulary, self.shape.hidden
        how = f"{copies} x {words} words x {hidden} x {width}{of}"
        return Line(what, copies * words * hidden * width, how, "model.lora.sync: adapter")

    def held(self) -> list[Line]:
        """What a training process always holds."""
        model, algorithm, shape, width = self.config.model, self.config.algorithm, self.shape, self.width
        frozen = shape.parameters + (shape.trained if model.lora else 0) - shape.trained
        lines = [Line("process", _PROCESS, "Python, torch, transformers", "")] if self.on_cpu else []
        whole = self.whole(self.frozen_width)
        lines += [self.weights("frozen weights", frozen, "model.dtype", whole, self.frozen_width)] if frozen else []
        if width < self.trained_width and not self.is_ray and not model.lora:
            how = f"{shape.trained / 1e6:.1f} M x {width}, rounded, to compute with"
            lines.append(Line("weights in 16 bits", shape.trained * width, how, "model.lora"))
        lower = "model.lora" + ", ray.training_workers, ray.cpu_offload" * self.is_ray
        lines += [self.trained(what, lower, 1) for what in ("trained weights", "gradients")]
        lines.append(self.trained("optimizer", lower, 2))
        if "ref_log_probs" in algorithm.needs and (model.reference or model.lora is None):
            lines.append(self.weights("reference", shape.parameters, "kl_coef: 0, model.lora", self.whole(self.width)))
        if algorithm.needs_teacher and (not self.is_ray or self.config.ray.roles.teacher == "main"):
            for name, path in model.teachers.items():
                count = shape_of(model.model_copy(update={"path": path, "lora": None})).parameters
                lines.append(self.weights(f"teacher {name}".strip(), count, "ray.roles.teacher"))
        if "values" in algorithm.needs:
            size, how = shape.trained * self.trained_width * 4 + frozen * width, f"as the policy{self.over_ranks}"
            lines.append(Line("critic with its optimizer", size / self.ranks, how, "another preset"))
        if self.is_ray and self.on_cpu and self.sends_weights:
            lines.append(self.trained("snapshot", "model.lora, ray.training_workers", 1, ", for the engines"))
        if self.prompts.pixels and self.on_cpu:
            pixels = 4 * self.prompts.pixels * (self.prompts.rows or _PIXELS)
            lines.append(Line("images", min(pixels, _PIXELS), "the last that were read, 1 GiB at most", ""))
        return lines

    def images(self, prompts: float, width: int, lower: str, kept: int = 0) -> list[Line]:
        """What the images of some prompts take that are read together; of ``kept`` (0, 1): for a backward pass.

        The pixels are there twice. A layer that is read has two arrays of the widest size, or all keep theirs.
        """
        shape, pixels = self.shape, self.prompts.pixels
        of_patch = 2 * 4 * shape.patch + (shape.widths[0] * kept + 2 * shape.widths[1]) * width
        patches = prompts * pixels / max(1, shape.patch)
        how = f"{patches:.0f} patches x {text_of(of_patch)}{', of all layers' * kept}"
        return [Line("reading images", patches * of_patch, how, lower + ", model.vision: frozen" * kept)] * (pixels > 0)

    def update(self) -> list[Line]:
        from rlprims.execution.hf._families import packs

        config, ray = self.config, self.config.ray
        computed, whole = self.computed, self.whole(self.frozen_width)
        number, tokens, answers, slots = sizes.micro_batches(config, self.prompts)
        tensor, again = (ray.training_tensor_parallel, ray.activation_checkpointing) if self.is_ray else (1, False)
        part = sizes.part_of(self.shape._replace(parameters=self.shape.parameters - whole), tensor)
        rows, lower = answers / config.sampling.max_new_tokens, "model.max_tokens_per_micro_batch"
        return [
            *([_gathered(part, computed, tensor)] if self.ranks > 1 else []),
            *([_whole_gradients(config, part, number)] if self.is_ray and ray.training_workers > 1 else []),
            *activations(part, tokens, slots if packs(config.model) else tokens, computed, again),
            *self.images(rows, computed, lower, config.model.vision == "trained"),
            _logits(config, self.shape, answers, _TILE if self.on_cpu else _GPU_TILE),
        ]

    # With a GPU, what is saved or sent is first in host memory, which the plan does not count.

    def saving(self) -> list[Line]:
        copied = self.trained("copies for a checkpoint", "ray.training_workers", 3, ", of weights and optimizer")
        file = Line("a file of it", 2 * min(_FILE, 2 * copied.bytes / 3), "2 x its size", "")
        return [copied, file] if self.on_cpu else []

    def sending(self) -> list[Line]:
        of = ": gathered, cast, packed, and one being sent"
        sends = self.on_cpu and self.sends_weights
        return [self.largest("largest part of a sync", 4, self.width, of)] if sends else []

    def sampling(self) -> list[Line]:
        """What a process that also samples needs for it."""
        wanted = max(sizes.rows_sampled(self.config), self.prompts.evaluated)
        drawn = min(self.config.model.max_rows_per_generation, wanted)
        words, lower = self.shape.vocabulary, "model.max_rows_per_generation"
        cache = f"{drawn} rows x {self.row} tokens x {self.kv_of_token / 1024:.1f} KiB"
        logits = f"{_SAMPLER_COPIES} x {drawn} rows x {words} words x 4"
        return [
            Line("KV cache", drawn * self.row * self.kv_of_token, cache, lower),
            Line("logits of a step", _SAMPLER_COPIES * drawn * words * 4, logits, lower),
            *self.images(drawn / self.config.algorithm.group_size, self.width, lower),
        ]

    def engine(self) -> list[Line]:
        ray, width, count = self.config.ray, sizes.engine_width(self.config), self.shape.parameters
        devices, row = ray.tensor_parallel_size, self.row * self.kv_of_token
        lines = [Line("process", _ENGINE_PROCESS, "Python, torch, transformers, vLLM", "")] if self.on_cpu else []
        how = f"{count / 1e6:.1f} M x {width}" + f" / {devices} devices" * (devices > 1)
        lines.append(Line("weights", count * width / devices, how, "model.dtype"))
        at_once = sizes.rows_sampled(self.config) / sizes.engine_count(self.config)
        what, size, how = "KV cache, if all run at once", at_once * row / devices, "the engine takes what is free"
        if ray.kv_cache_bytes is not None:
            what, size = "KV cache", ray.kv_cache_bytes
            how = f"space for {int(size * devices // row)} whole responses at the same time"
        lines.append(Line(what, size, how, "ray.kv_cache_bytes"))
        if self.on_cpu and self.sends_weights:
            lines.append(self.largest("arriving weights", 2, width, ", the largest part"))
        return lines

    def sync(self) -> list[Line]:
        sent = self.shape.trained * self.trained_width
        sent = self.shape.parameters * sizes.engine_width(self.config) if self.sends_weights else sent
        what, lower = "whole weights" if self.sends_weights else "adapters", "model.lora.sync: adapter"
        return [
            Line("sync, to each engine", sent, f"{what}, after every step", lower),
            Line("sync, from each rank", sent / self.ranks, f"its shard of them{self.over_ranks}", lower),
        ]


def _gathered(part: Shape, width: int, tensor: int) -> Line:
    """The weights that FSDP holds gathered: the current layer, the next layer, and all weights outside the layers.

    If ranks divide the layers, these are the rank's part of each layer, and the whole embedding.
    """
    layer, outside = part.body / part.layers, part.parameters - part.body
    embedding = part.vocabulary * part.hidden * (tensor > 1)
    how = f"(2 x {layer / 1e6:.1f} M + {(outside + embedding) / 1e6:.1f} M) x {width}"
    return Line("gathered weights", (2 * layer + outside + embedding) * width, how, "ray.mixed_precision")


def _whole_gradients(config: Config, shape: Shape, micro_batches: int) -> Line:
    """The gradients that a rank holds whole: of all trained weights, or of those outside the layers."""
    if config.ray.reduce_gradients == "once" and micro_batches > 1:
        how = f"{shape.trained / 1e6:.1f} M x 4, until the last of {micro_batches} micro-batches"
        return Line("whole gradients", shape.trained * 4, how, "ray.reduce_gradients: every_micro_batch")
    outside = 0 if config.model.lora else shape.parameters - shape.body
    return Line("whole gradients", outside * 4, f"{outside / 1e6:.1f} M x 4, outside the layers", "model.lora")


def activations(shape: Shape, tokens: float, slots: float, width: int, checkpointed: bool) -> list[Line]:
    """The tensors of a Llama's blocks that autograd keeps for the backward pass.

    Per token: each of the two norms keeps its input in float32, the normalized input and its output. The output layer
    of attention keeps its input, and the gated MLP keeps four arrays. Per slot: queries, keys, values and the output of
    attention. (A token of a shared prompt has one slot for each response.) Activations of adapters are not counted.
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


def _logits(config: Config, shape: Shape, answers: float, tile: int) -> Line:
    whole = _COPIES_OF_LOGITS * answers * shape.vocabulary * 4
    if config.model.fused_head:
        gradient = shape.vocabulary * shape.hidden * 4 * (not config.model.lora)
        how = "a tile at a time, and the gradient of the head" if gradient else "a tile at a time"
        return Line("logits", min(whole, tile) + gradient, how, "model.lora")
    how = f"{_COPIES_OF_LOGITS} x {answers:.0f} response tokens x {shape.vocabulary} words x 4"
    return Line("logits", whole, how, "model.fused_head, model.max_tokens_per_micro_batch")


def table(found: Plan) -> Any:
    """Return the plan as a table for the terminal."""
    from rlprims.reports.terminal import make_table

    is_ray = bool(found.engine)
    peak = Line("peak of a rank" if is_ray else "peak", found.peak, "", "")
    parts = [
        ("a rank" if is_ray else "always", found.rank),
        ("while sampling", found.sampling),
        ("in an update", found.update),
        ("while saving", found.saving),
        ("while sending", found.sending),
        ("", [peak]),
        ("an engine", found.engine),
        ("", [Line("an engine in all", total(found.engine), "", "")] if is_ray else []),
        ("after a step", found.sync),
    ]
    rows = [
        (title * (i == 0), line.what, text_of(line.bytes), line.how, line.lower)
        for title, lines in parts
        for i, line in enumerate(lines)
    ]
    return make_table(("", "what", "memory", "how", "what lowers it"), rows, title="rlprims plan")
