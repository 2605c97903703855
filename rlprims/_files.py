"""Files: their hash, the wait until they are on the disk, and the details of an error."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile


def sha256(path: Path) -> str:
    """The hash in hexadecimal, as ``sha256sum`` prints it. Hashing releases the GIL, so other threads run."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def details_of(error: BaseException | None) -> Path | None:
    """A new file with the notes of an error and of its causes, such as a worker's traceback; None without notes."""
    notes = list[str]()
    while error is not None:
        notes += getattr(error, "__notes__", [])
        error = error.__cause__
    if notes:
        with suppress(OSError), NamedTemporaryFile("w", prefix="rlprims-", suffix=".txt", delete=False) as file:
            file.write("\n\n".join(notes) + "\n")
            return Path(file.name)
    return None
