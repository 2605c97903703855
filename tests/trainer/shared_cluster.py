"""Commands on the cluster that all tests share which need none of their own; its start takes four seconds of a core."""

from pathlib import Path

from tests.trainer import runs


def rlprims(*arguments: str | Path) -> None:
    from rlprims.execution.ray._cluster import connect

    connect(None, cpus=64)  # logical ones, as tests/execution does: whoever comes first starts it
    runs.rlprims(*arguments)
