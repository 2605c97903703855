"""Which groups are sampled and trained on, and when: a state machine of numbers, without a clock.

Groups are numbered as they begin. A batch takes P of them. Two numbers are the whole policy:

- ``ahead``, S: a group may begin while at most S batches wait before its own: begun − dropped ≤ (batches + S + 1) · P.
  That is pacing. Nothing is thrown away for its age, so the lengths that are trained on are the lengths that were
  sampled; discarding late groups would keep the short ones.
- ``window``, W: a batch takes finished groups of the W numbers from the oldest untaken one on. 1: in order, and the
  batches do not depend on who finishes first. None: whoever is ready first. Between them: a slow group is overtaken by
  W − 1 others at most.

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
        ahead: S, batches that may wait beside the one that is filled.
        window: W, how many numbers, from the oldest untaken group on, a batch may choose from; None: all.

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

    def __init__(self, *, groups: int, ahead: int = 0, window: int | None = 1) -> None:
        if groups < 1 or ahead < 0 or (window is not None and window < 1):
            raise ValueError(
                f"groups={groups}, ahead={ahead} and window={window}, expected at least 1, 0 and 1 (or None: any order)"
            )
        self.groups, self.ahead, self.window = groups, ahead, window
        self.batches = 0
        """That were trained on: the number of updates before the newest weights."""
        self.is_training = False
        """Whether a batch was taken, and its update is not done."""
        self.begun = 0
        self.dropped = 0
        self.waiting: dict[int, bool | None] = {}
        """Groups that began and were not chosen, oldest first: kept or dropped; None: not finished. ``finish`` order is
        in ``finished``."""
        self.finished: list[int] = []
        self.chosen: list[int] = []
        """Of the batch that is filled."""

    @property
    def bound(self) -> int | None:
        """Largest number of updates between the weights that a group began with and its own; None: there is none."""
        if self.ahead == 0:
            return 0  # a batch is all that began
        if self.window is None:
            return None
        return self.ahead + -(-(self.window - 1) // self.groups)

    def begin(self) -> list[int]:
        """The numbers of the groups that begin now, with the newest weights."""
        end = max(self.begun, (self.batches + self.ahead + 1) * self.groups + self.dropped)
        numbers = list(range(self.begun, end))
        self.waiting |= dict.fromkeys(numbers)
        self.begun = end
        return numbers

    def finish(self, group: int, *, kept: bool = True) -> None:
        """A group is complete: it is to be trained on, or a filter drops it.

        Raises:
            ValueError: it did not begin, or has finished before.
        """
        if self.waiting.get(group, False) is not None:
            raise ValueError(f"group {group} is not under way; those are {self.under_way}")
        self.waiting[group] = kept
        self.finished.append(group)

    def take(self) -> list[int] | None:
        """The next batch in the order in which it was chosen; None until enough have finished, and during an update.

        A group that was dropped is looked at when it is its turn, like the others: so in order, what begins in its
        place begins with the same weights whatever the timing. Call :meth:`begin` after each call, before an update.
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
        """The weights are those after the batch that was taken."""
        if not self.is_training:
            raise ValueError("no batch was taken since the last update: take one")
        self.batches, self.is_training = self.batches + 1, False

    @property
    def under_way(self) -> list[int]:
        """Groups that began and have not finished."""
        return [group for group, kept in self.waiting.items() if kept is None]

    def state_dict(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "is_training": self.is_training,
            "begun": self.begun,
            "dropped": self.dropped,
            "waiting": [[group, kept] for group, kept in self.waiting.items()],
            "finished": list(self.finished),
            "chosen": list(self.chosen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.begun, self.dropped = (state[name] for name in ("batches", "begun", "dropped"))
        self.is_training = state["is_training"]
        self.waiting = dict(state["waiting"])
        self.finished, self.chosen = list(state["finished"]), list(state["chosen"])
