"""The console of the command line prints a message as it is."""

import pytest

from rlprims.reports.terminal import make_table, open_console, plain_table


def test_brackets_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that is a list, as warnings tell users to write it, and a path."""
    console = open_console()
    console.print("add corrections: [rlprims.corrections.tis]", style="yellow", soft_wrap=True)
    console.print(make_table(("run",), [("runs/[a]",)], title="of [b]"))
    told = capsys.readouterr().out
    assert "add corrections: [rlprims.corrections.tis]" in told
    assert "runs/[a]" in told
    assert "of [b]" in told


def test_a_table_without_rich() -> None:
    rows = [["epochs", "1"], ["eps", "1e-6"]]
    assert plain_table(["setting", "grpo"], rows, title="one") == "one\nsetting  grpo\nepochs   1\neps      1e-6"
