"""The books of a run, as it leaves them on disk: every sampled group is trained, dropped with a reason, or waits."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rlprims.reports.curves import read_metrics
from rlprims.trainer.config import Config
from rlprims.trainer.session import start


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_counters_add_up_in_every_step(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, staleness: int
) -> None:
    settings |= {"verifier": "tests.trainer.verifiers.raises_on_some", "max_staleness": staleness, "steps": 5}
    settings["algorithm"] = {"preset": "grpo", "group_size": 3}
    settings["data"].pop("eval")
    config = load(settings, "checkpoint.every=9")
    assert start(config, console) == 0
    waiting, statuses, failed = 0, Counter[int](), 0
    for line in read_metrics(config.run_dir):
        rows = (config.run_dir / "rollouts" / f"step_{line['step']:06d}.jsonl").read_text().splitlines()
        samples = [json.loads(row) for row in rows]
        groups = {sample["group"]: sample["status"] for sample in samples}
        dropped = sum(status not in ("trained", "surplus") for status in groups.values())
        assert waiting + line["groups_sampled"] == 4 + line["groups_dropped"] + line["surplus"]
        assert dropped == line["groups_dropped"]
        assert line["groups_failed"] == dropped, "nothing else drops a group here"
        assert sum(sample["status"] == "trained" for sample in samples) == 4 * 3
        causes = sum(count for name, count in line.items() if name.startswith("failures/"))
        assert causes == sum(sample["failure"] is not None for sample in samples)
        assert all(sample["failure"] for sample in samples if sample["score"] is None)
        waiting, failed = line["surplus"], failed + causes
        statuses.update(sample["sample_id"] for sample in samples if sample["status"] != "surplus")
    assert failed > 0
    assert max(statuses.values()) == 1, "a sample has one status, and only once"
