"""The tensors that a transfer of weights sends."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from rlprims.execution.hf._adapters import merged
from rlprims.execution.ray._fsdp import Shard
from rlprims.execution.ray._wire import Info, layers


class Source:
    """Iterates over the snapshot of a policy as whole tensors, one decoder layer at a time, with adapters merged.

    Gathering a layer is a collective. So every rank must iterate to the end, also after an error of the transfer.

    Args:
        module: the policy.
        shards: this rank's shards of its parameters, by name.
        dtype: the dtype of the engines; None: the dtype of the trained weights.
        device: the device of the whole tensors; None: the CPU.
        as_stored: send the experts of a mixture under the names of a checkpoint, which vLLM loads, and one by one.
            transformers stores them so, and joins the experts of a layer when it loads a model.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Mapping[str, Shard],
        dtype: str | None = None,
        device: torch.device | None = None,
        *,
        as_stored: bool = False,
    ) -> None:
        self.module, self.shards, self.device = module, shards, device or torch.device("cpu")
        self.as_stored = as_stored and any(".experts." in name for name in shards)
        # The sum of a weight and its adapters must be computed before it is rounded.
        is_adapted = any(".lora_" in name for name in shards)
        self._gathered_in = getattr(torch, dtype) if dtype and not is_adapted else None
        self._names = layers(list(shards))
        self.parts = [self._infos(names, dtype) for names in self._names]

    def __iter__(self) -> Iterator[tuple[list[Info], list[Tensor]]]:
        for names, infos in zip(self._names, self.parts, strict=True):
            tensors = merged(self.module, {name: self._whole(name) for name in names})
            if self.as_stored:
                tensors = self._stored(tensors)
            yield infos, [tensors.pop(info.name) for info in infos]

    @property
    def largest(self) -> int:
        """The bytes of the largest tensor."""
        return max(info.bytes for part in self.parts for info in part)

    def _whole(self, name: str) -> Tensor:
        return self.shards[name].whole(self.device, self._gathered_in)

    def _infos(self, names: list[str], dtype: str | None) -> list[Info]:
        plain = {name: self.shards[name] for name in names if ".lora_" not in name}
        empty = {
            name.replace(".base_layer.", "."): torch.empty(
                shard.local.shape if shard.of is None else shard.of.shape, dtype=shard.local.dtype, device="meta"
            )
            for name, shard in plain.items()
        }
        if self.as_stored:
            empty = self._stored(empty)
        return [Info(name, dtype or str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in empty.items()]

    def _stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = revert_weight_conversion(self.module, tensors)
        return stored
