"""The SHA-256 hash of a file."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    """Return the hash in hexadecimal, as ``sha256sum`` prints it. Hashing releases the GIL, so other threads run."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
