"""What a terminal shows when something ends: of warnings, of Ctrl-C, and of a process that could not say it itself."""

import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from rlprims import __main__, cli
from rlprims.runs.directory import RunDirectory
from rlprims.runs.run import on_interrupt

ROOT = Path(__file__).parents[2]
_KILLED = """
import os, signal, sys
from rlprims.runs.run import _last_words
with _last_words("rlprims resume a run's"):
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def interrupt(*_: object) -> int:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def formatting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # it is put back
    monkeypatch.setattr(sys, "argv", ["rlprims", "algorithms"])


def test_a_warning_has_no_path_of_a_library() -> None:
    assert __main__.main() == 0
    assert warnings.formatwarning("x fails", UserWarning, "/usr/lib/python/torch.py", 7) == "warning: x fails\n"


def test_ctrl_c_says_a_word_during_imports_and_where_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], console: Console
) -> None:
    monkeypatch.setitem(cli._COMMANDS, "algorithms", interrupt)
    assert (__main__.main(), capsys.readouterr().err) == (130, "stopped\n")

    def told(*_: object) -> int:
        with on_interrupt(console, "stopped at once: rlprims resume RUN"):
            return interrupt()

    monkeypatch.setitem(cli._COMMANDS, "algorithms", told)
    assert (__main__.main(), capsys.readouterr().err) == (130, "")
    importing = types.ModuleType("rlprims.cli")
    importing.__getattr__ = interrupt  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "rlprims.cli", importing)
    assert (__main__.main(), capsys.readouterr().err) == (130, "stopped\n")


@pytest.mark.slow
def test_a_run_that_is_killed_still_says_how_to_continue() -> None:
    said = {}
    for how in ("killed", "ended"):
        command = [sys.executable, "-c", _KILLED, how]
        said[how] = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False).stderr
    assert said["killed"].endswith("; continue it: rlprims resume a run's\n")
    assert said["ended"] == ""


def test_a_run_in_the_folder_of_a_job_would_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "working_dir_files" / "_ray_pkg_1"
    job.mkdir(parents=True)
    monkeypatch.chdir(job)
    with (
        pytest.raises(ValueError, match="run_dir=runs/a is in Ray's copy of the job's folder"),
        RunDirectory.claim(Path("runs/a")),
    ):
        pass
    monkeypatch.chdir(tmp_path)  # without --working-dir
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(ValueError, match="or where the cluster was started"), RunDirectory.claim(Path("runs/a")):
        pass
    with RunDirectory.claim(tmp_path / "runs" / "a"):
        pass
