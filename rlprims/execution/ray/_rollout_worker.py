"""The Ray actor that samples: an engine in a process of its own, and its server."""

import asyncio
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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
    """The interface of an engine: it samples in the process of a rollout worker."""

    joins: bool
    """Whether new requests join the batch of the running ones, and running requests continue after new weights."""
    version: int
    """The version of its weights."""

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> None:
        """Begin to sample responses to the prompts of a call. ``call`` is the number of the call."""
        ...

    def step(self) -> dict[int, DataProto]:
        """Sample the next tokens; returns the calls whose responses are all complete, by their numbers.

        The column ``versions`` (B, T) has the version of the weights that sampled each token.
        """
        ...

    def abandon(self, call: int) -> None:
        """Abort the requests of a call; :meth:`step` will not return it."""
        ...

    def sample_plainly(self, batch: DataProto, sampling: Sampling | None) -> bool:
        """Sample responses of the batch's lengths with the engine's own ``generate``, so that its time can be compared.

        With ``sampling`` the requests have seeds and ask for log-probs, as those of :meth:`begin` do. Returns False if
        the engine has no such function.
        """
        ...

    def score(self, tokens: list[int]) -> list[float]: ...

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the tensors of an adapter."""
        ...

    def open(self, info: dict[str, Any]) -> None:
        """Connect to the sender of whole weights.

        A transfer calls ``start_update``, ``update`` and ``finish_update``, in this order. It calls ``open`` first if
        there is no connection.
        """
        ...

    def start_update(self) -> None:
        """Prepare for new weights. The worker runs no step until the update is complete."""
        ...

    def update(self, info: dict[str, Any]) -> None:
        """Receive the tensors of the model."""
        ...

    def finish_update(self, version: int) -> Sums:
        """Use the new weights; returns the checksums of the received tensors."""
        ...

    def abandon_update(self) -> None:
        """Discard an incomplete update and close the connection, so that another update can begin."""
        ...

    def unlike(self, sent: Sums) -> list[str]:
        """Return the names of the engine's tensors whose checksums differ from those of the sent tensors."""
        ...

    @property
    def frees_memory(self) -> bool:
        """Whether :meth:`sleep` releases memory."""
        ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...


class ModelEngine:
    """Samples with the model's forward pass, as the local execution does. A step samples one call completely."""

    joins = False

    def __init__(self, model: ModelConfig, tokenizer: Any) -> None:
        self.module = adapt(load_causal_lm(model.path, model), model.engine_lora)
        self.device = next(self.module.parameters()).device
        self._generation = Generation(
            self.module, tokenizer, max_rows=model.max_rows_per_generation, routes=model.replay_routes
        )
        self._calls: dict[int, Callable[[], DataProto]] = {}
        self.version = 0

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> None:
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
        """Move the weights to the CPU. Level 2 does the same as level 1: there is no other copy of the weights."""
        self.module.to("cpu")
        if self.frees_memory:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.module.to(self.device)

    def sample_plainly(self, batch: DataProto, sampling: Sampling | None) -> bool:
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

    def open(self, info: dict[str, Any]) -> None:
        self._wire = Receiver(Endpoint(**info))

    def start_update(self) -> None:
        self._received = Sums()

    @torch.no_grad()
    def update(self, info: dict[str, Any]) -> None:
        missing = parameters(self.module)
        for part in self._wire.parts(info["parts"]):
            self._received |= checksums(part)
            for name, tensor in part.items():
                missing.pop(name).copy_(tensor)
        if missing:
            raise ValueError(f"no weights came for {sorted(missing)[:3]}")

    def finish_update(self, version: int) -> Sums:
        self.version = version
        return self._received

    def abandon_update(self) -> None:
        self.__dict__.pop("_wire", None)

    def unlike(self, sent: Sums) -> list[str]:
        return differences(sent, [checksums(parameters(self.module))], {})


