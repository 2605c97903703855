"""Model FLOPs of an update, computed from formulas and not measured; and the peak FLOP/s of a device.

A token costs 2 operations per weight in the forward, as many again for the gradient of its input, and as many for the
gradient of the weight if it is trained: 6 N in all (Kaplan et al. 2020, arXiv:2001.08361). Attention adds 12 L d n^2
for a sequence of n tokens in L layers of width d, the causal half not subtracted (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B). N does not include the input embedding, and includes the head for response tokens only.
Padding, recomputed activations and the part that reads images are not counted. In a mixture every expert is counted.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from rlprims.data_proto import DataProto
from rlprims.execution._observed import Meter
from rlprims.execution.hf._training import Training
from rlprims.execution.hf._vision import tower

_DENSE_TFLOPS = {
    # 16-bit matrix products without sparsity, from the makers' data sheets; the first name that is found in a GPU's.
    **{"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0},
    **{"L40S": 362.0, "L4": 121.0, "A10G": 70.0, "A10": 125.0, "V100": 125.0, "T4": 65.0},
}


def meter_of(training: Training, dtype: str | None = None, *, verb: str | None = None, same_rows: int = 1) -> Meter:
    """The meter of a training worker, for the model's dtype or for ``dtype``.

    ``verb`` updates its model (None: ``update``, or ``update_critic``); ``same_rows`` workers divide the operations.
    """
    model, verbs = training.model, {"policy": "update", "critic": "update_critic"}
    states = training.train_states()
    costs = {verb or verbs[name]: update_cost(state.module, same_rows) for name, state in states.items()}
    known, kind = model.peak_tflops, getattr(torch, dtype or model.dtype)
    return Meter(costs, lambda: known * 1e12 if known else peak_flops(training.device.type, kind))


def update_cost(model: nn.Module, same_rows: int = 1) -> Callable[[DataProto], float]:
    """A function that returns the number of operations of a batch's forward and backward pass."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    heads = {id(p) for p in head.parameters()} if head is not None else set()
    looked_up = {id(p) for p in (*embedding.parameters(), *tower(model).values())}
    # Per token: 4 for each weight, and 2 more if it is trained.
    costs = {id(p): p.numel() * (6 if p.requires_grad else 4) for p in model.parameters()}
    per_response = sum(cost for key, cost in costs.items() if key in heads)
    per_token = sum(cost for key, cost in costs.items() if key not in heads | looked_up)
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    heads_of_layer = config.num_attention_heads
    width = heads_of_layer * (getattr(config, "head_dim", None) or config.hidden_size // heads_of_layer)
    per_square = 12 * config.num_hidden_layers * width

    def cost(batch: DataProto) -> float:
        lengths = batch["attention_mask"].sum(-1)
        responses = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum()
        whole = per_token * lengths.sum() + per_response * responses + per_square * (lengths**2).sum()
        return float(whole) / same_rows

    return cost


@cache
def peak_flops(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a device: from the data sheet for a known GPU in 16 bits, else the rate of a large matrix product."""
    if device == "cuda" and dtype.itemsize == 2:
        name = torch.cuda.get_device_name()
        for known, tflops in _DENSE_TFLOPS.items():
            if known in name:
                return tflops * 1e12
    size = 4096 if device == "cuda" else 512
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
