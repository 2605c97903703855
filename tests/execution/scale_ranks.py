"""What two FSDP2 ranks send, hold and write beside the formulas of ``rlprims.plan.scale``, without Ray.

``python -m torch.distributed.run --standalone --nproc-per-node 2 tests/execution/scale_ranks.py FOLDER``; rank 0 prints
a line of JSON for each measure.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig, RayConfig
from rlprims.execution.hf import Training, with_counts
from rlprims.execution.ray import _fsdp
from rlprims.execution.ray._checkpoint import Saver
from rlprims.execution.ray._training_worker import TrainingWorker
from rlprims.execution.ray._transfer import Gloo, Source
from rlprims.execution.ray._wire import Endpoint, Receiver
from rlprims.plan.scale import (
    checkpoint_bytes,
    copies_sent,
    gathered_bytes,
    reduced_bytes,
    scored_bytes,
    sync_bytes,
)
from rlprims.plan.sizes import Shape, shape_of
from tests import tiny
from tests.scale_measures import Measure, on_disk

GRPO = algorithms.grpo(kl_coef=0.0)
PROMPT, RESPONSE, ROWS = 8, 24, 8
LAYERS = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 512}


class Counted:
    """Bytes that this rank receives, by the two calls of FSDP2."""

    def __init__(self) -> None:
        self.gathered = self.reduced = 0.0
        self.calls = dist.all_gather_single, dist.reduce_scatter_single

    def __enter__(self) -> "Counted":
        share = (dist.get_world_size() - 1) / dist.get_world_size()
        gather, scatter = self.calls

        def gathered(*args: Any, **kwargs: Any) -> Any:
            self.gathered += share * (args[0] if args else kwargs["output"]).nbytes
            return gather(*args, **kwargs)

        def scattered(*args: Any, **kwargs: Any) -> Any:
            self.reduced += share * (args[1] if len(args) > 1 else kwargs["input"]).nbytes
            return scatter(*args, **kwargs)

        dist.all_gather_single, dist.reduce_scatter_single = gathered, scattered
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_gather_single, dist.reduce_scatter_single = self.calls


def batch() -> DataProto:
    """Each of this rank's rows has a prompt of its own, and is a micro-batch where the budget is its length."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    mask = torch.ones(ROWS, RESPONSE, dtype=torch.bool)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.randint(2, 512, (ROWS, PROMPT), generator=generator),
            "responses": torch.randint(2, 512, (ROWS, RESPONSE), generator=generator),
            "attention_mask": torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool),
            "response_mask": mask,
            "group_ids": torch.arange(ROWS) // 4,
            "advantages": torch.randn(ROWS, RESPONSE, generator=generator),
            "old_log_probs": torch.full((ROWS, RESPONSE), -6.2),
        }
    )


def training(path: Path, **cluster: Any) -> Training:
    model = ModelConfig(path=str(path), device="cpu", fused_head=True, max_tokens_per_micro_batch=PROMPT + RESPONSE)
    ranks = _fsdp.ranks(RayConfig(**cluster), dist.get_world_size(), "cpu")
    return Training(model, OptimizerConfig(), algorithm=GRPO, temperature=1.0, updates=9, ranks=ranks)


def update(of: Training) -> None:
    whole, totals = with_counts(batch(), GRPO)
    totals = {name: x._replace(tokens=2 * x.tokens, sequences=2 * x.sequences) for name, x in totals.items()}
    of.update(whole, GRPO, totals)


def between_ranks(path: Path, shape: Shape) -> Iterator[Measure]:
    for settings in ({}, {"activation_checkpointing": True}, {"reduce_gradients": "every_micro_batch"}):
        of = training(path, **settings)
        with Counted() as scored:
            of.log_probs(batch())
        with Counted() as counted:
            update(of)
        where = ", ".join(f"{name}: {value}" for name, value in settings.items())
        times = ROWS if "reduce_gradients" in settings else 1
        if not settings:
            planned = scored_bytes(shape, 2, 4, ROWS)
            what = "(n-1)/n w (N_body k + N_rest)"
            yield Measure("received in scoring, k micro-batches", what, planned, scored.gathered)
        if "reduce_gradients" not in settings:
            planned = gathered_bytes(shape, 2, 4, ROWS)
            yield Measure(
                f"received of weights in an update {where}".strip(),
                "(n-1)/n w k (2 N_body + N_rest)",
                planned,
                counted.gathered,
            )
        if "activation_checkpointing" not in settings:
            planned = reduced_bytes(shape, 2, times)
            what = f"(n-1)/n 4 N{' k' if times > 1 else ''}"
            yield Measure(f"received of gradients {where}".strip(), what, planned, counted.reduced)


