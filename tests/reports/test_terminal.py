"""The console of the command line prints a message as it is."""

import pytest

from rlprims.reports.terminal import make_table, open_console


def test_brackets_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that is a list, as warnings tell users to write it, and a path."""
    console = open_console()
    console.print("add corrections: [rlprims.corrections.tis]", style="yellow", soft_wrap=True)
    console.print(make_table(("run",), [("runs/[a]",)], title="of [b]"))
    told = capsys.readouterr().out
    assert "add corrections: [rlprims.corrections.tis]" in told
    assert "runs/[a]" in told
    assert "of [b]" in told
