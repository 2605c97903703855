"""The Ray actor of an engine that samples, with a server for its calls."""

import asyncio
import time
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, RayConfig, Sampling, Work
from rlprims.execution._observed import Observed, metered
from rlprims.execution.ray._calls import dispatch
from rlprims.execution.ray._engine import ModelEngine, importing_vllm
from rlprims.execution.ray._head import reports_work
from rlprims.execution.ray._wire import Sums

if TYPE_CHECKING:
    from rlprims.execution.ray._vllm import VllmEngine


class Built(NamedTuple):
    """The properties of an engine that the driver needs."""

    frees_memory: bool
    joins: bool


def _of_engine(verb: str, *, counts: bool = False) -> Any:
    """A method that calls this one of the engine; ``counts``: its work is in the reports."""

    def call(worker: "RolloutWorker", *args: Any) -> Any:
        return getattr(worker.engine, verb)(*args)

    call.__name__ = verb
    return dispatch("first")(metered(call) if counts else call)


class RolloutWorker(Observed):
    """A Ray actor that holds an engine. The engine samples the responses of several calls together.

    One event loop runs all methods. Calls begin and return between steps: if :meth:`ping` does not, the engine hangs.
    """

    engine: "ModelEngine | VllmEngine"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[DataProto]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._admits = asyncio.Event()  # new calls may begin
        self._steady = asyncio.Event()  # the engine may run steps
        self._admits.set()
        self._steady.set()

    @dispatch("first")
    @reports_work()
    def build(self, cluster: RayConfig, model: ModelConfig, tokenizer: Any, context_window: int, backend: str) -> Built:
        """Load the engine. ``backend`` is the backend by which it receives whole weights."""
        torch.set_num_threads(1)
        self._completes_calls = cluster.running_requests == "wait"
        if cluster.engine == "hf":
            self.engine = ModelEngine(model.here(), tokenizer)
        else:
            with importing_vllm():
                from rlprims.execution.ray._vllm import VllmEngine
            self.engine = VllmEngine(model.here(), tokenizer, cluster, context_window=context_window, backend=backend)
        return Built(self.engine.frees_memory, self.engine.joins)

    @dispatch("first")
    @metered
    def load(self, weights: dict[str, Tensor], version: int) -> None:
        self.engine.load(weights.items())
        self.engine.version = version

    open = _of_engine("open")
    abandon_update = _of_engine("abandon_update")
    mismatched_tensors = _of_engine("mismatched_tensors")
    sample_plainly = _of_engine("sample_plainly")
    score = _of_engine("score")
    sleep = _of_engine("sleep", counts=True)
    wake = _of_engine("wake", counts=True)

    @dispatch("first")
    async def start_update(self) -> None:
        """Prepare for new weights: no step runs until they are there, and with ``wait`` the begun calls end before."""
        self._admits.clear()
        if self._completes_calls and self._serving is not None:
            await asyncio.wait([self._serving])
        self._steady.clear()
        self.engine.start_update()

    @dispatch("first")
    @metered
    def receive(self, info: dict[str, Any]) -> None:
        """Receive new weights, or a part of them. In reports ``update`` is the work of a rank."""
        try:
            self.engine.update(info)
        except BaseException:
            self.engine.abandon_update()
            raise

    @dispatch("first")
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

    @dispatch("first")
    async def generate(
        self, prompts: DataProto, sampling: Sampling, seed: int, prompt_width: int | None, versions: bool
    ) -> DataProto:
        """Sample a response to each prompt, with the oldest version of its tokens; ``versions``: and with all."""
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

    @dispatch("first")
    def abandon(self) -> None:
        """Abort all calls. Their callers no longer wait for answers."""
        for number, answer in self._answers.items():
            self.engine.abandon(number)
            answer.set_exception(RuntimeError("the call was abandoned"))
        self._answers.clear()

    @dispatch("first")
    def ping(self) -> None:
        """Return at once. The answer shows that the engine does not hang."""
