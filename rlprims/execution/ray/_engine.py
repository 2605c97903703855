"""The engine of transformers, which shows what a rollout worker needs of an engine."""

import gc
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, Sampling
from rlprims.execution.hf import Generation
from rlprims.execution.hf._adapters import adapt, parameters, trained
from rlprims.execution.hf._models import load_causal_lm
from rlprims.execution.ray._wire import Endpoint, Receiver, Sums, checksums, differences


class ModelEngine:
    """Samples with the model's forward pass, as the local execution does, with the methods of ``VllmEngine``."""

    joins = False
    """Whether new requests join the batch of the running ones, and running requests continue after new weights."""

    def __init__(self, model: ModelConfig, tokenizer: Any) -> None:
        self.module = adapt(load_causal_lm(model.path, model), model.engine_lora)
        self.device = next(self.module.parameters()).device
        rows = model.max_rows_per_generation
        self._generation = Generation(self.module, tokenizer, max_rows=rows, routes=model.replay_routes, model=model)
        self._calls: dict[int, Callable[[], DataProto]] = {}
        self.version = 0

    def begin(self, call: int, prompts: DataProto, sampling: Sampling, *, seed: int, prompt_width: int | None) -> None:
        """Begin to sample responses to the prompts of a call. ``call`` is the number of the call."""
        self._calls[call] = partial(self._generation.generate, prompts, sampling, seed=seed, prompt_width=prompt_width)

    def step(self) -> dict[int, DataProto]:
        """Sample the next tokens, here of one call completely; returns the complete calls, by their numbers."""
        call = next(iter(self._calls))
        rows = self._calls.pop(call)()
        rows["versions"] = torch.full(rows["responses"].shape, self.version)
        return {call: rows}

    def abandon(self, call: int) -> None:
        """Abort the requests of a call; :meth:`step` will not return it."""
        self._calls.pop(call, None)

    @property
    def frees_memory(self) -> bool:
        """Whether :meth:`sleep` releases memory."""
        return self.device.type != "cpu"

    def sleep(self, level: int) -> None:
        """Move the weights to the CPU. Level 2 does the same as level 1: there is no other copy of the weights."""
        self.module.to("cpu")
        if self.frees_memory:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self.module.to(self.device)

    def sample_plainly(self, batch: DataProto, sampling: Sampling | None) -> bool:
        """Sample responses of the batch's lengths with the engine's own ``generate``; False if there is none."""
        return False

    @torch.no_grad()
    def score(self, tokens: list[int]) -> list[float]:
        """Return the log-prob of each token except the first, at temperature 1."""
        ids = torch.tensor([tokens], device=self.device)
        log_probs = torch.log_softmax(self.module(ids).logits[0].float(), -1)
        scores: list[float] = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return scores

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the tensors of an adapter."""
        _copy(weights, trained(self.module))

    def open(self, info: dict[str, Any]) -> None:
        """Connect to the sender of whole weights. A transfer then calls the next three; no step runs meanwhile."""
        self._wire = Receiver(Endpoint(**info))

    def start_update(self) -> None:
        self._received = Sums()

    @torch.no_grad()
    def update(self, info: dict[str, Any]) -> None:
        def received() -> Iterator[tuple[str, Tensor]]:
            for part in self._wire.parts(info["parts"]):
                self._received |= checksums(part)
                yield from part.items()

        _copy(received(), parameters(self.module))

    def finish_update(self, version: int) -> Sums:
        """Use the new weights; returns the checksums of the received tensors."""
        self.version = version
        return self._received

    def abandon_update(self) -> None:
        """Discard an incomplete update and close the connection, so that another update can begin."""
        self.__dict__.pop("_wire", None)

    def mismatched_tensors(self, sent: Sums) -> list[str]:
        """Return the names of the engine's tensors whose checksums differ from those of the sent tensors."""
        return differences(sent, [checksums(parameters(self.module))], {})


def _copy(weights: Iterable[tuple[str, Tensor]], missing: dict[str, nn.Parameter]) -> None:
    for name, tensor in weights:
        missing.pop(name).copy_(tensor)
    if missing:
        raise ValueError(f"no weights came for {sorted(missing)[:3]}")


_REMOVE = 'exec 3<&0; (trap "" HUP INT TERM; read end <&3; rm -rf "$0") >/dev/null 2>&1 &'
"""Remove a folder when the input ends. The process that waits is no child, because Ray kills those."""


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Without garbage collection, a quarter of the time; and with temporary files that go when this process is gone."""
    tempfile.tempdir = tempfile.mkdtemp(prefix="rlprims-engine-")
    reading, _ = os.pipe()
    subprocess.run(["/bin/sh", "-c", _REMOVE, tempfile.tempdir], stdin=reading, start_new_session=True, check=True)
    os.close(reading)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
