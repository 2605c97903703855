"""The parts of a batch: the rows of each rank, and micro-batches within a token budget."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rlprims.algorithms import Algorithm, step_counts
from rlprims.batching import micro_batches, prefix_tree
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, kept_of
from rlprims.execution.hf._forward import LAYOUT, with_places
from rlprims.execution.hf._models import load_causal_lm, usable_device
from rlprims.execution.hf._packed import Layout, packed_micro_batches
from rlprims.execution.hf._routes import ROUTES, tree_ids, without_routes
from rlprims.execution.hf._vision import IMAGES, INPUTS, image_inputs
from rlprims.grouping import dense_ids, rows_by_label
from rlprims.types import SamplingSupport, Totals

StepTotals: TypeAlias = Mapping[str, Totals]
"""The totals of a step by name: of the policy's tokens, and of each loss term with its own tokens."""


class Ranks(NamedTuple):
    """The processes that share a model. Each has some rows of a batch, and the totals of the whole batch."""

    size: int
    """Parts of a batch: fewer than processes where some compute the same rows together."""
    shard: Callable[[nn.Module], nn.Module]
    """Wrap a module so that its gradients are means over the ranks."""
    load: Callable[[str, ModelConfig], nn.Module]
    """Load a causal language model and wrap it. If its files can be read in parts, no rank loads the whole model."""
    largest: Callable[[int], int]
    """The maximum of a number over the ranks."""
    within: Callable[[nn.Module, Callable[[], Any]], Any]
    """Call a function while the weights outside the module's layers, such as the LM head's, are whole."""
    reduce_next: Callable[[nn.Module, bool], None]
    """Set whether the next backward pass of a module sums the gradients over the ranks, or keeps them on the rank."""
    total: Callable[[Tensor], Tensor] = lambda x: x
    """The sum of a tensor over the ranks that have other rows."""


SINGLE_PROCESS = Ranks(
    size=1,
    shard=lambda module: module,
    load=load_causal_lm,
    largest=lambda number: number,
    within=lambda module, compute: compute(),
    reduce_next=lambda module, last: None,
)


def with_counts(batch: DataProto, algorithm: Algorithm) -> tuple[DataProto, StepTotals]:
    """The batch of an optimizer step with the counts for its means, and its totals. Call it before the split."""
    counts = step_counts(algorithm, dict(batch.batch.items()))
    return batch.union(DataProto.from_dict(tensors=counts.columns)), counts.totals


def with_critic_counts(batch: DataProto, algorithm: Algorithm) -> tuple[DataProto, StepTotals]:
    """The same for a critic, whose loss has no further terms, so that the batch needs no token selections of theirs."""
    return with_counts(batch, algorithm.model_copy(update={"loss_terms": ()}))


