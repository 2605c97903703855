"""What the contract's tests build and ask. Another implementation is one more line in ``BACKENDS``."""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, Models, OptimizerConfig, RayConfig, Sampling
from rlprims.execution.hf import export_model, models_in_shards
from tests import tiny

QUESTIONS = ("1+2=", "12+34=", "abc def 99?", "7", "a+b=?", "<answer>5</answer>", "0-0=", "90 + 1 = 91?")
WIDTH = 16
LIMIT = 24
SAMPLING = Sampling(max_new_tokens=LIMIT)
# A large eps: where a gradient is all rounding, Adam's first step would otherwise be its sign.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3)


def local(
    path: Path,
    algorithm: Algorithm,
    *,
    temperature: float = 1.0,
    updates: int = 10,
    optimizer: OptimizerConfig = OPTIMIZER,
    critic_optimizer: OptimizerConfig | None = None,
    critic_freeze: tuple[str, ...] = (),
    **model: Any,
) -> Models:
    from rlprims.execution.local import LocalExecution

    return LocalExecution(
        ModelConfig(path=str(path), device="cpu", **model),
        optimizer,
        algorithm=algorithm,
        tokenizer=tiny.tokenizer(),
        temperature=temperature,
        updates=updates,
        critic_optimizer=critic_optimizer,
        critic_freeze=critic_freeze,
    )


def cluster(
    path: Path,
    algorithm: Algorithm,
    *,
    training_workers: int = 1,
    rollout_workers: int = 1,
    engine: Literal["vllm", "hf"] = "hf",
    temperature: float = 1.0,
    updates: int = 10,
    optimizer: OptimizerConfig = OPTIMIZER,
    critic_optimizer: OptimizerConfig | None = None,
    critic_freeze: tuple[str, ...] = (),
    cluster: dict[str, Any] | None = None,
    **model: Any,
) -> Models:
    from rlprims.execution.ray import RayExecution
    from rlprims.execution.ray._cluster import connect

    connect(None, cpus=64)  # logical ones: several executions live at once
    return RayExecution(
        RayConfig(
            training_workers=training_workers,
            rollout_workers=rollout_workers,
            engine=engine,
            **{
                "kv_cache_bytes": 64 << 20,
                "call_timeout": 120.0,
                "training_timeout": 120.0,
                "start_timeout": 480.0,
                **(cluster or {}),
            },
        ),
        ModelConfig(**{"path": str(path), "device": "cpu", **model}),
        optimizer,
        algorithm=algorithm,
        tokenizer=tiny.tokenizer(),
        temperature=temperature,
        updates=updates,
        critic_optimizer=critic_optimizer,
        critic_freeze=critic_freeze,
    )


