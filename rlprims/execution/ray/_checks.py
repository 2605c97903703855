"""What is checked of the settings before Ray starts.

vLLM checks the values of its options when an engine starts. Their names are read from its source: its import is slow.
"""

import ast
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoConfig

from rlprims.execution import ModelConfig, RayConfig, RunNeeds, Sampling
from rlprims.execution.hf._families import check_type, sees
from rlprims.execution.hf._models import device_of
from rlprims.execution.hf._routes import routed_layers
from rlprims.execution.hf._vision import check_vision
from rlprims.execution.ray._tensor_parallel import check_plans

_DECIDED = {
    "model": "model.path", "dtype": "model.dtype or ray.mixed_precision", "seed": "the run's seed",
    "enforce_eager": "ray.enforce_eager", "enable_sleep_mode": "ray.colocate",
    "tensor_parallel_size": "ray.tensor_parallel_size", "kv_cache_memory_bytes": "ray.kv_cache_bytes",
    "max_num_seqs": "model.max_rows_per_generation", "structured_outputs_config": None,
    **dict.fromkeys(("max_model_len", "logprobs_mode", "max_logprobs", "worker_extension_cls", "disable_log_stats")),
}  # fmt: skip
"""Options that other settings decide, or None: this library needs one value."""
_COPIES = "data_parallel"
"""The beginning of options by which vLLM runs several copies of a model."""
_OTHER_PROCESSES = {"pipeline_parallel_size", "prefill_context_parallel_size", "nnodes"}
"""Options by which an engine has other processes than those of ``ray.tensor_parallel_size``."""
SERVED = ("idefics3", "qwen2_5_vl")
"""Types whose rows with images vLLM samples as the ranks compute them, by the tests. The second needs torchvision."""
_MOST_LOG_PROBS = 32_768
"""Tokens of a vocabulary whose log-probs vLLM may return for each sampled token, as a Python object each."""


def check(cluster: RayConfig, model: ModelConfig, run: RunNeeds) -> None:
    """Raise a ValueError if cluster and models do not fit together."""
    if run.get("images"):
        _check_images(cluster, model, run)
    check_plans(cluster, model, run["algorithm"])
    check_engine_options(cluster, model)
    check_type(AutoConfig.from_pretrained(model.path), vision=run.get("images", False))
    for sampling in run.get("sampling", ()) if cluster.engine == "vllm" else ():
        check_options(sampling)
    if cluster.engine == "vllm" and (_on_cpus(cluster, model) or "speculative_config" in cluster.engine_options):
        size = int(AutoConfig.from_pretrained(model.path).get_text_config().vocab_size)
        for sampling in run.get("sampling", ()):
            check_truncation(sampling, size)
    if model.router_aux_loss_coef:
        routed_layers(model.path, "router_aux_loss_coef: 0")
    if model.replay_routes:
        _check_routes(cluster, model)


def with_whole_paths(model: ModelConfig) -> ModelConfig:
    """Return the config with absolute paths of local model folders: a worker may have another working directory."""
    return model.with_paths(lambda path: str(Path(path).absolute()) if Path(path).exists() else path)


def check_engine_options(cluster: RayConfig, model: ModelConfig) -> None:
    """Check the names of the options."""
    known = _known_options()
    decided = _DECIDED | _decided_for(cluster, model)
    for name in cluster.engine_options:
        place = f"ray.engine_options: {name}"
        if known and name not in known:
            near = get_close_matches(name, known, 3)
            fix = f"use {', '.join(near)}" if near else "its EngineArgs has the names"
            raise ValueError(f"{place}: vLLM has no such option; {fix}")
        if name.startswith(_COPIES):
            raise ValueError(f"{place}: an engine here is one copy of the model; use ray.rollout_workers for several")
        if name in _OTHER_PROCESSES:
            raise ValueError(
                f"{place}: an engine here is divided over devices by ray.tensor_parallel_size alone; use this, and "
                "ray.rollout_workers for several engines"
            )
        if name == "quantization":
            raise ValueError(f"{place}: a quantized engine does not hold the weights that a sync sends; leave it out")
        if name in decided:
            fix = f"use {decided[name]}" if decided[name] else "this library needs its own value"
            raise ValueError(f"{place}: {fix}")


