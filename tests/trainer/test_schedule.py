"""The schedule, simulated: groups that take random times, some of them dropped, and a trainer that is slow or fast."""

import heapq
import json
from collections import Counter
from random import Random
from typing import NamedTuple

import pytest

from rlprims.trainer.sources import Schedule

TRACES = 10_000


class Trace(NamedTuple):
    """What a run did: its batches, how old each group's weights were, and how long each took."""

    batches: list[list[int]]
    began: dict[int, int]
    """By group the number of updates before it."""
    lengths: dict[int, int]
    kept: dict[int, bool]
    schedule: Schedule

    @property
    def staleness(self) -> list[int]:
        return [number - self.began[group] for number, batch in enumerate(self.batches) for group in batch]


def simulate(
    schedule: Schedule, lengths: list[int], drops: list[bool], *, training: int, steps: int, stop_at: int = -1
) -> Trace:
    """A discrete-event simulation: group i takes ``lengths[i]``, an update takes ``training``; both go on at once.

    At the event ``stop_at`` the schedule is replaced by one that was restored from its state as JSON.
    """
    now, free, events = 0, 0, 0
    running: list[tuple[int, int]] = []
    trace = Trace([], {}, {}, {}, schedule)
    while len(trace.batches) < steps:
        if schedule.is_training and now >= free:
            schedule.updated()
        batch, numbers = schedule.take(), schedule.begin()
        for group in numbers:
            trace.began[group] = schedule.batches
            trace.lengths[group] = lengths[group % len(lengths)]
            trace.kept[group] = not drops[group % len(drops)]
            heapq.heappush(running, (now + trace.lengths[group], group))
        if batch is not None:
            trace.batches.append(batch)
            free = now + training
        if batch is not None or numbers:
            continue
        events += 1
        if events == stop_at:
            restored = Schedule(groups=schedule.groups, ahead=schedule.ahead, window=schedule.window)
            restored.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
            schedule = restored
        if running and not (schedule.is_training and free < running[0][0]):
            now, group = heapq.heappop(running)
            schedule.finish(group, kept=trace.kept[group])
        else:
            now = free
    return trace._replace(schedule=schedule)


def random_case(rng: Random) -> dict[str, object]:
    groups, ahead = rng.randint(1, 4), rng.randint(0, 3)
    window = rng.choice([1, rng.randint(1, (ahead + 1) * groups + 2), None])
    share = rng.choice([0.0, 0.3])
    return {
        "how": {"groups": groups, "ahead": ahead, "window": window},
        "lengths": [int(rng.paretovariate(1.1)) for _ in range(40)],
        "drops": [rng.random() < share for _ in range(39)] + [False],
        "training": rng.choice([0, 1, 5]),
        "steps": 6,
    }


def run(case: dict[str, object], **changes: object) -> Trace:
    case = {**case, **changes}
    return simulate(Schedule(**case.pop("how")), **case)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ten_thousand_random_traces() -> None:
    """No group is used twice, bounds are met, pacing is kept, and nothing that was sampled disappears."""
    rng, tight = Random(0), Counter[bool]()
    for number in range(TRACES):
        case = random_case(rng)
        trace = run(case)
        schedule, groups = trace.schedule, trace.schedule.groups
        used = [group for batch in trace.batches for group in batch]
        assert all(len(batch) == groups for batch in trace.batches)
        assert len(used) == len(set(used))
        assert all(trace.kept[group] for group in used)
        if schedule.bound is not None:
            assert max(trace.staleness) <= schedule.bound, (number, case)
            tight[max(trace.staleness) == schedule.bound] += 1
        assert schedule.begun - schedule.dropped <= (schedule.batches + schedule.ahead + 1) * groups
        # What began was used, was dropped by the filter, or is still there: the lengths are those that were sampled.
        left = set(schedule.waiting) | set(schedule.chosen)
        gone = Counter(trace.lengths[group] for group in trace.began if group not in left and trace.kept[group])
        assert gone == Counter(trace.lengths[group] for group in used)
        assert schedule.dropped == sum(not kept for group, kept in trace.kept.items() if group not in left)
        if number % 10 == 0:  # a run that ended at any event goes on alike
            again = run(case, stop_at=rng.randint(1, 30))
            assert (again.batches, again.began) == (trace.batches, trace.began)
    assert tight[True] > 1000


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_in_order_the_timing_changes_nothing(ahead: int) -> None:
    """Not which groups make a batch, and not which weights each began with, drops and their replacements included."""
    rng = Random(1)
    for _ in range(300):
        drops = [rng.random() < 0.3 for _ in range(39)] + [False]
        traces = [
            simulate(
                Schedule(groups=3, ahead=ahead, window=1),
                [rng.randint(0, 20) for _ in range(41)],
                drops,
                training=rng.choice([0, 3, 30]),
                steps=8,
            )
            for _ in range(3)
        ]
        used = [{group for batch in trace.batches for group in batch} for trace in traces]
        assert traces[0].batches == traces[1].batches == traces[2].batches
        began = [{group: trace.began[group] for group in of} for trace, of in zip(traces, used, strict=True)]
        assert began[0] == began[1] == began[2]