def v2_environment() -> dict[str, str]:
    """The environment of an engine with the model runner that vLLM takes on a GPU (V2).

    Its kernels are in Triton's interpreter. A step takes fifty milliseconds and more.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    root = Path(__file__).parents[2]
    found = sorted((root / ".venv-triton").glob("lib/python3*/site-packages/triton"))
    if not found:
        pytest.skip("needs Triton for its interpreter: make .venv-triton/.ready")
    paths = (Path(__file__).with_name("interpreted_triton"), root)
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "INTERPRETED_TRITON": str(found[0]),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def on_v2(path: Path, algorithm: Algorithm, **options: Any) -> Models:
    """A cluster whose engines have the model runner that vLLM takes on a GPU (V2)."""
    environment = v2_environment()
    from rlprims.execution.ray._cluster import CPU_ENVIRONMENT

    with patch.dict(CPU_ENVIRONMENT, environment):
        execution = cluster(path, algorithm, **{"engine": "vllm", **options})
    return execution


def fixed(make: Callable[..., Models], **settings: Any) -> Callable[..., Models]:
    """No partial: a partial of one forgets which it was."""

    def build(*args: Any, **options: Any) -> Models:
        return make(*args, **{**settings, **options})

    return build


BACKENDS: dict[str, Callable[..., Models]] = {"local": local}
ADAPTED: dict[str, Callable[..., Models]] = {"local-lora": fixed(local, lora={})}
"""Run by the marker ``slow``."""
CLUSTERS: dict[str, Callable[..., Models]] = {
    "ray": fixed(cluster, training_workers=2),
    "ray-vllm": fixed(cluster, rollout_workers=2, engine="vllm"),
    "ray-vllm-v2": fixed(on_v2),
}
"""Run by the marker ``ray``, where Ray and vLLM are installed."""


class Restarted:
    """Builds an execution of each kind once; who asks again gets the same one back at its start.

    By a load, of which test_execution_checkpoint says that nothing is left of what came before: 0.2 s on Ray, where a
    start takes half a minute.
    """

    LIMIT = 8
    """Kinds that are kept; each is three processes and more."""

    def __init__(self, build: Callable[..., Models], directories: pytest.TempPathFactory) -> None:
        self.build, self.directories = build, directories
        self.kept: dict[str, tuple[Models, Path]] = {}

    def __call__(self, algorithm: Algorithm, **options: Any) -> Models:
        models = sorted(algorithm.needs & {"ref_log_probs", "values"})  # all that is read of it before an update
        kind = repr((models, sorted(options.items())))
        if kind in self.kept:
            execution, start = self.kept.pop(kind)
            execution.load(start)
        else:
            execution, start = self.build(algorithm, **options), self.directories.mktemp("start")
            execution.save(start)()
        self.kept[kind] = execution, start
        if len(self.kept) > self.LIMIT:
            self.kept.pop(next(iter(self.kept)))[0].close()
        return execution

    def given_away(self, algorithm: Algorithm, **options: Any) -> Models:
        """For who ends it: it is not given to anybody else."""
        execution = self(algorithm, **options)
        self.kept.popitem()
        return execution

    def close(self) -> None:
        for execution, _ in self.kept.values():
            execution.close()
        self.kept.clear()


def prompts(texts: Sequence[str] = QUESTIONS, sample_ids: Sequence[int] | None = None) -> DataProto:
    """What a trainer asks ``generate`` with; ids are the row numbers if none are given."""
    column = np.empty(len(texts), dtype=object)
    column[:] = [tiny.tokenizer().encode(text) for text in texts]
    ids = torch.tensor(range(len(texts)) if sample_ids is None else sample_ids, dtype=torch.int64)
    return DataProto.from_dict(tensors={"sample_id": ids}, non_tensors={"prompt_ids": column})


def responses(batch: DataProto) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(batch["responses"], batch["response_mask"], strict=True)]


def plain_logits(model: nn.Module, batch: DataProto, row: int) -> Tensor:
    """(length, V): what the model says of one response, computed alone, without padding, cache or library."""
    prompt, response = batch["prompt_ids"][row], responses(batch)[row]
    logits: Tensor = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def widened(batch: DataProto, left: int, right: int, token: int) -> DataProto:
    """The batch with more padding on both sides, of any token."""
    pads = {"prompts": (left, 0), "attention_mask": (left, right)}
    tensors = {}
    for name, tensor in batch.batch.items():
        width = pads.get(name, (0, right))
        value = token if name in ("prompts", "responses") else 0
        tensors[name] = nn.functional.pad(tensor, width, value=value) if tensor.dim() == 2 else tensor
    outside = ~tensors["attention_mask"].bool()
    tensors["prompts"] = tensors["prompts"].masked_fill(outside[:, : -LIMIT - right], token)
    tensors["responses"] = tensors["responses"].masked_fill(outside[:, -LIMIT - right :], token)
    return DataProto.from_dict(tensors=tensors, non_tensors=batch.non_tensor_batch)


def training_batch(execution: Models, *, seed: int = 0) -> DataProto:
    """Sampled responses in four groups of two, with made-up advantages and policies some way off."""
    batch = execution.generate(prompts(), SAMPLING, seed=seed, prompt_width=WIDTH)
    mask, random = batch["response_mask"], torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return torch.where(mask, torch.randn(mask.shape, generator=random) * scale, 0.0)

    columns = {
        "group_ids": torch.arange(len(batch)) // 2,
        "advantages": noise(1.0),
        "old_log_probs": batch["rollout_log_probs"] + noise(0.2),
        "ref_log_probs": batch["rollout_log_probs"] + noise(0.3),
        "values": noise(0.5),
        "returns": noise(1.0),
    }
    return batch.union(DataProto.from_dict(tensors=columns))


def with_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    tensors = {**dict(batch.batch.items()), **columns}
    return DataProto.from_dict(tensors=tensors, non_tensors=batch.non_tensor_batch)


def weights(execution: Models, directory: Path, model: str = "policy") -> dict[str, Tensor]:
    """What a save would keep of a model."""
    directory.mkdir(parents=True)
    save(execution, directory)
    return saved(directory, model)


def save(execution: Models, directory: Path) -> None:
    """All of it, and Hugging Face models of what is in shards."""
    execution.save(directory)()
    for name in models_in_shards(directory):
        export_model(directory / name, directory / name)


def saved(directory: Path, model: str = "policy") -> dict[str, Tensor]:
    return load_file(directory / model / "model.safetensors")


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
