"""The batch: two int64 and one float32 column of tokens, four object columns; what a step does to it, beside verl.

View operations are also timed on a bare TensorDict, which is what both containers stand on. Each function makes its
batch anew over the same tensors wherever verl's method would change it.
"""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks._harness import Case, Function
from benchmarks._peers import peer
from rlprims.interop import verl as verl_like

SIZE, QUICK_SIZE = (4096, 4096), (512, 1024)
PARTS = 8
Batch = Any
Build = Callable[[Callable[[], Batch]], Function]  # makes what is timed from what makes a batch


class Sample:
    """The columns, and the three containers over them."""

    def __init__(self, rows: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = rows
        self.tensors = {
            "input_ids": torch.randint(0, 150_000, (rows, width), generator=generator),
            "response_mask": torch.randint(0, 2, (rows, width), generator=generator),
            "log_probs": -torch.rand(rows, width, generator=generator),
        }
        self.objects = {
            "uid": _cells(f"prompt-{row // 8}" for row in range(rows)),
            "data_source": _cells("math" for _ in range(rows)),
            "answer": _cells(str(row % 100) for row in range(rows)),
            "extra_info": _cells({"index": row, "split": "train"} for row in range(rows)),
        }
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.order = torch.randperm(rows, generator=generator)
        self.verl = peer("verl.protocol")

    def of(self, container: Any) -> Batch:
        return container.from_dict(self.tensors, dict(self.objects), {"step": 1})

    def wrong(self, got: Any, rows: Tensor) -> float:
        """Which share of the columns is not these rows of the sample; of parts, all together."""
        batches = [getattr(part, "batch", part) for part in (got if isinstance(got, list | tuple) else [got])]
        got = {name: torch.cat([batch[name] for batch in batches]) for name in self.tensors}
        return float(np.mean([not torch.equal(got[name], tensor[rows]) for name, tensor in self.tensors.items()]))


def cases(quick: bool) -> Iterator[Case]:
    sample = Sample(*(QUICK_SIZE if quick else SIZE))
    everything, order = torch.arange(sample.rows), sample.order
    part, half = slice(sample.rows // 4, sample.rows // 2), order[: sample.rows // 2]
    swapped = torch.cat(everything.chunk(PARTS)[::-1])
    twice = everything.repeat_interleave(2)
    padded = torch.cat([everything[:-1], everything[:1]])

    yield _case(sample, "construct", lambda make: make, everything, TensorDict.copy)
    yield _case(sample, "slice", _using(lambda d: d[part]), everything[part], lambda td: td[part])
    yield _case(sample, "chunk", _using(lambda d: d.chunk(PARTS)), everything, lambda td: td.chunk(PARTS))
    yield _case(sample, "index, half", _using(lambda d: d[half]), half, lambda td: td[half], 0.5)
    yield _case(sample, "reorder", _on_each(lambda d: d.reorder(order)), order, lambda td: td[order], 1)
    yield _case(sample, "concat of chunks", _rejoining(1), everything, lambda td: torch.cat(td.chunk(PARTS)), 1)
    yield _case(sample, "concat, moved", _rejoining(-1), swapped, lambda td: torch.cat(td.chunk(PARTS)[::-1]), 1)
    yield _case(sample, "repeat", _using(lambda d: d.repeat(2)), twice, moves=2)
    yield _case(sample, "union, new field", _with_scores, everything)
    yield _case(sample, "union, equal copies", _with_copy(sample), everything)
    yield _case(sample, "pad by one", _padding(sample), padded, moves=1)
    yield _case(sample, "pad by one, chunk", _padded_chunks(sample), padded, moves=1 / PARTS)
    yield _crossing(sample, "in band", _in_band)
    yield _crossing(sample, "one copy", _one_copy)
    yield _crossing(sample, "shared", _shared)
    yield from _through_ray(sample)
    yield from _disk(sample)


def _case(
    sample: Sample,
    name: str,
    build: Build,
    rows: Tensor,
    bare: Callable[[TensorDict], Any] | None = None,
    moves: float = 0,
) -> Case:
    """``bare`` does the same to a TensorDict; ``moves`` is the share of all bytes that the result is made of."""
    peers: dict[str, Function] = {}
    if sample.verl is not None:
        peers["verl"] = build(lambda: sample.of(sample.verl.DataProto))
    if bare is not None:
        td = TensorDict(sample.tensors, batch_size=[sample.rows])
        peers["TensorDict"] = lambda: bare(td)
        # A TensorDict has no object columns, so this is what it compares to.
        peers["rlprims, tensors only"] = build(lambda: verl_like.DataProto.from_dict(sample.tensors))
    ours = build(lambda: sample.of(verl_like.DataProto))
    return Case("batch", name, ours, peers, lambda got: sample.wrong(got, rows), int(2 * moves * sample.bytes))


def _using(use: Callable[[Batch], Any]) -> Build:
    """The use alone, of one batch made before."""

    def build(make: Callable[[], Batch]) -> Function:
        batch = make()
        return lambda: use(batch)

    return build


def _on_each(use: Callable[[Batch], Batch | None]) -> Build:
    """The use of a batch made anew, which verl changes, answering None."""

    def build(make: Callable[[], Batch]) -> Function:
        def run() -> Batch:
            batch = make()
            answer = use(batch)
            return batch if answer is None else answer

        return run

    return build


def _rejoining(step: int) -> Build:
    def build(make: Callable[[], Batch]) -> Function:
        parts = make().chunk(PARTS)[::step]
        return lambda: type(parts[0]).concat(parts)

    return build


def _with_scores(make: Callable[[], Batch]) -> Function:
    rows, container = len(make()), type(make())
    new = {"scores": torch.zeros(rows)}, {"verdict": _cells("right" for _ in range(rows))}
    return lambda: make().union(container.from_dict(*new))


def _with_copy(sample: Sample) -> Build:
    def build(make: Callable[[], Batch]) -> Function:
        tensors = {name: tensor.clone() for name, tensor in sample.tensors.items()}
        objects = {name: _cells(array.tolist()) for name, array in sample.objects.items()}
        other = type(make()).from_dict(tensors, objects, {"step": 1})
        return lambda: make().union(other)

    return build


def _padding(sample: Sample) -> Build:
    def build(make: Callable[[], Batch]) -> Function:
        batch = make()[: sample.rows - 1]
        library = verl_like if isinstance(batch, verl_like.DataProto) else sample.verl
        return lambda: library.pad_dataproto_to_divisor(batch, sample.rows)[0]

    return build


def _padded_chunks(sample: Sample) -> Build:
    def build(make: Callable[[], Batch]) -> Function:
        batch = make()[: sample.rows - 1]
        if isinstance(batch, verl_like.DataProto):
            return lambda: batch.chunk(PARTS, pad=True)
        return lambda: sample.verl.pad_dataproto_to_divisor(batch, PARTS)[0].chunk(PARTS)

    return build


def _crossing(
    sample: Sample,
    name: str,
    ours: Callable[[Batch], Batch],
    verls: Callable[[Batch, str], Batch] | None = None,
) -> Case:
    batch, verls = sample.of(verl_like.DataProto), verls or _verls_pickle
    peers: dict[str, Function] = {}
    if sample.verl is not None:
        theirs = sample.of(sample.verl.DataProto)
        peers = {"verl": lambda: verls(theirs, ""), "verl, numpy": lambda: verls(theirs, "numpy")}
    everything = torch.arange(sample.rows)
    return Case("batch", f"process, {name}", lambda: ours(batch), peers, lambda got: sample.wrong(got, everything))


def _in_band(batch: Batch) -> Batch:
    return pickle.loads(pickle.dumps(batch, protocol=5))  # noqa: S301 - written here


def _one_copy(batch: Batch) -> Batch:
    """The buffers copied once, as into a pipe, a socket or shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers])  # noqa: S301


def _shared(batch: Batch) -> Batch:
    """The buffers as they are, as where both sides map one memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=buffers)  # noqa: S301


def _verls_pickle(batch: Batch, method: str) -> Batch:
    return _as_verl_packs(lambda: pickle.loads(pickle.dumps(batch)), method)  # noqa: S301


def _as_verl_packs(cross: Callable[[], Batch], method: str) -> Batch:
    os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method
    try:
        return cross()
    finally:
        del os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"]


def _through_ray(sample: Sample) -> Iterator[Case]:
    """Into Ray's object store and out of it again."""
    ray = peer("ray")
    if ray is None:
        return
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=6 * sample.bytes + 2**28
    )
    try:

        def cross(batch: Batch) -> Batch:
            return ray.get(ray.put(batch))

        yield _crossing(sample, "Ray", cross, lambda batch, method: _as_verl_packs(lambda: cross(batch), method))
    finally:
        ray.shutdown()


def _disk(sample: Sample) -> Iterator[Case]:
    folder = Path(tempfile.mkdtemp())
    try:
        everything = torch.arange(sample.rows)
        batch, peers_save, peers_load = sample.of(verl_like.DataProto), {}, {}
        batch.save(folder / "ours")
        if sample.verl is not None:
            theirs = sample.of(sample.verl.DataProto)
            theirs.save_to_disk(folder / "theirs")
            peers_save = {"verl": lambda: theirs.save_to_disk(folder / "theirs")}
            peers_load = {"verl": lambda: type(theirs).load_from_disk(folder / "theirs")}
        yield Case("batch", "save", lambda: batch.save(folder / "ours"), peers_save, lambda got: 0.0)
        yield Case(
            "batch", "load", lambda: type(batch).load(folder / "ours"), peers_load,
            lambda got: sample.wrong(got, everything),
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)


def _cells(values: Any) -> np.ndarray:
    values = list(values)
    return np.fromiter(values, dtype=object, count=len(values))
