"""A batch in pieces, and pieces as a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlprims.data_proto import _columns
from rlprims.data_proto._errors import BatchError, names
from rlprims.data_proto._meta import merged
from rlprims.data_proto._parts import D, columns, derived, fields
from rlprims.data_proto._rows import cut, gather, run, taken, upto


def chunk(data: D, chunks: int, *, pad: bool = False) -> list[D]:
    """Equal parts, as views. With ``pad`` missing rows are filled up as `pad_to_divisor` does, and only parts that
    have such rows are copied: an n-th of the batch where `pad_to_divisor` followed by `chunk` copies all of it.

    The parts together have ``-len(data) % chunks`` rows more, at the end: `concat` what came of them, then `unpad`.

    Raises:
        BatchError: the rows do not divide; use ``pad``, or `split`.

    >>> from rlprims.data_proto import DataProto
    >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(4)}).chunk(2)]
    [[0, 1], [2, 3]]
    >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(3)}).chunk(2, pad=True)]
    [[0, 1], [2, 0]]
    """
    rows = len(data)
    if chunks < 1 or (rows % chunks and not pad):
        raise BatchError(
            f"chunk: {rows} rows do not make {chunks} equal parts; use pad=True, or split(size), whose last part may "
            f"be smaller; {fields(data)}"
        )
    size = -(-rows // chunks)
    if not rows % chunks:
        return cut(data, [size] * chunks)
    whole = rows // size
    last = (upto((chunks - whole) * size) + whole * size) % rows
    return cut(run(data, 0, whole * size), [size] * whole) + cut(taken(data, last), [size] * (chunks - whole))


def split(data: D, split_size: int) -> list[D]:
    """Parts of ``split_size`` rows, as views; the last may be smaller. Zero rows make no part.

    Raises:
        BatchError: a size below 1.

    >>> from rlprims.data_proto import DataProto
    >>> [part["ids"].tolist() for part in DataProto.from_dict({"ids": torch.arange(3)}).split(2)]
    [[0, 1], [2]]
    """
    if split_size < 1:
        raise BatchError(f"split: split_size is {split_size}, it needs to be at least 1")
    rows = len(data)
    return cut(data, [min(split_size, rows - start) for start in range(0, rows, split_size)])


def concat(data: Sequence[D]) -> D:
    """The batches one under another, copied once.

    ``meta_info`` must agree wherever a key is in several; but what is in ``meta_info["metrics"]`` (a dict, or a list of
    dicts, per worker) is collected into one dict of lists.

    Raises:
        BatchError: nothing to join; fields, shapes, dtypes or devices that differ; metadata that disagrees.

    >>> from rlprims.data_proto import DataProto
    >>> a = DataProto.from_dict({"ids": torch.arange(2)}, meta_info={"step": 1, "metrics": {"loss": 0.5}})
    >>> b = DataProto.from_dict({"ids": torch.arange(3)}, meta_info={"step": 1, "metrics": {"loss": 0.7}})
    >>> both = DataProto.concat([a, b])
    >>> both["ids"].tolist(), both.meta_info
    ([0, 1, 0, 1, 2], {'step': 1, 'metrics': {'loss': [0.5, 0.7]}})
    """
    parts = list(data)
    if not parts:
        raise BatchError("concat: got no batches, so there are no fields to make a batch of; pass at least one")
    first, all_columns = parts[0], [columns(part) for part in parts]
    for position, part in enumerate(all_columns):
        for mine, theirs in ((all_columns[0].tensors, part.tensors), (all_columns[0].arrays, part.arrays)):
            if mine.keys() != theirs.keys():
                unshared = sorted(mine.keys() ^ theirs.keys())
                raise BatchError(
                    f"concat: only one of part 0 and part {position} has {names(unshared)}; select the fields that all "
                    f"parts have; part 0 {fields(first)}; part {position} {fields(parts[position])}"
                )
    counts = [part.rows for part in all_columns if part.rows is not None]
    return derived(
        first,
        {name: _columns.join(name, [part.tensors[name] for part in all_columns]) for name in all_columns[0].tensors},
        {
            name: _columns.join_arrays(name, [part.arrays[name] for part in all_columns])
            for name in all_columns[0].arrays
        },
        sum(counts) if counts else None,
        merged([part.meta_info for part in parts]),
    )


def make_iterator(
    data: D,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[D]:
    """Mini-batches, for so many passes over the batch. With ``{"shuffle": True}`` each pass has its own random order.

    Args:
        mini_batch_size: rows per mini-batch; must divide the rows.
        epochs: passes over all rows.
        seed: of the random order; None counts as 0, so that the order never depends on what ran before.
        dataloader_kwargs: only ``shuffle`` has a meaning here, since there is no loader.

    Raises:
        BatchError: at the call, sizes that do not divide, a number below its least, or an unknown option.

    >>> from rlprims.data_proto import DataProto
    >>> data = DataProto.from_dict({"ids": torch.arange(4)})
    >>> [part["ids"].tolist() for part in data.make_iterator(2, epochs=1)]
    [[0, 1], [2, 3]]
    """
    options = dict(dataloader_kwargs or {})
    in_random_order = bool(options.pop("shuffle", False))
    if options:
        raise BatchError(f"make_iterator: unknown dataloader_kwargs {names(options)}; only shuffle is supported")
    if mini_batch_size < 1 or len(data) % mini_batch_size or epochs < 0:
        raise BatchError(
            f"make_iterator: {len(data)} rows, mini_batch_size {mini_batch_size}, epochs {epochs}; the size must "
            "divide the rows (pad_to_divisor, or select rows first) and epochs be at least 0"
        )
    generator = torch.Generator("cpu").manual_seed(seed or 0)

    def mini_batches() -> Iterator[D]:
        for _ in range(epochs):
            if in_random_order:
                order = torch.randperm(len(data), generator=generator, device="cpu")
                yield from (gather(data, numbers) for numbers in torch.split(order, mini_batch_size) if numbers.numel())
            else:
                yield from split(data, mini_batch_size)

    return mini_batches()
