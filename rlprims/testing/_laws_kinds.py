"""The laws of one kind of primitive each: advantages, losses, aggregations, filters and selectors."""

import torch
from torch import Tensor

from rlprims.grouping import dense_ids
from rlprims.testing._cases import LARGE, TOY, Batch, layout_of, make_batch, make_batches
from rlprims.testing._compare import assert_close, assert_finite, assert_same, assert_zero
from rlprims.testing._primitive import Primitive
from rlprims.types import Totals

SEEDS = (0, 1, 2)
EXACT = 1e-12
_EPS = 1e-4
_LARGE_REWARDS = 1e4  # so that the eps of a divisor does not matter
_LOG_RATIOS = (0.0, 20.0, 88.0, 89.0, 710.0, 800.0, 1e4)
_PARTITIONS = 12


# Advantages from a group: only differences of rewards matter, and equal rewards give 0.


def _last(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))


def _with_rewards(batch: Batch, totals: Tensor) -> Batch:
    """The batch with these total rewards, each on the row's last valid token, and 0 elsewhere."""
    return batch.replace(rewards=torch.where(_last(batch.mask), totals[:, None], 0.0))


def equal_rewards_give_zero(p: Primitive) -> None:
    """A group with equal rewards has advantage exactly 0, for every number, group size and dtype."""
    for reward in (0.1, 1000.1, -1e6 / 3, 0.0):
        for size in (2, 3, 7, 9, 130):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                batch = make_batch(0, dtype).without_empty_rows()
                batch = batch.rows((torch.arange(size) % 2 + 6) % len(batch.mask))
                batch = batch.replace(group_ids=torch.zeros(size, dtype=torch.int64))
                constant = _with_rewards(batch, torch.full((size,), reward, dtype=dtype))
                got = p.run(constant, p.required)
                assert_zero(f"the advantage of {size} rewards of {reward} in {dtype}", got.value)


def a_shift_of_a_group_cancels(p: Primitive) -> None:
    """A constant added to every reward of a group does not change its advantages, if it has two rows or more."""
    for batch in map(Batch.without_empty_rows, make_batches(SEEDS)):
        ids, total = batch.data["group_ids"], batch.data["scores"]
        several = (ids == ids[:, None]).sum(-1) > 1
        want = p.run(_with_rewards(batch, total), p.required).value
        for constant in (1.0, -1e3):
            offset = constant * (1 + ids)
            got = p.run(_with_rewards(batch, total + offset), p.required).value
            assert_close(f"the advantage of rewards shifted by {constant}", got[several], want[several], 1e-9)


def a_scale_passes_or_cancels(p: Primitive) -> None:
    """Rewards times a give advantages times a; or the same advantages up to eps, if they are divided by a deviation."""
    for batch in map(Batch.without_empty_rows, make_batches(SEEDS)):
        total = _LARGE_REWARDS * batch.data["scores"]
        want = p.run(_with_rewards(batch, total), p.required).value
        for scale in (2.0, 0.5):
            got = p.run(_with_rewards(batch, scale * total), p.required).value
            if not torch.allclose(got, want * scale, rtol=_EPS, atol=_EPS):
                assert_close(f"the advantage of rewards times {scale}", got, want, _EPS)


def a_higher_score_never_gets_a_lower_advantage(p: Primitive) -> None:
    """In a group, if a response has a higher total reward than another, its advantage is not lower."""
    for batch in map(Batch.without_empty_rows, make_batches(SEEDS)):
        total, ids = batch.data["scores"], batch.data["group_ids"]
        got = p.run(_with_rewards(batch, total), p.required).value[_last(batch.mask)]
        better = (total[:, None] > total) & (ids[:, None] == ids)
        lower = (better & (got[:, None] < got - 1e-9)).nonzero()
        if len(lower):
            one, other = lower[0].tolist()
            raise AssertionError(
                f"scores of {total[one]:.3g} and {total[other]:.3g} in one group give advantages of "
                f"{got[one]:.3g} and {got[other]:.3g}"
            )


def one_advantage_per_response(p: Primitive) -> None:
    """Every valid token of a response has the same advantage, wherever the reward is in it."""
    for batch in make_batches(SEEDS):
        got = p.run(batch, p.required).value
        first = batch.mask & (batch.mask.cumsum(-1) == 1)
        spread = torch.where(batch.mask, (got * first).sum(-1, keepdim=True), 0.0)
        assert_close("the advantage along a response", got, spread, 0)


# Losses of two policies: the gradient on policy, and finite results far off policy.


def on_policy_it_is_reinforce(p: Primitive) -> None:
    """At log_probs = old_log_probs the gradient of the loss with respect to log_probs is −advantages."""
    for batch in make_batches(SEEDS):
        for layout in (batch, batch.pack()):
            ones = torch.ones_like(layout.data["log_probs"])
            on_policy = layout.replace(old_log_probs=layout.data["log_probs"], token_cotangent=ones)
            got = p.run(on_policy, p.required).gradients["log_probs"]
            want = torch.where(layout.mask, -layout.data["advantages"], 0.0)
            assert_close("the gradient of log_probs on policy", got, want, EXACT)


