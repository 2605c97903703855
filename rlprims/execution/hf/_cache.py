"""What a model keeps of the tokens that it has read: keys and values, states of linear layers and convolutions."""

from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from rlprims.execution.hf._decode import Choose, Decode, forward, has_decode
from rlprims.execution.hf._draw import Choice


class Cache:
    """It reads the prompts, then one token of each row; ``fixed`` tokens of a row have places, if the model can."""

    def __init__(self, model: nn.Module, choose: Choose, *, is_padded: bool, fixed: int) -> None:
        self.model, self.choose, self.is_padded, self.fixed = model, choose, is_padded, fixed
        names = signature(model.forward).parameters  # of which transformers 5.24 has one for all types
        self.name = next((name for name in ("cache", "cache_params") if name in names), "past_key_values")
        self.held: dict[str, Any] = {}  # the argument of the next forward pass
        self.decode: Decode | None = None

    def read(self, inputs: Tensor, positions: Tensor, attention: Tensor, **seen: Tensor) -> Tensor:
        """Logits (B, V) of the token after ``inputs`` (B, n); ``attention`` covers these and all before them.

        ``seen`` are the model's other inputs, of images.
        """
        mask = attention if self.is_padded and self._is_masked() else None
        output = forward(self.model, self.held, inputs, positions, mask, **seen)
        if not self.held:
            self._keep(output.get(self.name))
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def next(self, inputs: Tensor, positions: Tensor, attention: Tensor, seeds: Tensor) -> Choice:
        """The tokens after ``inputs`` (B, 1), until the next call."""
        if self.decode is not None:
            return self.decode(inputs, positions, attention, seeds)
        return self.choose(self.read(inputs, positions, attention), seeds, positions)

    @property
    def compact_below(self) -> float:
        """If less than this share of rows is active, :meth:`select` pays: it copies all, and ends a CUDA graph."""
        return 7 / 8 if self.decode is None else 1 / 2

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: linear layers have ``reorder_cache`` alone, MiniMax's cache the other."""
        cache = self.held[self.name]
        if not hasattr(cache, "linear_cache"):
            cache.reorder_cache(rows)
            return
        for layer in range(len(cache.linear_cache), len(cache)):  # it looks for all, and lists none after the last
            cache.set_linear_cache(layer, [])
        cache.batch_select_indices(rows)

    def _is_masked(self) -> bool:
        """Whether padding is masked: always by attention, and by a model without it only while it reads the prompts."""
        held = [getattr(cache, "self_attention_cache", cache) for cache in self.held.values()]
        return not held or any(hasattr(layer, "keys") for layer in held[0].layers)

    def _keep(self, cache: Any) -> None:
        if not isinstance(cache, DynamicCache | EncoderDecoderCache):
            kept, kind = "none" if cache is None else f"a {type(cache).__name__}", type(self.model).__name__
            need = "the local sampler needs a DynamicCache of transformers"
            raise ValueError(f"{need}, got {kept} from {kind}: set execution: ray if vLLM has this type")
        self.held = {self.name: cache}
        if self.fixed and has_decode(self.model, cache, self.fixed):
            self.decode = Decode(self.model, self.choose, self.held, self.fixed)
