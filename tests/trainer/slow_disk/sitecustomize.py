"""In a run's processes: while the file that SLOW_DISK names exists, the disk takes seconds to flush a file."""

import os
import time

_fsync = os.fsync


def _slow_fsync(descriptor: int) -> None:
    if os.path.exists(os.environ["SLOW_DISK"]):
        time.sleep(4.0)
    _fsync(descriptor)


if "SLOW_DISK" in os.environ:
    os.fsync = _slow_fsync
