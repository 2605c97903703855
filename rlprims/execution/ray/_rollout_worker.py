"""The Ray actor that samples: a server around an engine, in a process of its own."""

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlprims._imports import uncollected
from rlprims.data_proto import DataProto
from rlprims.execution._config import ModelConfig, RayConfig, Sampling
from rlprims.execution._meter import Work, metered
from rlprims.execution._profile import Observed
from rlprims.execution.hf import Generation
from rlprims.execution.hf._adapters import adapt, parameters, trained
from rlprims.execution.hf._models import load_causal_lm
from rlprims.execution.ray._wire import Endpoint, Receiver, Sums, checksums, differences
from rlprims.execution.ray._worker_group import first

Arrays = Mapping[str, tuple[str, np.ndarray]]
"""Weights by name, each with the name of its dtype."""


class Engine(Protocol):
    """The protocol of a sampler in a worker's process."""

    joins: bool
    """Whether requests that begin later are sampled together with those that run, and go on under new weights."""
    version: int
    """Of its weights."""

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> None:
        """Begin the responses of a call, which is known by its number."""
        ...

    def step(self) -> dict[int, DataProto]:
        """Sample a part of what was begun; the calls whose responses are all complete, by their numbers.

        ``versions`` (B, T): of the weights that drew each token.
        """
        ...

    def abandon(self, call: int) -> None:
        """End the requests of a call; it will not be complete."""
        ...

    def sample_plainly(self, batch: DataProto) -> bool:
        """Sample responses of the batch's lengths with nothing of ours around the engine; False if it has no other
        way than :meth:`step`."""
        ...

    def score(self, tokens: list[int]) -> list[float]: ...

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """An adapter's tensors."""
        ...

    def receive(self, endpoint: Endpoint, version: int) -> Sums:
        """The whole model's tensors, from the wire; their checksums as they came."""
        ...

    def unlike(self, sent: Sums) -> list[str]:
        """Names of its tensors that differ from those that were sent."""
        ...

    @property
    def frees_memory(self) -> bool:
        """Whether sleep releases memory."""
        ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...


class ModelEngine:
    """The model's own forward, as the local execution samples: one call in each step, from its prompts to its ends."""

    joins = False

    def __init__(self, model: ModelConfig, tokenizer: Any) -> None:
        self.module = adapt(load_causal_lm(model.path, model), model.engine_lora)
        self.device = next(self.module.parameters()).device
        self._generation = Generation(self.module, tokenizer, max_rows=model.max_rows_per_generation)
        self._calls: dict[int, Callable[[], DataProto]] = {}
        self.version = 0

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int) -> None:
        self._calls[call] = partial(self._generation.generate, prompts, sampling, seed=seed, prompt_width=prompt_width)

    def step(self) -> dict[int, DataProto]:
        call = next(iter(self._calls))
        rows = self._calls.pop(call)()
        rows["versions"] = torch.full(rows["responses"].shape, self.version)
        return {call: rows}

    def abandon(self, call: int) -> None:
        self._calls.pop(call, None)

    @property
    def frees_memory(self) -> bool:
        return self.device.type != "cpu"

    def sleep(self, level: int) -> None:
        """Level 2 keeps the weights like level 1, because there is no other copy of them."""
        self.module.to("cpu")
        if self.frees_memory:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.module.to(self.device)

    def sample_plainly(self, batch: DataProto) -> bool:
        return False

    @torch.no_grad()
    def score(self, tokens: list[int]) -> list[float]:
        ids = torch.tensor([tokens], device=next(self.module.parameters()).device)
        log_probs = torch.log_softmax(self.module(ids).logits[0].float(), -1)
        scores: list[float] = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return scores

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        missing = trained(self.module)
        for name, tensor in weights:
            missing.pop(name).copy_(tensor)
        if missing:
            raise ValueError(f"no weights came for {sorted(missing)[:3]}")

    @torch.no_grad()
    def receive(self, endpoint: Endpoint, version: int) -> Sums:
        missing, received = parameters(self.module), Sums()
        for part in Receiver(endpoint):
            received |= checksums(part)
            for name, tensor in part.items():
                missing.pop(name).copy_(tensor)
        if missing:
            raise ValueError(f"no weights came for {sorted(missing)[:3]}")
        self.version = version
        return received

    def unlike(self, sent: Sums) -> list[str]:
        return differences(sent, [checksums(parameters(self.module))], {})