@pytest.mark.parametrize(
    ("groups", "ahead", "window"), [(1, 0, 1), (4, 1, 1), (4, 0, 4), (4, 1, 8), (4, 1, 6), (2, 3, 5), (3, 2, 9)]
)
def test_the_bound_is_met_by_some_trace(groups: int, ahead: int, window: int) -> None:
    rng, largest, schedule = Random(2), 0, Schedule(groups=groups, ahead=ahead, window=window)
    for _ in range(2000):
        lengths = [rng.choice([1, 1, 1, 400]) for _ in range(60)]
        trace = simulate(Schedule(groups=groups, ahead=ahead, window=window), lengths, [False], training=1, steps=10)
        largest = max(largest, *trace.staleness)
        if largest == schedule.bound:
            return
    pytest.fail(f"the largest staleness was {largest}, the bound is {schedule.bound}")


def test_without_a_window_a_slow_group_grows_as_old_as_it_likes() -> None:
    lengths = [1000] + [1] * 5000
    trace = simulate(Schedule(groups=2, ahead=1, window=None), lengths, [False], training=1, steps=40)
    assert 0 not in {group for batch in trace.batches for group in batch}
    assert trace.schedule.bound is None
    held = simulate(Schedule(groups=2, ahead=1, window=4), lengths, [False], training=1, steps=40)
    assert next(number for number, batch in enumerate(held.batches) if 0 in batch) <= 3  # S + ceil(3 / 2)


def test_the_window_lets_others_pass_a_slow_group_and_no_more_than_it_holds() -> None:
    schedule = Schedule(groups=2, ahead=1, window=3)
    assert schedule.begin() == [0, 1, 2, 3]
    for group in (3, 2, 1):
        schedule.finish(group)
    assert schedule.take() == [2, 1]  # 3 is as far from 0 as the window is wide
    assert schedule.begin() == []  # with the old weights
    schedule.updated()
    assert schedule.begin() == [4, 5]
    schedule.finish(5)
    assert schedule.take() is None
    schedule.finish(0)
    assert schedule.take() == [0, 3]  # 5 finished before 0, and is two from 3 only when 0 is gone


def test_groups_are_numbered_from_the_first_and_no_more_begin_than_may() -> None:
    schedule = Schedule(groups=2, window=None, first=5, most=3)
    assert schedule.begin() == [5, 6]
    schedule.finish(6, kept=False)
    schedule.finish(5)
    assert schedule.take() is None
    assert schedule.begin() == [7]
    schedule.finish(7, kept=False)
    assert schedule.take() is None
    assert schedule.begin() == []
    assert schedule.begun == 8
    whole = Schedule(groups=2, window=1, first=5, most=3)
    assert whole.begin() == [5, 6]
    for group in (6, 5):
        whole.finish(group)
    assert whole.take() == [5, 6]
    whole.updated()
    assert whole.begin() == [7]


def test_schedule_refuses_to_finish_a_group_that_did_not_begin() -> None:
    schedule = Schedule(groups=1)
    with pytest.raises(ValueError, match=r"group 0 is not under way; those are \[\]"):
        schedule.finish(0)
    schedule.begin()
    schedule.finish(0)
    with pytest.raises(ValueError, match="group 0 is not under way"):
        schedule.finish(0)


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"groups": 1, "ahead": -1}, {"groups": 1, "window": 0}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 1, 0 and 1"):
        Schedule(**wrong)
