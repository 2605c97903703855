"""Options of vLLM: a wrong name is told before anything starts."""

from dataclasses import fields
from typing import Any

import pytest

from rlprims import algorithms
from rlprims.execution import ModelConfig, RayConfig

pytestmark = pytest.mark.ray
MODEL = ModelConfig(path="none", device="cpu")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpu_memory_utilisation": 0.5}, "vLLM has no such option; use gpu_memory_utilization"),
        ({"seed": 3}, "use the run's seed"),
        ({"max_num_seqs": 8}, "use model.max_rows_per_generation"),
        ({"enable_chunked_prefill": True}, "this library needs its own value"),
        ({"data_parallel_size": 2}, "one copy of the model; use ray.rollout_workers"),
        ({"data_parallel_backend": "ray"}, "use ray.rollout_workers"),
        ({"pipeline_parallel_size": 2}, "ray.tensor_parallel_size alone; use this, and ray.rollout_workers"),
    ],
)
def test_a_refused_option_says_what_to_use(options: dict[str, Any], told: str) -> None:
    from rlprims.execution.ray._checks import check_engine_options

    with pytest.raises(ValueError, match=f"^ray.engine_options: {next(iter(options))}: .*{told}"):
        check_engine_options(RayConfig(engine_options=options), MODEL)


def test_options_that_nothing_decides_are_taken() -> None:
    from rlprims.execution.ray._checks import check_engine_options

    options = {"gpu_memory_utilization": 0.8, "max_num_batched_tokens": 512, "distributed_executor_backend": "mp"}
    check_engine_options(RayConfig(engine_options=options), MODEL)
    with pytest.raises(ValueError, match="distributed_executor_backend"):
        check_engine_options(RayConfig(engine_options=options, tensor_parallel_size=2), MODEL)


def test_names_are_those_of_the_installed_vllm() -> None:
    vllm = pytest.importorskip("vllm")
    from rlprims.execution.ray._checks import _known_options

    assert _known_options() == {field.name for field in fields(vllm.EngineArgs)}


def test_a_wrong_name_starts_no_cluster() -> None:
    import ray

    from rlprims.execution import OptimizerConfig
    from rlprims.execution.ray import RayExecution

    started = ray.is_initialized()
    with pytest.raises(ValueError, match=r"ray\.engine_options: sead"):
        RayExecution(
            RayConfig(engine_options={"sead": 1}),
            MODEL,
            OptimizerConfig(),
            algorithm=algorithms.grpo(),
            tokenizer=None,
            temperature=1.0,
            updates=1,
        )
    assert ray.is_initialized() == started