class Built(NamedTuple):
    """What a driver asks an engine."""

    frees_memory: bool
    joins: bool


class RolloutWorker(Observed):
    """A server: an engine in a process, and the calls that it samples together.

    All methods run in the thread of one event loop. Between two steps of the engine, new calls begin and others are
    answered; so a caller that gets no answer to :meth:`ping` knows that the engine hangs.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[DataProto]] = {}
        self._serving: asyncio.Task[None] | None = None

    @first
    def build(self, cluster: RayConfig, model: ModelConfig, tokenizer: Any, context_window: int) -> Built:
        """Load the engine."""
        torch.set_num_threads(1)
        self.engine: Engine
        if cluster.engine == "hf":
            gc.freeze()  # what was imported stays, and no collection needs to walk through it
            self.engine = ModelEngine(model, tokenizer)
        else:
            with uncollected():
                from rlprims.execution.ray._vllm import VllmEngine

                gc.freeze()
            self.engine = VllmEngine(model, tokenizer, cluster, context_window=context_window)
        return Built(self.engine.frees_memory, self.engine.joins)

    @first
    @metered
    def load(self, weights: Arrays, version: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # arrays of the object store cannot be written to, and are not
            self.engine.load((name, _as_tensor(dtype, array)) for name, (dtype, array) in weights.items())
        self.engine.version = version

    @first
    @metered
    def receive(self, endpoint: Endpoint, version: int) -> Sums:
        """New weights, from the wire; their checksums as they came."""
        return self.engine.receive(endpoint, version)

    @first
    def unlike(self, sent: Sums) -> list[str]:
        """Names of the engine's tensors that differ from those that were sent."""
        return self.engine.unlike(sent)

    @first
    @metered
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    @first
    @metered
    def wake(self) -> None:
        self.engine.wake()

    @first
    def sample_plainly(self, batch: DataProto) -> bool:
        """Sample as many tokens for each prompt as the batch has, for a comparison of seconds."""
        return self.engine.sample_plainly(batch)

    @first
    def score(self, tokens: list[int]) -> list[float]:
        """The log-prob of each token but the first."""
        return self.engine.score(tokens)

    @first
    async def generate(
        self, prompts: DataProto, sampling: Sampling, seed: int, prompt_width: int, versions: bool
    ) -> DataProto:
        """Responses when all of them are complete, each with the oldest version of the weights that sampled it, and
        with ``versions`` that of each token."""
        number = next(self._numbers)
        self.engine.begin(number, prompts, sampling, seed=seed, prompt_width=prompt_width)
        self._answers[number] = asyncio.get_running_loop().create_future()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        rows = await self._answers[number]
        of_tokens, mask = rows["versions"], rows["response_mask"]
        newest = torch.full((len(rows), 1), self.engine.version)  # where there is no token
        rows["weights_version"] = torch.cat([of_tokens.where(mask, self.engine.version), newest], 1).amin(1)
        if not versions:
            del rows.batch["versions"]
        return rows

    async def _serve(self) -> None:
        """Steps of the engine, until no call waits for an answer."""
        await asyncio.sleep(0.002 if self.engine.joins else 0)  # the calls of a batch arrive one after another
        while self._answers:
            await asyncio.sleep(0)  # calls that have arrived begin
            begun = time.perf_counter()
            try:
                with torch.profiler.record_function("RolloutWorker.generate"):
                    complete = self.engine.step()
            except Exception as error:
                for answer in self._answers.values():
                    answer.set_exception(error)
                self._answers.clear()
                return
            tokens = 0
            for number, rows in complete.items():
                tokens += int(rows["response_mask"].sum())
                self._answers.pop(number).set_result(rows)
            self.meter.add("generate", Work(time.perf_counter() - begun, tokens))

    @first
    def abandon(self) -> None:
        """End all calls: nobody waits for their answers."""
        for number, answer in self._answers.items():
            self.engine.abandon(number)
            answer.set_exception(RuntimeError("the call was abandoned"))
        self._answers.clear()

    @first
    def ping(self) -> None:
        """An answer says that the engine does not hang."""


def _as_tensor(dtype: str, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).view(getattr(torch, dtype))
