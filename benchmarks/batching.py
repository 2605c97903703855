"""Rows to ranks, to packs and to micro-batches, by their lengths.

Lengths are lognormal and clipped. The error of a partition is by how much its heaviest part is over max(mean, longest),
and of packing and micro-batches how many more there are than the tokens need, as shares of it. TRL packs a dataset and
verl cuts a batch, where ours answer with row numbers: what peers spend on moving tokens is part of theirs.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks._harness import Case
from benchmarks._peers import peer
from rlprims import batching

SHORTEST, LONGEST = 16, 8192
SMALL = ((1024, 8, True), (1024, 32, False))
LARGE = ((4096, 64, True), (32768, 512, True), (4096, 64, False), (8192, 128, False))
SLOW_DIFFERENCING = 4096  # rows beyond which verl's takes seconds with unequal sizes, and gigabytes
PACKED = (1024, 8192, 32768)
CUT = (256,)

Lengths = NDArray[np.int64]


def cases(quick: bool) -> Iterator[Case]:
    for rows, parts, equal_size in SMALL if quick else SMALL + LARGE:
        yield _balanced(rows, parts, equal_size)
    for rows in PACKED[:1] if quick else PACKED:
        yield _packed(rows)
    for rows in CUT:
        yield _cut(rows)


def _lengths(rows: int) -> Lengths:
    drawn = np.random.default_rng(0).lognormal(6.5, 1.0, rows)
    return drawn.clip(SHORTEST, LONGEST).astype(np.int64)


def _balanced(rows: int, parts: int, equal_size: bool) -> Case:
    lengths = _lengths(rows)
    peers = {}
    if (verl := peer("verl.utils.seqlen_balancing")) is not None:
        arguments = {"seqlen_list": lengths.tolist(), "k_partitions": parts, "equal_size": equal_size}
        if equal_size or rows <= SLOW_DIFFERENCING:
            peers["verl karmarkar_karp"] = partial(verl.karmarkar_karp, **arguments)
        peers["verl greedy"] = partial(verl.greedy_partition, **arguments)
    bound = max(lengths.sum() / parts, lengths.max())
    return Case(
        family="batching",
        name=f"balance {rows} to {parts}{' equal' if equal_size else ''}",
        ours=partial(batching.balance, lengths, parts, equal_size=equal_size),
        peers=peers,
        error=lambda got: max(lengths[part].sum() for part in got) / bound - 1,
    )


def _packed(rows: int) -> Case:
    lengths = _lengths(rows)
    peers = {}
    trl, datasets = peer("trl.data_utils"), peer("datasets")
    if trl is not None and datasets is not None:
        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
        dataset = dataset.with_format("arrow")
        peers["trl bfd"] = partial(trl.pack_dataset, dataset, LONGEST, "bfd", {"keep_in_memory": True})
    return Case(
        family="batching",
        name=f"pack {rows}",
        ours=partial(batching.pack, lengths, max_tokens=LONGEST),
        peers=peers,
        error=lambda got: _surplus(len(got), lengths),
    )


def _cut(rows: int) -> Case:
    lengths = _lengths(rows)
    peers = {}
    verl, tensordict = peer("verl.utils.seqlen_balancing"), peer("tensordict")
    if verl is not None and tensordict is not None:
        tokens = torch.nested.as_nested_tensor(
            [torch.zeros(n, dtype=torch.int64) for n in lengths], layout=torch.jagged
        )
        batch = tensordict.TensorDict({"input_ids": tokens}, batch_size=[rows])
        peers["verl rearrange"] = partial(verl.rearrange_micro_batches, batch, LONGEST)
    return Case(
        family="batching",
        name=f"micro-batches {rows}",
        ours=partial(batching.pack, lengths, max_tokens=LONGEST),
        peers=peers,
        error=lambda got: _surplus(len(got[1] if isinstance(got, tuple) else got), lengths),
    )


def _surplus(bins: int, lengths: Lengths) -> float:
    return bins / -(-int(lengths.sum()) // LONGEST) - 1
