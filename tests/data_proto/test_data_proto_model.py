"""Any sequence of methods does to a batch what the same sequence does to a list of dicts.

Every batch that was made is kept and compared again at the end: no method may have changed its receiver, nor a batch
that shares something with it.
"""

import copy
import pickle
import tempfile

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from examples.unfold_columns import unfold_column_chunks
from rlprims.interop.verl import DataProto
from tests.data_proto.data_proto_batches import HAS_OBJECTS_OF_NO_ROWS, make, rows_of

MOST_ROWS = 24
small = st.integers(0, 3)
ends = st.none() | st.integers(-8, 8)


def plain_rows(count):
    """What `make` makes, said without it."""
    return [
        {
            "ids": [2 * row, 2 * row + 1],
            "logp": row / 7,
            "tokens": [float(row)] * (row % 3),
            "uid": f"u{row}",
            "score": row / 3,
            "image": [[row] * (row % 2 + 1)] * 2,
        }
        for row in range(count)
    ]


def in_any_order(rows):
    return sorted(repr(sorted(row.items())) for row in rows)


class Batches(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self):
        super().__init__()
        self.kept = []

    def keep(self, data, rows):
        assert rows_of(data) == rows
        assert len(data) == len(rows)
        assert data.meta_info == {"step": 3, "notes": {"tags": ["a"]}}
        self.kept.append((data, copy.deepcopy(rows)))
        return data, rows

    def teardown(self):
        for data, rows in self.kept:
            assert rows_of(data) == rows
            data.check_consistency()

    @initialize(target=batches, count=st.integers(0, 7))
    def start(self, count):
        return self.keep(make(count), plain_rows(count))

    @rule(target=batches, pair=batches, bounds=st.tuples(ends, ends, st.sampled_from([None, 1, 2, -1, -3])))
    def slice(self, pair, bounds):
        data, rows = pair
        return self.keep(data[slice(*bounds)], rows[slice(*bounds)])

    @rule(target=batches, pair=batches, data=st.data(), kind=st.sampled_from([list, np.array, torch.tensor]))
    def gather(self, pair, data, kind):
        batch, rows = pair
        numbers = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8)) if rows else []
        return self.keep(batch[kind(numbers)], [rows[number] for number in numbers])

    @rule(target=batches, pair=batches, data=st.data(), kind=st.sampled_from([list, np.array, torch.tensor]))
    def mask(self, pair, data, kind):
        batch, rows = pair
        mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        mask_of_kind = kind(mask) if mask else torch.zeros(0, dtype=torch.bool)
        return self.keep(batch.filter(mask_of_kind), [row for row, keep in zip(rows, mask, strict=True) if keep])

    @rule(target=batches, pair=batches, data=st.data())
    def reorder(self, pair, data):
        batch, rows = pair
        order = data.draw(st.permutations(range(len(rows))))
        return self.keep(batch.reorder(order), [rows[number] for number in order])

    @rule(pair=batches, seed=small)
    def shuffle(self, pair, seed):
        batch, rows = pair
        shuffled = rows_of(batch.shuffle(torch.Generator().manual_seed(seed)))
        assert sorted(row["uid"] for row in shuffled) == sorted(row["uid"] for row in rows)
        assert all(row in rows for row in shuffled)

    @rule(target=batches, pair=batches, times=small, interleave=st.booleans())
    def repeat(self, pair, times, interleave):
        batch, rows = pair
        times = min(times, MOST_ROWS // max(len(rows), 1))
        repeated = [row for row in rows for _ in range(times)] if interleave else rows * times
        return self.keep(batch.repeat(times, interleave), repeated)

    @rule(target=batches, pair=batches, data=st.data())
    def sample_level_repeat(self, pair, data):
        batch, rows = pair
        times = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
        repeated = [row for row, count in zip(rows, times, strict=True) for _ in range(count)][:MOST_ROWS]
        return self.keep(batch.sample_level_repeat(times)[:MOST_ROWS], repeated)

    @rule(target=batches, pair=batches, divisor=st.integers(1, 5))
    def pad(self, pair, divisor):
        batch, rows = pair
        padded, added = batch.pad_to_divisor(divisor)
        assert (len(rows) + added) % divisor == 0
        assert rows_of(padded.unpad(added)) == rows
        return self.keep(padded, (rows * (divisor + 1))[: len(rows) + added])

    @rule(target=batches, pair=batches, count=small, which=st.sampled_from(["first", "last"]))
    def padding(self, pair, count, which):
        batch, rows = pair
        if not rows or len(rows) + count > MOST_ROWS:
            return pair
        return self.keep(batch.padding(count, which), rows + [rows[0 if which == "first" else -1]] * count)

    @rule(target=batches, pair=batches, data=st.data())
    def unpad(self, pair, data):
        batch, rows = pair
        count = data.draw(st.integers(0, len(rows)))
        return self.keep(batch.unpad(count), rows[: len(rows) - count])

    @rule(target=batches, pair=batches, count=st.integers(1, 7), data=st.data())
    def chunk_padded(self, pair, count, data):
        batch, rows = pair
        parts, whole = batch.chunk(count, pad=True), batch.pad_to_divisor(count)[0].chunk(count)
        assert [rows_of(part) for part in parts] == [rows_of(part) for part in whole]
        assert rows_of(DataProto.concat(parts).unpad(-len(rows) % count)) == rows
        part = data.draw(st.sampled_from(parts))
        return self.keep(part, rows_of(part))

    @rule(target=batches, one=batches, two=batches)
    def concat(self, one, two):
        different = one[0].non_tensor_batch.keys() != two[0].non_tensor_batch.keys()
        different |= set(one[0].batch.keys()) != set(two[0].batch.keys())
        if different or len(one[1]) + len(two[1]) > MOST_ROWS:
            return one
        rows = one[1] + two[1]
        return self.keep(DataProto.concat([one[0], two[0]]), rows)

    @rule(target=batches, pair=batches, size=st.integers(1, 5))
    def split_and_rejoin(self, pair, size):
        batch, rows = pair
        parts = batch.split(size)
        assert [len(part) for part in parts] == [len(rows[i : i + size]) for i in range(0, len(rows), size)]
        return self.keep(DataProto.concat(parts) if parts else batch[:], rows)

    @rule(pair=batches, count=st.integers(1, 4))
    def chunk_and_swap(self, pair, count):
        batch, rows = pair
        if len(rows) % count == 0:
            parts, size = batch.chunk(count), len(rows) // count
            assert [rows_of(part) for part in parts] == [rows[i * size : (i + 1) * size] for i in range(count)]
            assert rows_of(DataProto.concat(parts[::-1])) == [row for part in parts[::-1] for row in rows_of(part)]

    @rule(pair=batches, key=st.sampled_from(["uid", "logp", "score"]))
    def group(self, pair, key):
        batch, rows = pair
        if key not in batch:
            return
        groups: dict[object, list[object]] = {}
        for row in rows:
            groups.setdefault(row[key], []).append(row)
        got = batch.group_by(key)
        assert list(got) == list(groups)
        assert [rows_of(group) for group in got.values()] == list(groups.values())

    @rule(target=batches, pair=batches, inner=st.integers(1, 4))
    def fold_and_unfold(self, pair, inner):
        batch, rows = pair
        if len(rows) % inner:
            return pair
        dense = batch.select([name for name in batch.batch.keys() if name != "tokens"])  # noqa: SIM118
        folded = dense.fold_batch_dim(len(rows) // inner) if rows else dense
        left = [{name: cell for name, cell in row.items() if name != "tokens"} for row in rows]
        assert [row["uid"] for row in rows_of(folded)] == (
            [[row["uid"] for row in left[i : i + inner]] for i in range(0, len(rows), inner)]
        )
        return self.keep(folded.unfold_batch_dim() if rows else folded, left)

    @rule(pair=batches)
    def cut_rows(self, pair):
        batch, rows = pair
        halves = [row | {"ids": [number]} for row in rows for number in row["ids"]]
        assert rows_of(unfold_column_chunks(batch, 2, ["ids"])) == halves

    @rule(target=batches, pair=batches, parts=st.integers(1, 4), seed=st.none() | small)
    def iterate(self, pair, parts, seed):
        batch, rows = pair
        if not rows or len(rows) % parts:
            return pair
        options = {} if seed is None else {"shuffle": True}
        mini = list(batch.make_iterator(len(rows) // parts, 2, seed, options))
        assert [len(part) for part in mini] == [len(rows) // parts] * parts * 2
        for epoch in (mini[:parts], mini[parts:]):
            passed = [row for part in epoch for row in rows_of(part)]
            assert passed == rows if seed is None else in_any_order(passed) == in_any_order(rows)
        return self.keep(mini[0], rows_of(mini[0]))

    @rule(target=batches, pair=batches, wanted=small)
    def filter(self, pair, wanted):
        batch, rows = pair
        kept = batch.filter(lambda whole: whole["ids"][:, 0] % 4 // 2 == wanted % 2)
        return self.keep(kept, [row for row in rows if row["ids"][0] % 4 // 2 == wanted % 2])

    @rule(target=batches, pair=batches)
    def save_and_load(self, pair):
        with tempfile.TemporaryDirectory() as folder:
            pair[0].save(f"{folder}/batch")
            return self.keep(DataProto.load(f"{folder}/batch"), pair[1])

    @rule(pair=batches)
    def through_a_tensordict(self, pair):
        if HAS_OBJECTS_OF_NO_ROWS or len(pair[0]):
            assert rows_of(DataProto.from_tensordict(pair[0].to_tensordict())) == pair[1]

    @rule(target=batches, pair=batches, deepcopy=st.booleans())
    def select_and_move(self, pair, deepcopy):
        return self.keep(pair[0].select(deepcopy=deepcopy).to("cpu"), pair[1])

    @rule(target=batches, pair=batches, kind=st.sampled_from(["tensor", "object"]), value=small)
    def assign(self, pair, kind, value):
        batch, rows = pair
        changed = batch[:]
        changed["new"] = torch.full((len(rows),), value) if kind == "tensor" else [f"v{value}"] * len(rows)
        return self.keep(changed, [row | {"new": value if kind == "tensor" else f"v{value}"} for row in rows])

    @rule(target=batches, pair=batches)
    def pop_and_unite(self, pair):
        batch, rows = pair
        left = batch[:]
        popped = {"ids", "tokens"} & set(batch.batch.keys())  # a batch that was folded has no tokens
        taken = left.pop(sorted(popped), ["image"])
        assert not {"image"} & set(left.non_tensor_batch) | popped & set(left.batch.keys())
        assert [set(row) for row in rows_of(taken)] == [popped | {"image"}] * len(rows)
        return self.keep(taken.union(left), rows)

    @rule(target=batches, pair=batches)
    def rename_and_back(self, pair):
        batch, rows = pair
        there = batch.rename(["ids", "uid"], ["uid", "ids"])
        assert [row["uid"] for row in rows_of(there)] == [row["ids"] for row in rows]
        return self.keep(there.rename(["ids", "uid"], ["uid", "ids"]), rows)

    @rule(target=batches, pair=batches, protocol=st.sampled_from([2, 4, 5]))
    def pickle(self, pair, protocol):
        batch, rows = pair
        return self.keep(pickle.loads(pickle.dumps(batch, protocol=protocol)), rows)  # noqa: S301

    @rule(target=batches, pair=batches, how=st.sampled_from([copy.copy, copy.deepcopy]))
    def copies(self, pair, how):
        return self.keep(how(pair[0]), pair[1])


Batches.TestCase.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBatches = Batches.TestCase
