"""What the processes of a run are and do, read from the kernel."""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def tree(root: int) -> dict[int, str]:
    """A process and its descendants, each with its command."""
    children: dict[int, list[int]] = {}
    for pid in (int(path.name) for path in PROC.glob("[0-9]*")):
        with suppress(OSError):
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
    found, queue = dict[int, str](), [root]
    while queue:
        pid = queue.pop()
        with suppress(OSError):
            found[pid] = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        queue += children.get(pid, [])
    return found


def alive(pids: Iterable[int]) -> dict[int, str]:
    """Those that still run, by their state; a dead one that nobody has asked after does not."""
    states = {}
    for pid in pids:
        with suppress(OSError):
            states[pid] = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return {pid: state for pid, state in states.items() if state not in "ZX"}


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """(address, process) of every TCP socket that waits for connections; the address as the kernel writes it."""
    sockets = {}
    for kind in ("tcp", "tcp6"):
        for line in (PROC / "net" / kind).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].split(":")[0]
    found = []
    for pid in pids:
        with suppress(OSError):
            for descriptor in (PROC / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(descriptor)
                    found += [(sockets[target], pid)] if target in sockets else []
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same in an IPv6 socket, and ::1."""


def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
