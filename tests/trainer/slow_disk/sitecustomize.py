"""In the ranks of a run: while the file that SLOW_DISK names exists, their disk takes long to flush a file."""

import os
import sys
import time

_fsync = os.fsync


def _slow_fsync(descriptor: int) -> None:
    is_driver = sys.argv[0].endswith("rlprims/__main__.py")
    if not is_driver and os.path.exists(os.environ["SLOW_DISK"]):
        time.sleep(15.0)
    _fsync(descriptor)


if "SLOW_DISK" in os.environ:
    os.fsync = _slow_fsync