def without_tokens(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks among the columns, such as ``response_mask``, set to False everywhere."""
    mask = columns["response_mask"]
    tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}  # not the kept sets
    return {n: torch.zeros_like(x) for n, x in tensors.items() if x.dtype is torch.bool and x.shape == mask.shape}


def token_budget(config: ModelConfig, longest: int) -> int:
    """The tokens of a micro-batch: as configured, else 16384, or the longest row (pair, rollout) if that is longer."""
    return config.max_tokens_per_micro_batch or max(16384, longest)


class Part(NamedTuple):
    """A micro-batch on the device."""

    rows: list[int]
    """Its rows in the batch. Empty on a rank that has fewer micro-batches than another: it has no valid tokens."""
    data: dict[str, Tensor]
    is_last: bool


def parts_of(
    batch: DataProto, model: ModelConfig, ranks: Ranks, *, packing: bool, together: str | None = None
) -> Iterator[Part]:
    """Micro-batches within the token budget, the same number on every rank.

    Rows with the same id in the column ``together``, if the batch has it, are in one micro-batch.
    """
    device = usable_device(model)
    routes = batch[ROUTES] if model.replay_routes and ROUTES in batch else None
    tensors = {name: x for name, x in without_routes(batch).batch.items() if not x.is_nested}
    kept, images = kept_of(batch), batch.non_tensor_batch.get(IMAGES)
    ids = {name: batch[name] for name in ("group_ids", "trajectory_ids") if name in tensors}
    labels = batch[together].tolist() if together is not None and together in tensors else None
    width, attention = batch["prompts"].shape[1], batch["attention_mask"].bool()
    prompts, responses = attention[:, :width].sum(-1).tolist(), attention[:, width:].sum(-1).tolist()
    budget = token_budget(model, _largest_unit(prompts, responses, labels))
    if packing:
        tokens = torch.cat([batch["prompts"], batch["responses"]], 1)
        if routes is not None and len(batch):
            tokens = tree_ids(tokens, routes, device)
            tensors["tree_ids"] = tokens
        plan = _packed_plan if routes is None else _packed_plan.__wrapped__  # layouts with routes are not kept
        known = torch.where(attention, tokens, -1).long().numpy().tobytes()
        parts, layouts = plan(known, tokens.shape[1], width, labels and tuple(labels), budget)
    else:
        parts, layouts = micro_batches(prompts, responses, labels, max_tokens=budget), {}
    count = ranks.largest(len(parts))  # before the first forward pass, in which the ranks wait for each other
    for i, rows in enumerate(parts + [[]] * (count - len(parts))):
        part = _trimmed(tensors, rows or [0], kept, routes)
        part |= {name: dense_ids(part[name]) for name in ids} | ({} if rows else without_tokens(part))
        if images is not None:
            whole = torch.cat([part["prompts"], part["responses"]], 1)
            part[INPUTS] = image_inputs(model, images[rows or [0]], whole, part["attention_mask"])  # type: ignore[assignment]
        placed = with_places(part, packing=packing, layout=layouts.get(i))
        if packing and rows:
            layouts[i] = placed[LAYOUT]
        yield Part(rows, _sent(placed, device), i == count - 1)


@lru_cache(maxsize=1)
def _packed_plan(
    tokens: bytes, width: int, prompt_width: int, labels: tuple[Hashable, ...] | None, max_tokens: int
) -> tuple[list[list[int]], dict[int, Layout]]:
    """Micro-batches, and a place for their layouts by number, which the passes over a batch share. Padding is −1."""
    rows = torch.from_numpy(np.frombuffer(tokens, np.int64).reshape(-1, width).copy())
    return packed_micro_batches(prefix_tree(rows, rows >= 0).nodes, labels, max_tokens=max_tokens), {}


def _sent(part: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors of a part on the device; the process does not wait for it."""
    is_gpu = device.type == "cuda"
    send = lambda x: x.pin_memory().to(device, non_blocking=True) if is_gpu else x.to(device)  # noqa: E731
    sent: dict[str, Any] = tree_map_only(Tensor, send, part)
    return sent


def _largest_unit(prompts: Sequence[int], responses: Sequence[int], labels: Sequence[Hashable] | None) -> int:
    """The tokens, with padding, of the largest row, or of the largest set of rows that stay together."""
    units = [[row] for row in range(len(prompts))] if labels is None else rows_by_label(labels)
    sizes = (len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows)) for rows in units)
    return max(sizes, default=1)


def _trimmed(
    batch: dict[str, Tensor], rows: Iterable[int], kept: SamplingSupport | None = None, routes: Tensor | None = None
) -> dict[str, Tensor]:
    """Some rows with their kept sets and experts, without the columns that only pad."""
    index = torch.tensor(list(rows))
    part = {name: tensor[index] for name, tensor in batch.items()}
    width, attention = part["prompts"].shape[1], part["attention_mask"]
    prompt = int(attention[:, :width].sum(-1).max())
    response = max(1, int(attention[:, width:].sum(-1).max()))
    whole = slice(width - prompt, width + response)
    columns = {"prompts": slice(width - prompt, None), "attention_mask": whole, "tree_ids": whole}
    found = {n: x[:, columns.get(n, slice(response))] if x.dim() >= 2 else x for n, x in part.items()}
    if routes is not None:
        found[ROUTES] = routes[index][:, whole]
    if kept is None:
        return found
    tokens = index[:, None] * batch["responses"].shape[1] + torch.arange(response)
    return {**found, "kept": kept.take(rearrange(tokens, "b t -> (b t)"))}  # type: ignore[dict-item]
