"""See :class:`RolloutWorker`."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, RayConfig, Sampling
from rlprims.execution.hf import Generation
from rlprims.execution.hf._models import load_causal_lm
from rlprims.execution.ray._worker_group import first

Arrays = Mapping[str, tuple[str, np.ndarray]]
"""Weights by name, each with the name of its dtype."""


class Engine(Protocol):
    """What samples in a worker's process."""

    def generate(self, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> DataProto: ...

    def score(self, tokens: list[int]) -> list[float]: ...

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None: ...


class ModelEngine:
    """The model's own forward, as the local execution samples."""

    def __init__(self, model: ModelConfig, tokenizer: Any) -> None:
        self.module = load_causal_lm(model.path, model)
        self._generation = Generation(self.module, tokenizer, max_rows=model.max_rows_per_generation)
        self.generate = self._generation.generate

    @torch.no_grad()
    def score(self, tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens], device=next(self.module.parameters()).device)
        log_probs = torch.log_softmax(self.module(ids).logits[0].float(), -1)
        scores: list[float] = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return scores

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        parameters = dict(self.module.named_parameters())
        for name, tensor in weights:
            parameters.pop(name).copy_(tensor)
        if parameters:
            raise ValueError(f"no weights came for {sorted(parameters)[:3]}")


class RolloutWorker:
    """An engine in a process, and the version of its weights."""

    def __init__(self, rank: int, size: int) -> None:
        self.version = -1

    @first
    def build(self, cluster: RayConfig, model: ModelConfig, tokenizer: Any, context_window: int) -> None:
        torch.set_num_threads(1)
        self.engine: Engine
        if cluster.engine == "hf":
            self.engine = ModelEngine(model, tokenizer)
        else:
            from rlprims.execution.ray._vllm import VllmEngine

            self.engine = VllmEngine(
                model, tokenizer, context_window=context_window, kv_cache_bytes=cluster.kv_cache_bytes
            )

    @first
    def load(self, weights: Arrays, version: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # arrays of the object store cannot be written to, and are not
            self.engine.load((name, _as_tensor(dtype, array)) for name, (dtype, array) in weights.items())
        self.version = version

    @first
    def score(self, tokens: list[int]) -> list[float]:
        """The log-prob of each token but the first."""
        return self.engine.score(tokens)

    @first
    def generate(self, prompts: DataProto, sampling: Sampling, seed: int, prompt_width: int) -> DataProto:
        """Responses, each with the version of the weights that made it."""
        rows = self.engine.generate(prompts, sampling, seed=seed, prompt_width=prompt_width)
        rows["weights_version"] = torch.full((len(rows),), self.version, dtype=torch.int64)
        return rows


def _as_tensor(dtype: str, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).view(getattr(torch, dtype))
