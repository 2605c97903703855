"""The files of this machine as a server, ``slow://``, which notes each file that it moves, and can stop at one."""

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class SlowFiles(LocalFileSystem):  # type: ignore[misc]
    """Writes the names of files into the file ``SLOW_LOG``; stops for ever before one whose name has ``SLOW_STOP``."""

    protocol = "slow"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(LocalFileSystem._strip_protocol(str(path).removeprefix("slow://")))

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        _note(rpath)
        super().get_file(rpath, lpath, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        _note(rpath)
        super().put_file(lpath, rpath, **options)


def _note(path: str) -> None:
    with Path(os.environ["SLOW_LOG"]).open("a") as log:
        log.write(f"{path}\n")
    while (stop := os.environ.get("SLOW_STOP")) and stop in path:
        time.sleep(0.05)


fsspec.register_implementation("slow", SlowFiles, clobber=True)