def _others(p: Primitive) -> list[str]:
    return [name for name in p.inputs if name.endswith("_log_probs")]


def _at_log_probs(p: Primitive, batch: Batch, log_probs: float, others: float) -> Batch:
    pair = {name: torch.full_like(batch.data[name], others) for name in _others(p)}
    return batch.replace(log_probs=torch.full_like(batch.data["log_probs"], log_probs), **pair)


def far_log_ratios_are_finite(p: Primitive) -> None:
    """Log-ratios up to ±1e4 give finite values and gradients, in float32 and float64, for both signs of A."""
    for dtype in (torch.float32, torch.float64):
        sizes = [(make_batch(0, dtype), size) for size in _LOG_RATIOS]
        for batch, size in (*sizes, (make_batch(0, dtype, *LARGE), 1e4)):
            for one, other in ((-0.1, -0.1 - size), (-0.1 - size, -0.1)):
                for names in p.variants:
                    got = p.run(_at_log_probs(p, batch, one, other), names)
                    assert_finite(got, f" at log_probs={one}, {', '.join(_others(p))}={other} in {dtype}")


def impossible_tokens_are_finite(p: Primitive) -> None:
    """A log-prob of −inf under one of the two policies gives finite values and gradients."""
    batch = make_batch(0, torch.float32)
    for one, other in ((-torch.inf, -1.0), (-1.0, -torch.inf)):
        for names in p.variants:
            got = p.run(_at_log_probs(p, batch, one, other), names)
            assert_finite(got, f" at log_probs={one}, {', '.join(_others(p))}={other}")


def tokens_are_independent(p: Primitive) -> None:
    """A loss declared ``token_wise`` has the same values and gradients for tokens in any order, cut anywhere."""
    per_row = [name for name in p.inputs if layout_of(name) == "row"]
    assert not per_row, f"it is declared token_wise but has the parameter {per_row[0]}, which is per row"
    for batch in make_batches([0]):
        tokens = batch.mask.numel()
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
        cuts = torch.tensor([0, tokens // 3, tokens // 3, tokens])

        def shuffle(x: Tensor, order: Tensor = order) -> Tensor:
            return x.flatten(0, 1)[order]

        shuffled = batch.map(shuffle, lambda x: x[:3]).replace(cu_seqlens=cuts)
        for names in p.variants:
            want = p.run(batch, names).map(shuffle, lambda x: x)
            assert_same(p.run(shuffled, names), want, EXACT, " of shuffled tokens")


# Aggregations: the scalar of a step does not depend on how the step is cut into micro-batches.


def _totals(batch: Batch) -> Totals:
    has_tokens = batch.mask.any(-1)
    groups, rollouts = (len(set(batch.data[name][has_tokens].tolist())) for name in ("group_ids", "trajectory_ids"))
    return Totals(int(batch.mask.sum()), sequences=int(has_tokens.sum()), groups=groups, trajectories=rollouts)


def _step_wide(p: Primitive, batch: Batch, rows: Tensor, totals: Totals) -> dict[str, object]:
    counts = {name: batch.data[name][rows] for name in ("group_tokens", "row_tokens", "trajectory_tokens")}
    known = {"totals": totals, **counts}
    return {name: x for name, x in known.items() if name in p.data}


def parts_sum_to_the_whole(p: Primitive) -> None:
    """Values and gradients in float64, over random partitions of the rows; parts may be empty, groups may be cut."""
    for seed in range(_PARTITIONS):
        generator = torch.Generator().manual_seed(seed)
        batch = make_batch(seed, torch.float64, *(LARGE if seed == _PARTITIONS - 1 else TOY))
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


# Filters keep whole groups and drop groups without a signal. Selectors answer for every token.


def _keep(p: Primitive, batch: Batch) -> Tensor:
    """The answers of a filter, one bool per row."""
    return _answers(p, batch, batch.data["group_ids"], "row")


def _answers(p: Primitive, batch: Batch, like: Tensor, per: str) -> Tensor:
    answers = p.run(batch, p.required).value
    assert answers.dtype is torch.bool, f"the result has dtype {answers.dtype}, expected torch.bool"
    got, want = tuple(answers.shape), tuple(like.shape)
    assert got == want, f"the result has shape {got}, expected {want}: one per {per}"
    return answers


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


def every_token_gets_an_answer(p: Primitive) -> None:
    """The result of a selector has a bool per token, padded and packed."""
    for either in make_batches(SEEDS):
        for batch in (either, either.pack()):
            _answers(p, batch, batch.mask, "token")
