"""The hash of a file, by whoever wrote it."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """In hexadecimal, as ``sha256sum`` prints it. Other threads run meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
