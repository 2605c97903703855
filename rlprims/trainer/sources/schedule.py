"""Which groups are sampled and trained on, and when: a state machine without a clock.

Groups are numbered in the order in which they begin. A batch takes P of them. Two numbers define the schedule:

- ``ahead``, S: a group may begin while at most S batches wait before its own: begun − dropped ≤ (batches + S + 1) · P.
  This limits the age of groups by pacing. No group is discarded for its age, because that would keep short responses.
- ``window``, W: a batch takes finished groups among the W numbers that begin with the oldest untaken one. 1: in order,
  and the batches do not depend on the time that groups take. None: groups that finish first. Between them: at most
  W − 1 others overtake a slow group.

The weights that a group began with are at most S + ⌈(W − 1) / P⌉ updates old when it is trained on, and 0 with S = 0;
without a window there is no bound. Windowed FIFO is that of MiniMax as others describe it (arXiv:2605.26494, section
6.2.4): B = (S + 1) P groups at once and W = max(1, ⌊fB⌋).
"""

from collections.abc import Mapping
from typing import Any


class Schedule:
    """Groups begin, finish in any order, and are taken. ``state_dict`` is JSON and all of its state.

    Args:
        groups: P, groups of a batch.
        ahead: S, batches that may wait in addition to the one that is being filled.
        window: W, the numbers, from the oldest untaken group on, that a batch may take; None: all.
        first: the number of the first group.
        most: the number of groups that may begin; None: no limit.

    >>> schedule = Schedule(groups=2, ahead=0, window=1)
    >>> schedule.begin()
    [0, 1]
    >>> schedule.finish(1)
    >>> schedule.finish(0, kept=False)  # a filter drops it, so another one begins
    >>> schedule.take(), schedule.begin()
    (None, [2])
    >>> schedule.finish(2)
    >>> schedule.take()
    [1, 2]
    """

    def __init__(
        self, *, groups: int, ahead: int = 0, window: int | None = 1, first: int = 0, most: int | None = None
    ) -> None:
        if groups < 1 or ahead < 0 or (window is not None and window < 1):
            raise ValueError(f"groups={groups}, ahead={ahead}, window={window}: expected at least 1, 0 and 1 (or None)")
        self.groups, self.ahead, self.window = groups, ahead, window
        self.first, self.most = first, most
        self.batches = 0
        """Batches that were trained on: the number of updates before the newest weights."""
        self.is_training = False
        """Whether a batch was taken and its update is not done."""
        self.begun = first
        """The number of the group that begins next."""
        self.dropped = 0
        self.waiting: dict[int, bool | None] = {}
        """Groups that began and were not taken, oldest first: whether each is kept, or None if it is not finished."""
        self.finished: list[int] = []
        """The finished ones among them, in the order in which they finished."""
        self.chosen: list[int] = []
        """The groups of the batch that is being filled."""

    @property
    def bound(self) -> int | None:
        """The largest number of updates between a group's first weights and its own update; None: no bound."""
        if self.ahead == 0:
            return 0  # the batch has all groups that began
        if self.window is None:
            return None
        return self.ahead + -(-(self.window - 1) // self.groups)

    def begin(self) -> list[int]:
        """The numbers of the groups that begin now, with the newest weights."""
        count = (self.batches + self.ahead + 1) * self.groups + self.dropped
        end = max(self.begun, self.first + (count if self.most is None else min(count, self.most)))
        numbers = list(range(self.begun, end))
        self.waiting |= dict.fromkeys(numbers)
        self.begun = end
        return numbers

    def finish(self, group: int, *, kept: bool = True) -> None:
        """Record that a group is complete, and whether a filter keeps it; a ValueError if it is not under way."""
        if self.waiting.get(group, False) is not None:
            raise ValueError(f"group {group} is not under way; those are {self.under_way}")
        self.waiting[group] = kept
        self.finished.append(group)

    def take(self) -> list[int] | None:
        """The next batch, in the order in which its groups were taken.

        None during an update, and until enough groups have finished. A dropped group is passed in its turn, like the
        others. So with ``window=1`` the group that replaces it begins with the same weights whatever the timing. Call
        :meth:`begin` after each call, before an update.
        """
        if self.is_training:
            return None
        while len(self.chosen) < self.groups:
            oldest = next(iter(self.waiting), self.begun)
            ready = [g for g in self.finished if self.window is None or g < oldest + self.window]
            if not ready:
                return None
            self.finished.remove(ready[0])
            if self.waiting.pop(ready[0]):
                self.chosen.append(ready[0])
            else:
                self.dropped += 1
        batch, self.chosen, self.is_training = self.chosen, [], True
        return batch

    def updated(self) -> None:
        """Record that the update on the batch that was taken is done."""
        if not self.is_training:
            raise ValueError("no batch was taken since the last update: take one")
        self.batches, self.is_training = self.batches + 1, False

    @property
    def under_way(self) -> list[int]:
        """Groups that began and have not finished."""
        return [group for group, kept in self.waiting.items() if kept is None]

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in ("batches", "is_training", "begun", "dropped")}
        lists = {"finished": list(self.finished), "chosen": list(self.chosen)}
        return {**state, "waiting": [[group, kept] for group, kept in self.waiting.items()], **lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.begun, self.dropped = (state[name] for name in ("batches", "begun", "dropped"))
        self.is_training = state["is_training"]
        self.waiting = dict(state["waiting"])
        self.finished, self.chosen = list(state["finished"]), list(state["chosen"])