def check_options(sampling: Sampling) -> None:
    """Raise an error for what vLLM does not do, or does with other numbers."""
    if sampling.logits_processors or sampling.thinking_budget is not None:
        own = "vLLM calls no logits_processors of ours, and counts the tokens of thinking_budget in another way"
        raise ValueError(f"sampling: {own}; use ray.engine: hf, or execution: local")


def check_truncation(sampling: Sampling, size: int) -> None:
    """Raise an error if the log-probs of a large vocabulary are needed to know which tokens the sampler kept."""
    if sampling.filters and not sampling.top_k and size > _MOST_LOG_PROBS:
        raise ValueError(
            f"sampling: top_p and min_p without top_k ask vLLM for the log-probs of all {size} tokens of the "
            "vocabulary at each sampled token; set sampling.top_k too, such as 1000"
        )


def _decided_for(cluster: RayConfig, model: ModelConfig) -> dict[str, str | None]:
    """Return the options that only some configs decide."""
    decided = dict[str, str | None]()
    if model.engine_lora is not None:
        decided |= dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"), "model.lora")
    else:
        decided["weight_transfer_config"] = "ray.weight_transfer"
    if cluster.tensor_parallel_size > 1:
        decided["distributed_executor_backend"] = None
    if device_of(model).type == "cpu":
        decided["enable_chunked_prefill"] = None
    return decided


def _known_options() -> set[str]:
    """Return the names of the options of the installed vLLM; an empty set if its source has another form."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return set()
    source = Path(package.origin).parent / "engine" / "arg_utils.py"
    try:
        module = ast.parse(source.read_text())
    except (OSError, SyntaxError):
        return set()
    return {
        line.target.id
        for part in module.body
        if isinstance(part, ast.ClassDef) and part.name == "EngineArgs" and not part.bases
        for line in part.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _check_images(cluster: RayConfig, model: ModelConfig, run: RunNeeds) -> None:
    """Raise an error for images, of rows or episodes, and what no test has with them."""
    kind = AutoConfig.from_pretrained(model.path).model_type
    if not sees(model):
        raise ValueError(f"images: expected a model that sees, got {kind} with vision: {model.vision}")
    if cluster.engine == "vllm" and kind not in SERVED:
        tested = f"expected a type that vLLM is tested with ({', '.join(SERVED)}), got {kind}"
        raise ValueError(f"images: {tested}; use ray.engine: hf, or execution: local")
    if cluster.engine == "vllm" and kind in SERVED[1:] and find_spec("torchvision") is None:
        raise ValueError(f"images: vLLM needs torchvision for {kind}; install it, or use ray.engine: hf")
    check_vision(model, run["algorithm"])
    for name in ("cpu_offload", "tensor_parallel_size", "training_tensor_parallel"):
        if getattr(cluster, name) != RayConfig.model_fields[name].default:
            raise ValueError(f"ray.{name}: not yet with images: leave it out")


def _check_routes(cluster: RayConfig, model: ModelConfig) -> None:
    """Raise an error if experts cannot be recorded: by a model without experts, or by vLLM without a GPU."""
    routed_layers(model.path)
    if cluster.engine == "vllm" and _on_cpus(cluster, model):
        raise ValueError(
            "model.replay_routes: expected engines with a GPU (ray.gpus_per_worker, or pools with gpus), because only "
            "vLLM's model runner V2 records experts, got engines on a CPU; use ray.engine: hf, or set "
            "model.replay_routes: false"
        )


def _on_cpus(cluster: RayConfig, model: ModelConfig) -> bool:
    """Whether the engines that sample are on CPUs, where vLLM takes its model runner V1."""
    return not cluster.all_pools[cluster.roles.rollout].gpus and device_of(model).type == "cpu"
