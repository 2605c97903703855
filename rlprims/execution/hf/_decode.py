"""Sampling a token of each row by a CUDA graph: a device starts the whole forward pass and the draw at once.

Without it, Python starts each operation: 30 ms for 28 layers, whatever the batch. In a graph all sizes and addresses
are fixed, so keys and values have slots for tokens to come, which the mask hides. Where the slots or the rows become
others, a new graph is recorded.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlprims.execution.hf._draw import Choice
from rlprims.execution.hf._packed import is_packed

Choose: TypeAlias = Callable[[Tensor, Tensor, Tensor], Choice]
"""What follows logits (B, V), by seeds (B,) and the positions (B, 1) of the tokens before."""

_SPARE, _LEAST = 1 / 4, 128
"""The share and the least number of slots for tokens to come: more are read in vain, fewer need more graphs."""


def has_decode(model: nn.Module, cache: Any, limit: int) -> bool:
    """Whether the layers keep all keys of ``limit`` tokens, attention takes a mask, and no operation waits."""
    layers = getattr(cache, "layers", [])
    whole = bool(layers) and all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= limit)
        for layer in layers
    )
    return whole and is_packed(model) and getattr(model, "_can_compile_fullgraph", False)


def forward(
    model: nn.Module, held: dict[str, Any], inputs: Tensor, positions: Tensor, mask: Tensor | None, **seen: Tensor
) -> Any:
    """The model's output for ``inputs`` after the tokens of its cache in ``held``, with the logits of the last one."""
    read: dict[str, Any] = {"input_ids": inputs, "position_ids": positions, "attention_mask": mask}
    return model(**read, use_cache=True, logits_to_keep=1, **held, **seen)


class _Slots(DynamicLayer):  # type: ignore[misc]
    """The keys and values (B, heads, S, d) of a layer. The next token is written to slot ``at``, int64 (1,)."""

    def __init__(self, layer: DynamicLayer, at: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.at, self.is_initialized = layer.keys, layer.values, at, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for slots, new in ((self.keys, key_states), (self.values, value_states)):
            slots.index_copy_(2, self.at, new)
        return self.keys, self.values

    def make_room(self, slots: int) -> None:
        pad = (0, 0, 0, slots - self.keys.shape[2])
        self.keys, self.values = (nn.functional.pad(x, pad) for x in (self.keys, self.values))


class Decode:
    """A pass over one token of each row, and the choice of the next; it changes the cache in ``held``.

    There are at most ``limit`` tokens in a row.
    """

    def __init__(self, model: nn.Module, choose: Choose, held: dict[str, Any], limit: int) -> None:
        self.model, self.choose, self.held, self.limit = model, choose, held, limit
        [self.cache] = held.values()
        device = self.cache.layers[0].keys.device
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.cache.layers = [_Slots(layer, self.at) for layer in self.cache.layers]
        self.records = device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs = self.positions = self.seeds = self.mask = torch.zeros(0)
        self.choice: Choice

    def __call__(self, inputs: Tensor, positions: Tensor, attention: Tensor, seeds: Tensor) -> Choice:
        """What follows ``inputs`` (B, 1), until the next call; ``attention`` (B, t) covers them too."""
        if is_new := len(inputs) != len(self.inputs) or attention.shape[1] > self.mask.shape[-1]:
            self._set(inputs, positions, attention, seeds)
        self.inputs.copy_(inputs)
        self.positions.copy_(positions)
        if self.graph is None and self.records and not is_new:  # the pass before it has set up what libraries need
            self._record()
        if self.graph is None:
            self.choice = self._pass()
        else:
            self.graph.replay()
        return self.choice

    def _set(self, inputs: Tensor, positions: Tensor, attention: Tensor, seeds: Tensor) -> None:
        """Make place for these rows and for further tokens."""
        self.graph, length, layers = None, attention.shape[1], self.cache.layers
        if length > layers[0].keys.shape[2]:
            slots = min(self.limit, length + max(_LEAST, int(_SPARE * length)))
            for layer in layers:
                layer.make_room(slots)
        self.inputs, self.positions, self.seeds = inputs.clone(), positions.clone(), seeds
        self.mask = nn.functional.pad(attention.bool(), (0, layers[0].keys.shape[2] - length))[:, None, None]
        self.at.fill_(length - 1)

    def _pass(self) -> Choice:
        self.mask.index_fill_(-1, self.at, True)
        output = forward(self.model, self.held, self.inputs, self.positions, self.mask)
        self.at += 1
        return self.choose(output.logits[:, -1], self.seeds, self.positions)

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.choice = self._pass()
        except RuntimeError as error:
            self.records = False
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"tokens are sampled without a CUDA graph, which takes longer: {reason}", stacklevel=2)
        else:
            self.graph = graph
