"""When batches are sampled: each before its step, or while the step before it is trained."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rlprims.data_proto import DataProto
from rlprims.trainer.collect.collector import Collected, Collector


class Pipeline:
    """Hands out batches. With ``staleness`` 1 the next one is begun when one was taken, and has the weights of then.

    Where sampler and trainer are apart (``overlaps``) that is done beside the training, else at once: the batch is the
    same. Between two steps nothing is under way: there is one batch more to save, and that is all.
    """

    def __init__(self, collector: Collector, *, staleness: int, overlaps: bool) -> None:
        self.collector = collector
        self.staleness = staleness
        self._start = ThreadPoolExecutor(1, "sampling").submit if overlaps else _at_once
        self._ahead: Future[Collected] | None = None

    def take(self) -> Collected:
        """The next batch, or what ended its sampling."""
        ahead, self._ahead = self._ahead, None
        return self.collector.collect() if ahead is None else ahead.result()

    def begin_next(self) -> None:
        """Begin the batch after the one that was taken, if it may be older than the weights that it will train."""
        if self.staleness:
            self._ahead = self._start(self.collector.collect)

    def wait(self) -> None:
        """Until nothing is sampled any more. An error is kept for :meth:`take`, as the step in between can end well."""
        if self._ahead is not None:
            wait([self._ahead])

    def close(self) -> None:
        """After the last step nothing is being sampled."""

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups by name; call it between two steps."""
        state, held = {"collector": self.collector.state_dict()}, {"surplus": self.collector.surplus}
        if self._ahead is not None and self._ahead.exception() is None:
            ahead = self._ahead.result()
            first_surplus = len(held["surplus"]) - len(ahead.surplus)
            reasons = [reason for _, reason in ahead.dropped]
            state["ahead"] = {"metrics": ahead.metrics, "reasons": reasons, "first_surplus": first_surplus}
            held |= {"ahead": ahead.groups, "ahead_dropped": [rows for rows, _ in ahead.dropped]}
        return state, held

    def load_state_dict(self, state: dict[str, Any], held: dict[str, list[DataProto]]) -> None:
        if "flow" in state:
            raise ValueError(
                "a run of staleness 2 or more cannot be resumed with less: start a new run from its weights"
            )
        surplus, ahead = held.get("surplus", []), state.get("ahead")
        self.collector.load_state_dict(state["collector"], surplus)
        if ahead is not None:
            dropped = list(zip(held.get("ahead_dropped", []), ahead["reasons"], strict=True))
            kept = Collected(held["ahead"], dropped, surplus[ahead["first_surplus"] :], ahead["metrics"])
            self._ahead = _at_once(lambda: kept)


def _at_once(collect: Callable[[], Collected]) -> Future[Collected]:
    future: Future[Collected] = Future()
    try:
        future.set_result(collect())
    except Exception as error:
        future.set_exception(error)
    return future
