"""Laws of filters: groups are kept whole, and groups without a signal are dropped."""

import torch
from torch import Tensor

from rlprims.grouping import dense_ids
from rlprims.testing._cases import Batch, make_batch, make_batches
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import Primitive

SEEDS = (0, 1, 2)


def _keep(p: Primitive, batch: Batch) -> Tensor:
    keep = p.run(batch, p.required).value
    rows = batch.data["group_ids"].shape
    assert keep.dtype is torch.bool, f"the result has dtype {keep.dtype}, expected torch.bool"
    assert keep.shape == rows, f"the result has shape {tuple(keep.shape)}, expected {tuple(rows)}: one per row"
    return keep


def _scores(p: Primitive) -> str:
    return "component_scores" if "component_scores" in p.data else "scores"


def groups_are_kept_whole(p: Primitive) -> None:
    """All rows of a group are kept, or none."""
    for batch in make_batches(SEEDS):
        keep, ids = _keep(p, batch), batch.data["group_ids"]
        for group in set(ids.tolist()):
            answers = keep[ids == group]
            assert bool((answers == answers[0]).all()), f"rows of group {group} got {answers.tolist()}"


def equal_scores_are_dropped(p: Primitive) -> None:
    """A group with equal scores has no signal: 0.1 nine times, 1000.1 three times."""
    for score in (0.1, 1000.1, 0.0, 1.0):
        for size in (1, 2, 3, 7, 9, 130):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                scores = torch.full((size, *make_batch(0).data[_scores(p)].shape[1:]), score, dtype=dtype)
                ids = torch.zeros(size, dtype=torch.int64)
                batch = make_batch(0).replace(**{_scores(p): scores, "group_ids": ids})
                assert not _keep(p, batch).any(), f"{size} scores of {score} in {dtype} were kept"


def unknown_scores_are_dropped(p: Primitive) -> None:
    """A group with a NaN or infinite score is dropped; other groups are not affected."""
    for row, batch in enumerate(make_batches(SEEDS)):
        ids = batch.data["group_ids"]
        for poison in (torch.nan, torch.inf, -torch.inf):
            scores = batch.data[_scores(p)].clone()
            scores[row].view(-1)[:1] = poison
            want = _keep(p, batch) & (ids != ids[row])
            got = _keep(p, batch.replace(**{_scores(p): scores}))
            assert_close(f"the answer with a score of {poison}", got, want, 0)


def twice_is_once(p: Primitive) -> None:
    """A second pass keeps all rows that the first one kept."""
    for batch in make_batches(SEEDS):
        kept = batch.rows(_keep(p, batch).nonzero()[:, 0])
        kept = kept.replace(group_ids=dense_ids(kept.data["group_ids"]))
        assert bool(_keep(p, kept).all()), "a second pass drops rows that the first kept"
