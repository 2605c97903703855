"""One thread, so that results and times repeat; hypothesis without a clock or a random seed."""

import gc
import logging
import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch
from hypothesis import settings

gc.disable()  # until the tests are collected: three in ten CPU seconds of that
torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.getLogger("torch.__trace").propagate = False  # pytest would format every step of torch.compile
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and no garbage collection needs to walk through it."""
    gc.freeze()
    gc.enable()
