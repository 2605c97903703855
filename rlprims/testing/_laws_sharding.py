"""A batch, its sequences or its vocabulary may be split over ranks: the numbers are those of a single rank."""

import torch

from rlprims.grouping import dense_ids
from rlprims.testing._cases import Batch, make_batches
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import CallOutcome, Primitive
from rlprims.testing._ranks import Rank, on_ranks
from rlprims.types import SequenceShard, VocabShard

EXACT = 1e-12
SEEDS = (0,)


def sequences_may_be_cut(p: Primitive) -> None:
    """Columns split over four ranks, one of which has none: values, and the gradients of the split tensors."""

    def of_rank(rank: Rank, part: Batch, names: tuple[str, ...]) -> CallOutcome:
        if "shard" in p.parameters:
            return p.run(part, names, shard=SequenceShard(rank.index, rank.all_gather))
        return p.run(part, names, all_reduce_rows=rank.all_reduce)

    for batch in make_batches(SEEDS):
        width = batch.mask.shape[1]
        spans = [slice(0, 2), slice(2, 2), slice(2, width - 1), slice(width - 1, width)]
        parts = [_columns(batch, span) for span in spans]
        for names in p.variants:
            want, found = p.run(batch, names), on_ranks(of_rank, parts, [names] * len(parts))
            assert_close("the value of cut sequences", torch.cat([x.value for x in found], 1), want.value, EXACT)
            for name in want.gradients:
                got = torch.cat([x.gradients[name] for x in found], 1)
                assert_close(f"the gradient of {name} of cut sequences", got, want.gradients[name], EXACT)


def a_batch_may_be_spread(p: Primitive) -> None:
    """Groups split over three ranks, one of which has no row: the numbers of each row."""

    def of_rank(rank: Rank, part: Batch, names: tuple[str, ...]) -> CallOutcome:
        dense = {name: dense_ids(part.data[name]) for name in ("group_ids", "trajectory_ids")}
        return p.run(part.replace(**dense), names, all_reduce=rank.all_reduce)

    for batch in make_batches(SEEDS):
        rank_of_row = batch.data["group_ids"] % 2
        rows = [(rank_of_row == 0).nonzero()[:, 0], rank_of_row.new_zeros(0), (rank_of_row == 1).nonzero()[:, 0]]
        parts = [batch.rows(index) for index in rows]
        for names in p.variants:
            want, found = p.run(batch, names), on_ranks(of_rank, parts, [names] * len(parts))
            for index, got in zip(rows, found, strict=True):
                assert_close("the value of a part of the batch", got.value, want.value[index], EXACT)


def a_vocabulary_may_be_cut(p: Primitive) -> None:
    """Logits split into three uneven shards: the value on each rank, and the gradient of its shard."""

    def of_rank(rank: Rank, part: Batch, names: tuple[str, ...], start: int, size: int) -> CallOutcome:
        return p.run(part, names, vocab=VocabShard(start, size, rank.all_reduce, rank.all_reduce_max))

    for batch in make_batches(SEEDS):
        for names in p.variants:
            want = p.run(batch, names)
            cut = [name for name in names if name.endswith("logits")]
            size = batch.data[cut[0]].shape[-1]
            spans = [slice(0, 1), slice(1, size - 2), slice(size - 2, size)]
            parts = [batch.replace(**{name: batch.data[name][..., span] for name in cut}) for span in spans]
            starts = [span.start for span in spans]
            found = on_ranks(of_rank, parts, [names] * len(spans), starts, [size] * len(spans))
            for span, got in zip(spans, found, strict=True):
                assert_close("the value of a shard", got.value, want.value, EXACT)
                for name, gradient in want.gradients.items():
                    assert_close(f"the gradient of a shard's {name}", got.gradients[name], gradient[..., span], EXACT)


def _columns(batch: Batch, span: slice) -> Batch:
    return batch.map(lambda x: x[:, span], lambda x: x)
