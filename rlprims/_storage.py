"""Files and folders at a url, such as ``s3://bucket/model``, and their copies on this machine."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx")


@contextmanager
def reached(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a url, and the path there; errors of its client, of any class, become a ValueError."""
    try:
        fs, path = fsspec.url_to_fs(url)
        fs.invalidate_cache()
        yield fsspec.filesystem("file", auto_mkdir=True) if fs.protocol == ("file", "local") else fs, path.rstrip("/")
    except Exception as error:
        raise ValueError(f"{url}: {next(iter(str(error).splitlines()), type(error).__name__)}") from error


@cache
def local_copy(url: str, *, weights: bool = True) -> str:
    """The path here of a copy of a file, a folder, or files that match; what is no url is returned as it is.

    Each version that the server reports is fetched once, into ``RLPRIMS_CACHE`` or ~/.cache/rlprims. A process keeps to
    the version that it met first. ``weights`` False: a model without them.
    """
    if "://" not in url:
        return url
    with reached(url) as (fs, path):
        wild = None if url.startswith("http") else re.search(r"[*?[]", path)
        found = fs.glob(path) if wild else [path] if fs.isfile(path) else fs.find(path)
        files = sorted(file for file in found if fs.isfile(file) and (weights or not file.endswith(_WEIGHTS)))
        if not files:
            raise FileNotFoundError("no such file or folder")
        base = path.rfind("/", 0, wild and wild.start()) + 1
        version = fsspec.utils.tokenize(url, [(file, fs.ukey(file)) for file in files])
        folder = Path(os.environ.get("RLPRIMS_CACHE") or "~/.cache/rlprims").expanduser().resolve() / version
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the end of the block
            if not folder.exists():
                aside, size = folder.with_suffix(".writing"), sum(fs.size(file) or 0 for file in files)
                shutil.rmtree(aside, ignore_errors=True)
                copies = [(aside / file[base:]).resolve() for file in files]
                if not all(copy.is_relative_to(aside) for copy in copies):
                    raise ValueError("a name in it leaves the folder")
                bar = {"desc": f"{url} ({size / 1e9:.1f} GB)", "unit": " files", "disable": size < 1 << 27}
                fs.get(files, [str(copy) for copy in copies], callback=fsspec.callbacks.TqdmCallback(bar))
                aside.rename(folder)
    return str(folder / path[base:])
