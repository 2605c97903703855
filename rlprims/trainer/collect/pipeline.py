"""When batches are sampled: each before its step, or while the step before it is trained."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from rlprims.data_proto import DataProto
from rlprims.trainer.collect.collector import Collected, Collector


class Pipeline:
    """Provides batches. With ``staleness=1`` the next batch is sampled from the weights before the update.

    If sampler and trainer have separate weights (``overlaps``), it is sampled during the training, otherwise before;
    the batch is the same. Between two steps nothing runs, and the state has at most one batch more.
    """

    def __init__(self, collector: Collector, *, staleness: int, overlaps: bool) -> None:
        self.collector = collector
        self.staleness = staleness
        self._start = ThreadPoolExecutor(1, "sampling").submit if overlaps else _completed
        self._prefetched: Future[Collected] | None = None

    def take(self) -> Collected:
        """The next batch, or the error in its sampling."""
        ahead, self._prefetched = self._prefetched, None
        return self.collector.collect() if ahead is None else ahead.result()

    def prefetch(self) -> None:
        """Begin to sample the batch after the one that was taken, unless ``staleness`` is 0."""
        if self.staleness:
            self._prefetched = self._start(self.collector.collect)

    def wait(self) -> None:
        """Wait until nothing is sampled. :meth:`take` raises an error of the sampling, so that this step can finish."""
        if self._prefetched is not None:
            wait([self._prefetched])

    def close(self) -> None:
        """Does nothing: no batch is begun after the last step."""

    def state_dict(self) -> tuple[dict[str, Any], dict[str, list[DataProto]]]:
        """JSON values, and groups by name; call it between two steps."""
        state, groups = {"collector": self.collector.state_dict()}, {"surplus": self.collector.surplus}
        if self._prefetched is not None and self._prefetched.exception() is None:
            ahead = self._prefetched.result()
            first_surplus = len(groups["surplus"]) - len(ahead.surplus)
            reasons = [reason for _, reason in ahead.dropped]
            state["ahead"] = {"metrics": ahead.metrics, "reasons": reasons, "first_surplus": first_surplus}
            groups |= {"ahead": ahead.groups, "ahead_dropped": [rows for rows, _ in ahead.dropped]}
        return state, groups

    def load_state_dict(self, state: dict[str, Any], groups: dict[str, list[DataProto]]) -> None:
        if "flow" in state:
            raise ValueError(
                "a run of staleness 2 or more cannot be resumed with less: start a new run from its weights"
            )
        surplus, ahead = groups.get("surplus", []), state.get("ahead")
        self.collector.load_state_dict(state["collector"], surplus)
        if ahead is not None:
            dropped = list(zip(groups.get("ahead_dropped", []), ahead["reasons"], strict=True))
            kept = Collected(groups["ahead"], dropped, surplus[ahead["first_surplus"] :], ahead["metrics"])
            self._prefetched = _completed(lambda: kept)


def _completed(collect: Callable[[], Collected]) -> Future[Collected]:
    future: Future[Collected] = Future()
    try:
        future.set_result(collect())
    except Exception as error:
        future.set_exception(error)
    return future
