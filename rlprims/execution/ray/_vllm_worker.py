"""The code that vLLM's own worker processes import: receivers of weights, and a sampler for CPUs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, _place_kernel_tensors, get_layerwise_info
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

from rlprims.execution.hf._draw import draw
from rlprims.execution.ray._wire import Endpoint, Receiver, Sums, checksums


class CpuDraw(nn.Module):
    """Samples on a CPU as vLLM's GPU runner does; called as its ``TopKTopPSampler`` is."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = [runner]  # in a list, so that torch does not register it as a submodule

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = apply_top_k_top_p(logits, k, p)
        count = len(logits)
        # A greedy request has no seed, and vLLM ignores the token that is sampled for it.
        seeds = [generators[row].initial_seed() if row in generators else 0 for row in range(count)]
        positions = self.runner[0].seq_lens[:count].long() - 1
        return draw(logits, torch.tensor(seeds, dtype=torch.int64), positions), logits.log_softmax(-1)


class _Masks(SamplingMaskTensors):  # type: ignore[misc]
    """vLLM's sampling masks, of a whole vocabulary without ids: greedy requests and others without a filter have it."""

    @classmethod
    def from_logits(cls, logits: Tensor, *args: Any, **options: Any) -> Any:
        masks = super().from_logits(logits, *args, **options)
        masks.counts.masked_fill_(masks.counts == logits.shape[1], 0)
        return masks


class _Loading:
    """A mixin of all receivers: it computes checksums of the received tensors, and loads embeddings in place.

    vLLM would load these, the largest tensors, into new memory and pack them there (on a CPU): two more copies.
    """

    model: Any
    received: Sums

    def start_weight_update(self) -> None:
        super().start_weight_update()  # type: ignore[misc]  # super() is a receiver of vLLM
        self.received = {}
        for module in _embeddings(self.model):
            info = get_layerwise_info(module)
            _place_kernel_tensors(module, info)
            info.reset()
        if current_platform.is_cpu():
            for module in self.model.modules():
                # On a CPU vLLM packs the weights of experts only when it creates their kernel, so it must do it anew.
                if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                    method.moe_kernel = None

    def receive_weights(self, update_info: Any) -> None:
        model, self.model = self.model, _Summing(self.model, self.received)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        for module in _embeddings(self.model):
            if module.weight.is_cpu:  # on a CPU a head has a packed copy, also of a tied embedding
                module.cpu_linear = None  # free the old copy first, otherwise there are three copies
                module.quant_method.process_weights_after_loading(module)


def _embeddings(model: nn.Module) -> Iterator[Any]:
    """Return the embeddings and heads that are not quantized: their parameter equals the checkpoint's tensor."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is UnquantizedEmbeddingMethod:
            yield module


class _Summing:
    """A proxy of a model that computes checksums of the tensors that the model loads."""

    def __init__(self, model: Any, sums: Sums) -> None:
        self.model, self.sums = model, sums

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        tensors = dict(weights)
        self.sums.update(checksums(tensors))
        return self.model.load_weights(iter(tensors.items()))


@dataclass
class _Init(Endpoint, WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there when types are checked
    """What vLLM's calls say of the address."""


@dataclass
class _Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    parts: list[list[list[Any]]]  # the name, dtype and shape of each tensor, by part


class _Gloo(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives by :mod:`rlprims.execution.ray._wire`; an update begins and ends as NCCL's."""

    init_info_cls, update_info_cls = _Init, _Update
    wire: Receiver | None = None

    def init_transfer_engine(self, init_info: _Init) -> None:
        # The processes of an engine have consecutive ranks.
        self.wire = Receiver(replace(init_info, rank_offset=init_info.rank_offset + self.parallel_config.rank))

    def receive_weights(self, update_info: _Update) -> None:
        if self.wire is None:
            raise RuntimeError("expected init_weight_transfer_engine before update_weights, got no connection")
        for part in self.wire.parts(update_info.parts):
            self.model.load_weights(part.items())
            del part  # free this part before the next one is received

    def shutdown(self) -> None:
        self.wire = None


class GlooReceiver(_Loading, _Gloo):
    """Receives through the memory of the CPU."""


class NcclReceiver(_Loading, NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's receiver from another device."""


class IpcReceiver(_Loading, IPCWeightTransferEngine):  # type: ignore[misc]
    """vLLM's receiver from another process on the same device."""


RECEIVERS: dict[str, type] = {"gloo": GlooReceiver, "nccl": NcclReceiver, "ipc": IpcReceiver}
"""The receivers, by backend. vLLM's names for them have a prefix."""
PREFIX = "rlprims_"
for _name, _receiver in RECEIVERS.items():
    WeightTransferEngineFactory.register_engine(PREFIX + _name, _receiver)


class WorkerExtension:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any
    weight_transfer_engine: Any

    def draw_as_a_gpu(self) -> bool:
        """Make a CPU's runner V1 sample as on a GPU; returns whether it is V2, which does (by Triton's interpreter)."""
        has_it: bool = not isinstance(self.model_runner, CPUModelRunner)
        if not has_it:
            self.model_runner.sampler.topk_topp_sampler = CpuDraw(self.model_runner)
        return has_it

    def return_masks(self, wanted: bool) -> None:
        """Make runner V2 return the ids that each token could have been."""
        sampler.SamplingMaskTensors = _Masks
        self.model_runner.sampler.return_sampling_mask = wanted

    def ban(self, tokens: list[int]) -> None:
        """Give tokens the probability 0, as :func:`rlprims.execution.hf._vision.ban_placeholders` does."""
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def without(*args: Any, **options: Any) -> Tensor:
            logits: Tensor = compute(*args, **options)
            return logits.index_fill_(-1, torch.tensor(tokens, device=logits.device), -torch.inf)

        model.compute_logits = without

    def received_sums(self) -> Sums:
        """Return the checksums of the tensors that the last update brought."""
        sums: Sums = self.weight_transfer_engine.received
        return sums

    def held_sums(self) -> Sums:
        """Return the checksums of the model's parameters, by vLLM's names."""
        model, sent_as = self.model_runner.get_model(), self.model_runner.model_config.dtype
        # In 16 bits vLLM's kernels for CPUs hold a bias in float32: in the dtype that was sent it is the same.
        return checksums({n: x.to(sent_as) if n.endswith(".bias") else x for n, x in model.named_parameters()})

    def abandon_weight_update(self) -> None:
        """Discard an incomplete update, so that another one can begin."""
        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        LOADING_LAYERS.clear()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False
        self.weight_transfer_engine.shutdown()

    def names_of(self, names: list[str]) -> list[str]:
        """Return vLLM's name of each of the checkpoint's names."""
        mapper = getattr(self.model_runner.get_model(), "hf_to_vllm_mapper", None)
        return names if mapper is None else [mapper._map_name(name) or name for name in names]

    def fused_names(self) -> dict[str, list[str]]:
        """Return the checkpoint's names that vLLM joins into one parameter, by the joined name, such as qkv_proj."""
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))
