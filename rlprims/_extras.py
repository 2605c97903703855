"""The command to install a missing package. The library is not on a package index, so the command runs in the clone."""


def hint(extra: str) -> str:
    """The command that installs an extra of pyproject.toml.

    >>> hint("train")
    "pip install '.[train]' in the clone of rlprims"
    """
    return f"pip install '.[{extra}]' in the clone of rlprims"
