"""The container, and tokens and rows in their places."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims.batching import balance
from rlprims.grouping import group_bounds, group_std
from rlprims.interop.verl import (
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from rlprims.layout import unpack
from tests.golden_cases import Answer, Call, Calls, Case


def batch_of(c: Case) -> DataProto:
    tensors = {name: c.inputs[name] for name in ("ids", "logp", "score")}
    return DataProto.from_dict(tensors, {"uid": np.array(c.inputs["uid"], dtype=object)}, {"step": 1})


def fields(data: DataProto, prefix: str = "") -> dict[str, Any]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    labels = {name: array.tolist() for name, array in data.non_tensor_batch.items()}
    return {prefix + name: value for name, value in {**tensors, **labels}.items()}


def method(call: Callable[[DataProto, Case], DataProto]) -> Call:
    return lambda c: fields(call(batch_of(c), c))


def pieces(name: str, prefix: str) -> Call:
    def call(c: Case) -> Answer:
        parts = getattr(batch_of(c), name)(**c.args)
        return {key: x for i, part in enumerate(parts) for key, x in fields(part, f"{prefix}{i}.").items()}

    return call


def padded(c: Case) -> Answer:
    data, added = pad_dataproto_to_divisor(batch_of(c), **c.args)
    return {**fields(data), "pad_size": torch.tensor(added)}


def concatenated(c: Case) -> Answer:
    data, cuts = batch_of(c), np.cumsum([0, *c.args["pieces"]]).tolist()
    return fields(DataProto.concat([data[a:b] for a, b in pairwise(cuts)]))


def concatenated_metrics(c: Case) -> Answer:
    parts = [
        DataProto.from_dict({"x": c.inputs[name]}, meta_info=m) for name, m in zip("ab", c.args["meta"], strict=True)
    ]
    data = DataProto.concat(parts)
    return {"x": data["x"], "loss": torch.tensor(data.meta_info["metrics"]["loss"])}


def popped(c: Case) -> Answer:
    data = batch_of(c)
    return {**fields(data.pop(**c.args), "popped."), **fields(data, "left.")}


def selected(c: Case) -> Answer:
    index, kind = c.args["idxs"], c.args["kind"]
    as_kind = {"tensor": torch.tensor, "ndarray": np.array}.get(kind, lambda x: x)
    return fields(batch_of(c).select_idxs(as_kind(index)))


def union(c: Case) -> Answer:
    """The other batch is in what was recorded, unchanged."""
    names = ("adv", "score", "tag")
    adv, score, tag = (c.outputs[f"other.{name}"] for name in names)
    other = DataProto.from_dict({"adv": adv, "score": score}, {"tag": tag})
    return {**fields(batch_of(c).union(other)), **fields(other, "other.")}


def union_conflict(c: Case) -> Answer:
    data = batch_of(c)
    return fields(data.union(DataProto.from_dict({"score": data["score"] + 1})))


def union_of_nan(c: Case) -> Answer:
    """NaN is equal to itself here."""
    score = torch.full_like(c.inputs["score"], torch.nan)
    one, other = (DataProto.from_dict({"score": score.clone()}) for _ in range(2))
    return {"rows": torch.tensor(len(one.union(other)))}


def aliasing(c: Case) -> Answer:
    data = batch_of(c)
    part = data.select(batch_keys=["ids"])
    part.meta_info["step"] = 2
    before = data["ids"].clone()
    data.slice(0, 1)["ids"].add_(1)
    return {
        "meta_info_shared": torch.tensor(data.meta_info["step"] == 2),
        "slice_writes_through": torch.tensor(not torch.equal(data["ids"], before)),
    }


def parts_of_equal_work(c: Case) -> Answer:
    lengths = c.inputs["seqlens"]
    parts = balance(lengths.tolist(), c.args["k_partitions"], equal_size=c.args["equal_size"])
    owner = torch.empty_like(lengths)
    for i, part in enumerate(parts):
        owner[part] = i
    return {"partition_of": owner, "partition_sums": torch.stack([lengths[part].sum() for part in parts])}


def flush_left(c: Case) -> Answer:
    mask = c.inputs["mask"].bool()
    lengths = mask.sum(-1)
    cu, width = torch.cat([lengths[:1] * 0, lengths.cumsum(0)]), int(lengths.max())
    moved = [unpack(x[mask], cu, width) for x in (c.inputs["mask"], c.inputs["tensor"])]
    return dict(zip(("mask", "tensor"), moved, strict=True))


def pad(c: Case) -> Answer:
    left = c.args["padding_side"] == "left"
    rows = [c.inputs[f"seq{i}"] for i in range(3)]
    rows = [row.flip(0) for row in rows] if left else rows
    lengths = torch.tensor([len(row) for row in rows])
    multiple = c.args["pad_to_multiple_of"] or 1
    width = -(-int(lengths.max()) // multiple) * multiple
    cu = torch.cat([lengths[:1] * 0, lengths.cumsum(0)])
    got = unpack(torch.cat(rows), cu, width, fill=c.args["padding_value"])
    return {"padded": got.flip(1) if left else got}


def deviation_of_known(c: Case) -> Answer:
    """NaN is a row that is not valid; the rows of the matrix are groups."""
    x = c.inputs["x"]
    known, ids = ~x.isnan().flatten(), torch.arange(x.numel()) // x.shape[1]
    flat = torch.where(known, x.flatten(), 0.0)

    def whole(numbers: Tensor) -> Tensor:
        return numbers[0]

    one = torch.zeros_like(ids)
    low, high = group_bounds(flat, one, known)
    return {
        "all": whole(group_std(flat, one, known)),
        "dim1": group_std(flat, ids, known)[:: x.shape[1]],
        "nanmin": whole(low),
        "nanmax": whole(high),
    }


CONTAINER = {
    "unpad_dataproto": method(lambda data, c: unpad_dataproto(data, **c.args)),
    "fold_batch_dim": method(lambda data, c: fold_batch_dim(data, **c.args)),
    "unfold_batch_dim": method(lambda data, c: unfold_batch_dim(data, **c.args)),
    "DataProto.repeat": method(lambda data, c: data.repeat(**c.args)),
    "DataProto.sample_level_repeat": method(lambda data, c: data.sample_level_repeat(**c.args)),
    "DataProto.select": method(lambda data, c: data.select(**c.args)),
    "DataProto.slice": method(lambda data, c: data.slice(**c.args)),
    "DataProto.reorder": method(lambda data, c: data.reorder(torch.tensor(c.args["indices"]))),
    "DataProto.rename": method(lambda data, c: data.rename(c.args["old"], c.args["new"])),
    "pad_dataproto_to_divisor": padded,
    "DataProto.select_idxs": selected,
    "DataProto.chunk": pieces("chunk", "chunk"),
    "DataProto.split": pieces("split", "split"),
    "DataProto.concat": concatenated,
    "concat_metrics": concatenated_metrics,
    "DataProto.pop": popped,
    "DataProto.union": union,
    "DataProto.union_conflict": union_conflict,
    "DataProto.union_nan": union_of_nan,
    "aliasing": aliasing,
}

CALLS: Calls = {
    **{("verl", f"dataproto.{name}"): call for name, call in CONTAINER.items()},
    ("verl", "seqlen_balance"): parts_of_equal_work,
    ("trl", "flush_left"): flush_left,
    ("trl", "pad"): pad,
    ("trl", "nanstd"): deviation_of_known,
}
