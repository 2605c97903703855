"""The examples of docs/data_proto.md."""

import doctest
from pathlib import Path


def test_examples():
    path = Path(__file__).parents[2] / "docs" / "data_proto.md"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=options)
    assert tried >= 10
    assert failed == 0