@contextmanager
def without_collection() -> Iterator[None]:
    """During the import of vLLM, garbage collection would take a quarter of the start time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Built(NamedTuple):
    """The properties of an engine that the driver needs."""

    frees_memory: bool
    joins: bool


class RolloutWorker(Observed):
    """A Ray actor that holds an engine. The engine samples the responses of several calls together.

    All methods run in the thread of one event loop. Between two steps of the engine, new calls begin and finished calls
    return. So if :meth:`ping` does not return, the engine hangs.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[DataProto]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._admits = asyncio.Event()  # new calls may begin
        self._steady = asyncio.Event()  # the engine may run steps
        self._admits.set()
        self._steady.set()

    @first
    def build(self, cluster: RayConfig, model: ModelConfig, tokenizer: Any, context_window: int, backend: str) -> Built:
        """Load the engine. ``backend`` is the backend by which it receives whole weights."""
        torch.set_num_threads(1)
        self._completes_calls = cluster.running_requests == "wait"
        self.engine: Engine
        if cluster.engine == "hf":
            self.engine = ModelEngine(model, tokenizer)
        else:
            with without_collection():
                from rlprims.execution.ray._vllm import VllmEngine
            self.engine = VllmEngine(model, tokenizer, cluster, context_window=context_window, backend=backend)
        return Built(self.engine.frees_memory, self.engine.joins)

    @first
    @metered
    def load(self, weights: Arrays, version: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only arrays; they are only read
            self.engine.load((name, _as_tensor(dtype, array)) for name, (dtype, array) in weights.items())
        self.engine.version = version

    @first
    def open(self, info: dict[str, Any]) -> None:
        """Connect to the rank that sends whole weights."""
        self.engine.open(info)

    @first
    async def start_update(self) -> None:
        """Prepare for new weights. The engine runs no step until the update is complete.

        With ``running_requests: wait`` the calls that have begun are completed first.
        """
        self._admits.clear()
        if self._completes_calls and self._serving is not None:
            await asyncio.wait([self._serving])
        self._steady.clear()
        self.engine.start_update()

    @first
    @metered
    def receive(self, info: dict[str, Any]) -> None:
        """Receive new weights, or a part of them. In reports ``update`` is the work of a rank."""
        try:
            self.engine.update(info)
        except BaseException:
            self.engine.abandon_update()
            raise

    @first
    @metered
    def finish_update(self, version: int) -> Sums:
        """Use the new weights and continue sampling; returns the checksums of the received tensors."""
        try:
            received = self.engine.finish_update(version)
        except BaseException:
            self.engine.abandon_update()
            raise
        self._steady.set()
        self._admits.set()
        return received

    @first
    def abandon_update(self) -> None:
        """Discard an incomplete update. The engine runs no step until another update is complete."""
        self.engine.abandon_update()

    @first
    def unlike(self, sent: Sums) -> list[str]:
        """Return the names of the engine's tensors whose checksums differ from those of the sent tensors."""
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
    def sample_plainly(self, batch: DataProto, sampling: Sampling | None) -> bool:
        """See :meth:`Engine.sample_plainly`."""
        return self.engine.sample_plainly(batch, sampling)

    @first
    def score(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token except the first."""
        return self.engine.score(tokens)

    @first
    async def generate(
        self, prompts: DataProto, sampling: Sampling, seed: int, prompt_width: int | None, versions: bool
    ) -> DataProto:
        """Sample a response to each prompt; returns when all responses are complete.

        The column ``weights_version`` has the oldest version of the weights that sampled a response. With ``versions``
        the column ``versions`` has the version of each token.
        """
        await self._admits.wait()
        number = next(self._numbers)
        self.engine.begin(number, prompts, sampling, seed=seed, prompt_width=prompt_width)
        self._answers[number] = asyncio.get_running_loop().create_future()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        rows = await self._answers[number]
        of_tokens, mask = rows["versions"], rows["response_mask"]
        newest = torch.full((len(rows), 1), self.engine.version)  # the version of a response without tokens
        rows["weights_version"] = torch.cat([of_tokens.where(mask, self.engine.version), newest], 1).amin(1)
        if not versions:
            del rows.batch["versions"]
        return rows

    async def _serve(self) -> None:
        """Run steps of the engine until all calls are complete."""
        while self._answers:
            await asyncio.sleep(0)  # let the calls that have arrived begin
            await self._steady.wait()
            if not self._answers:
                return
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
        """Abort all calls. Their callers no longer wait for answers."""
        for number, answer in self._answers.items():
            self.engine.abandon(number)
            answer.set_exception(RuntimeError("the call was abandoned"))
        self._answers.clear()

    @first
    def ping(self) -> None:
        """Return at once. The answer shows that the engine does not hang."""


def _as_tensor(dtype: str, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).view(getattr(torch, dtype))
