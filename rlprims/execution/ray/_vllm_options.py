"""Options of a vLLM engine, and parameters of its requests."""

from typing import Any

import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from rlprims.execution import ModelConfig, RayConfig
from rlprims.execution._ray_config import memory_options


def scoring(**wanted: Any) -> SamplingParams:
    """The parameters of a request that scores its prompt. vLLM also samples a token, which nobody reads."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        flat_logprobs=True,  # lists of numbers instead of an object for each number
        output_kind=RequestOutputKind.FINAL_ONLY,
        **wanted,
    )


def engine_options(model: ModelConfig, cluster: RayConfig) -> dict[str, Any]:
    """The options of an engine by model, devices and memory."""
    devices, gpus = cluster.tensor_parallel_size, cluster.all_pools[cluster.roles.rollout].gpus
    options: dict[str, Any] = {
        "model": model.path,
        "dtype": cluster.mixed_precision or model.dtype,
        # On a CPU there are no CUDA graphs, and compiling with g++ instead takes seconds.
        "enforce_eager": current_platform.is_cpu() if cluster.enforce_eager is None else cluster.enforce_eager,
        "tensor_parallel_size": devices,
        "max_num_seqs": model.max_rows_per_generation,
        "max_logprobs": -1,  # no limit for requests
        "seed": 0,
        "disable_log_stats": True,
    }
    if torch.cuda.is_available() and "gpu_memory_utilization" not in cluster.engine_options:
        options |= memory_options(*torch.cuda.mem_get_info(), gpus=gpus, colocate=cluster.colocate)
    if cluster.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = cluster.kv_cache_bytes
    if devices > 1:
        options["distributed_executor_backend"] = "mp"  # child processes, which end with this process
    return options
