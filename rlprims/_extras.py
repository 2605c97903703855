"""What to install where a package is missing. There is no release on an index, so a hint begins in the clone."""


def hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml.

    >>> hint("train")
    "pip install '.[train]' in the clone of rlprims"
    """
    return f"pip install '.[{extra}]' in the clone of rlprims"