def held(path: Path, shape: Shape) -> Iterator[Measure]:
    """Of a rank: its shards, and in an update the whole gradients that wait for the last micro-batch."""
    of, waiting = training(path), []
    reduce_next = of.ranks.reduce_next

    def noted(module: Any, last: bool) -> None:
        waiting.append(sum(x.nbytes for x in whole_gradients(module)))
        reduce_next(module, last)

    of.ranks = of.ranks._replace(reduce_next=noted)
    update(of)
    yield Measure("whole gradients of a rank", "4 N", 4 * shape.parameters, max(waiting))
    state = of.policy
    shards = [local(p) for p in state.module.parameters()]
    shards += [local(x) for each in state.optimizer.state.values() for x in each.values() if x.dim()]
    measured = sum(x.nbytes for x in shards)
    yield Measure("weights and Adam of a rank", "(4 + 8) N / n", 12 * shape.parameters / 2, measured)


def whole_gradients(module: Any) -> Iterator[Tensor]:
    for part in module.modules():
        if isinstance(part, FSDPModule) and (group := part._get_fsdp_state()._fsdp_param_group):
            for parameter in group.fsdp_params:
                kept = parameter.unsharded_accumulated_grad
                if kept is None and hasattr(parameter, "_unsharded_param"):
                    kept = parameter.unsharded_param.grad
                if kept is not None:
                    yield kept


def local(x: Any) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def saved(path: Path, shape: Shape) -> Iterator[Measure]:
    of, where = training(path), path / "saved"
    update(of)
    if dist.get_rank() == 0:
        where.mkdir()
    dist.barrier()
    saver = Saver(timeout=60.0)
    saver.begin({"policy": of.policy}, where)
    saver.result()
    dist.barrier()
    yield Measure(
        "checkpoint of ranks", "(4 + 8) N", checkpoint_bytes(shape, policy_width=0, masters=4), on_disk(where)
    )


def to_engines(path: Path, shape: Shape) -> Iterator[Measure]:
    """Whole weights in bfloat16, to three processes that are no ranks; rank 0 counts what it writes to sockets."""
    of, engines = training(path), 3
    worker: Any = TrainingWorker(dist.get_rank(), 2)
    worker.training, worker.meter = of, Nothing()
    worker.snapshot()
    source = Source(of.policy.module, worker.shards, "bfloat16")
    client: Any = Processes(engines, source.parts)
    before = written()
    Gloo(dist.get_rank(), "127.0.0.1", 60.0).send(source, client)
    sent = written() - before
    received = client.received()
    size = sync_bytes(shape, 2)
    if dist.get_rank() == 0:
        yield Measure("received by each engine in a sync", "w N", size, max(received))
        # Beside them it gives its shards to the other rank.
        yield Measure(
            "sent by rank 0 to three engines",
            "⌈log2(engines + 1)⌉ w N + w N / n",
            size * copies_sent(engines) + size / 2,
            sent,
        )


class Nothing:
    costs: dict[str, Callable[..., float]] = {}  # noqa: RUF012

    def add(self, verb: str, work: Any) -> None: ...


class Processes:
    """Receivers, in the place of engines."""

    failures: dict[int, Exception] = {}  # noqa: RUF012

    def __init__(self, count: int, parts: Any) -> None:
        self.size, self.parts, self.engines = 1 + count, parts, dict(enumerate(range(count)))
        self.spawn, self.processes = multiprocessing.get_context("spawn"), list[Any]()
        self.answers = self.spawn.SimpleQueue()

    def init_weight_transfer_engine(self, info: Any) -> None:
        for rank in range(1, self.size):
            where = Endpoint(**(info | {"rank_offset": rank}))
            self.processes.append(self.spawn.Process(target=receive, args=(where, self.parts, self.answers)))
            self.processes[-1].start()

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...

    def heed(self) -> None: ...

    def received(self) -> list[int]:
        totals = [self.answers.get() for _ in self.processes]
        for process in self.processes:
            process.join()
        return totals


def receive(endpoint: Endpoint, parts: Any, answers: Any) -> None:
    total = 0
    for part in Receiver(endpoint).parts(parts):
        total += next(iter(part.values())).untyped_storage().nbytes()  # one buffer for all tensors of a part
    answers.put(total)


def written() -> int:
    """Bytes that this process has written, to files and sockets."""
    time.sleep(0.05)
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["wchar"])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path = folder / "model"
    if dist.get_rank() == 0:
        tiny.save_model(path, **LAYERS)
    dist.barrier()
    shape = shape_of(ModelConfig(path=str(path)))
    for measured in (between_ranks, held, saved, to_engines):
        for one in measured(path, shape):
            if dist.get_rank() == 0:
                sys.stdout.write(json.dumps(one._asdict()) + "\n")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
