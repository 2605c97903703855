"""The code that vLLM's own worker processes import: the receiver of weights, and a GPU's draw on a CPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, get_layerwise_info
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rlprims.execution.hf._draw import draw
from rlprims.execution.ray._wire import Endpoint, Receiver, Sums, checksums

BACKEND = "rlprims_gloo"


class CpuDraw(nn.Module):
    """The draw of vLLM's GPU runner in the place of the one that its CPU runner (V1) has for lack of Triton.

    Called as ``vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler``, for a batch.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.runner = [runner]  # in a list, as it is no part of the module

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = apply_top_k_top_p(logits, k, p)
        count = len(logits)
        # A greedy request has no seed; what is drawn for it is not used.
        seeds = [generators[row].initial_seed() if row in generators else 0 for row in range(count)]
        positions = self.runner[0].seq_lens[:count].long() - 1
        return draw(logits, torch.tensor(seeds, dtype=torch.int64), positions), logits.log_softmax(-1)


@dataclass
class _Init(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there when types are checked
    host: str
    port: int
    rank: int
    size: int
    timeout: float


@dataclass
class _Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """An update of the whole model: the sender describes its tensors."""


class GlooReceiver(WeightTransferEngine[_Init, _Update]):  # type: ignore[misc]
    """vLLM's interface for new weights, over the wire of :mod:`rlprims.execution.ray._wire`."""

    init_info_cls, update_info_cls = _Init, _Update
    wire: Receiver | None = None

    def init_transfer_engine(self, init_info: _Init) -> None:
        # The engine's processes follow each other.
        mine = init_info.rank + self.parallel_config.rank
        self.wire = Receiver(Endpoint(init_info.host, init_info.port, mine, init_info.size, init_info.timeout))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _Update) -> None:
        self.received: Sums = {}
        for part in self.wire or ():
            self.received |= checksums(part)
            self.model.load_weights(iter(part.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # Of tied weights only the embedding comes, and on a CPU the head keeps its own packed copy of the old one.
        named = self.model.named_parameters(remove_duplicate=False)
        embeddings = {id(parameter) for name, parameter in named if "embed" in name}
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.is_cpu and id(module.weight) in embeddings:
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self.wire = None


WeightTransferEngineFactory.register_engine(BACKEND, GlooReceiver)


class WorkerExtension:
    """Methods that vLLM's worker gains."""

    model_runner: Any
    weight_transfer_engine: Any

    def draw_as_a_gpu(self) -> bool:
        """On a CPU: have its draw; whether the runner (V2, in Triton's interpreter) has it already."""
        has_it: bool = not isinstance(self.model_runner, CPUModelRunner)
        if not has_it:
            self.model_runner.sampler.topk_topp_sampler = CpuDraw(self.model_runner)
        return has_it

    def received_sums(self) -> Sums:
        """Of what the last update brought."""
        sums: Sums = self.weight_transfer_engine.received
        return sums

    def held_sums(self) -> Sums:
        """Of the model's parameters, by vLLM's names."""
        return checksums(dict(self.model_runner.get_model().named_parameters()))

    def abandon_weight_update(self) -> None:
        """Forget a part of an update, so that the next one begins anew."""
        for layer in self.model_runner.get_model().modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        LOADING_LAYERS.clear()
        self.weight_transfer_engine.reset_weight_update_target()
        self._weight_update_active = False

    def fused_names(self) -> dict[str, list[str]]:
        """Which of the checkpoint's names are one parameter here, such as qkv_proj."""
        return dict(getattr(self.model_runner.get_model(), "packed_modules_mapping", {}))
