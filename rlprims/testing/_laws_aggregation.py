"""The scalar of a step does not depend on how the step is cut into micro-batches."""

import torch

from rlprims.testing._cases import LARGE, TOY, Batch, make_batch, make_batches
from rlprims.testing._compare import assert_close
from rlprims.testing._primitive import Primitive
from rlprims.types import Totals

EXACT = 1e-12
PARTITIONS = 12


def _totals(batch: Batch) -> Totals:
    alive = batch.mask.any(-1)
    groups, rollouts = (len(set(batch.data[name][alive].tolist())) for name in ("group_ids", "trajectory_ids"))
    return Totals(int(batch.mask.sum()), sequences=int(alive.sum()), groups=groups, trajectories=rollouts)


def _step_wide(p: Primitive, batch: Batch, rows: torch.Tensor, totals: Totals) -> dict[str, object]:
    counts = {name: batch.data[name][rows] for name in ("group_tokens", "row_tokens", "trajectory_tokens")}
    known = {"totals": totals, **counts}
    return {name: x for name, x in known.items() if name in p.data}


def parts_sum_to_the_whole(p: Primitive) -> None:
    """Values and gradients in float64, over random partitions of the rows; parts may be empty, groups may be cut."""
    for seed in range(PARTITIONS):
        generator = torch.Generator().manual_seed(seed)
        batch = make_batch(seed, torch.float64, *(LARGE if seed == PARTITIONS - 1 else TOY))
        rows = torch.arange(len(batch.mask))
        totals = _totals(batch)
        whole = p.run(batch, p.required)
        with_totals = p.run(batch, p.required, **_step_wide(p, batch, rows, totals))
        assert_close("the value with the totals of the batch itself", with_totals.value, whole.value, EXACT)
        part_of = torch.randint(0, 1 + seed % 5, (len(rows),), generator=generator)
        value, gradients = torch.zeros_like(whole.value), torch.zeros_like(whole.gradients["losses"])
        packed = torch.zeros_like(whole.value)
        for part in range(1 + seed % 5):
            selected = rows[part_of == part]
            micro = batch.rows(selected)
            step_data = _step_wide(p, batch, selected, totals)
            got = p.run(micro, p.required, **step_data)
            value += got.value
            packed += p.run(micro.pack(), p.required, **step_data).value
            gradients[selected] = got.gradients["losses"]
        assert_close("the sum over micro-batches", value, whole.value, EXACT)
        assert_close("the sum over packed micro-batches", packed, whole.value, EXACT)
        assert_close("the gradient of losses from micro-batches", gradients, whole.gradients["losses"], EXACT)


def rows_without_tokens_do_not_count(p: Primitive) -> None:
    """Rows without a valid token do not change the value."""
    for batch in make_batches(range(4)):
        got, want = p.run(batch.without_empty_rows(), p.required), p.run(batch, p.required)
        assert_close("the value without the empty rows", got.value, want.value, EXACT)


def it_is_linear(p: Primitive) -> None:
    """Losses times a give the scalar times a."""
    for batch in make_batches(range(4)):
        got = p.run(batch.replace(losses=-3.0 * batch.data["losses"]), p.required)
        assert_close("the value of losses times −3", got.value, -3.0 * p.run(batch, p.required).value, EXACT)
