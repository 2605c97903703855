"""Ctrl-C and signals in every phase of a run: within two seconds, with a word, and a resume repeats the rest.

Ranks and engines, and rewards that do not answer, are in test_cluster_faults.py and tests/rewards/test_interrupts.py.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from rlprims.cli import main
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims

LOCAL = "rlprims.execution.local:LocalExecution"
STORED = "rlprims.execution.hf:StoredTraining"
START = "stopped during the start: there is no run yet"
PHASES = [  # the command, a function that runs in the phase, and what is said: at once, or after the step
    ("train", "rlprims.trainer.session:load_examples", START),
    ("train", f"{LOCAL}.__init__", START),
    ("train", "rlprims.trainer.session:evaluate", "stopped at once: rlprims resume RUN"),
    ("train", f"{LOCAL}.generate", "stopped at once: rlprims resume RUN"),  # of the evaluation
    ("train", "rlprims.trainer.collect:score", "stopped after step 1: rlprims resume RUN"),
    ("train", f"{LOCAL}.update", "stopped after step 1: rlprims resume RUN"),
    ("train", f"{LOCAL}.save", "stopped after step 2: rlprims resume RUN"),
    ("train", "rlprims.trainer.session:draw_curves", "stopped at once: rlprims resume RUN"),
    ("fit", "rlprims.fit.session:_read", START),
    ("fit", f"{STORED}.__init__", START),
    ("fit", f"{STORED}.update_rows", "stopped after step 1: rlprims resume RUN"),
    ("fit", f"{STORED}.save", "stopped after step 2: rlprims resume RUN"),
    ("fit", "rlprims.fit.session:draw_curves", "stopped at once: rlprims resume RUN"),
]


@pytest.fixture
def write(settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path) -> Any:
    rows = [{"prompt": row["question"], "response": row["answer"]} for row in tiny.sums(9)]
    stored = {
        "data": {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows))},
        **{"epochs": 1, "rows_per_step": 3, "evaluation": {"before_training": False}},
        **{name: settings[name] for name in ("run_dir", "model", "optimizer", "checkpoint")},
    }
    settings |= {"steps": 3, "evaluation": {"every": 9, "samples": 1, "limit": 2}}
    return lambda command: write_config(settings if command == "train" else stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "place", "said", "presses"),
    [
        *(pytest.param(*phase, 1, id=f"{phase[0]} {phase[1]}") for phase in PHASES),
        *(
            pytest.param(command, place, "stopped at once: rlprims resume RUN", 2, id=f"{command} {place}, twice")
            for command, place, said in PHASES
            if "after step" in said
        ),
    ],
)
def test_ctrl_c(
    write: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    place: str,
    said: str,
    presses: int,
) -> None:
    config, whole, run = write(command), tmp_path / "whole", tmp_path / "run"
    original, begun = resolve_name(place), list[float]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not begun:
            begun.append(time.process_time())
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        owner, _, name = place.rpartition("." if "." in place.split(":")[1] else ":")
        patch.setattr(resolve_name(owner), name, interrupted)
        assert main([command, str(config)]) == 130
    assert begun
    assert time.process_time() - begun[0] < 2
    assert said.replace("RUN", str(run)) in capsys.readouterr().out
    assert run.exists() == (said != START)
    if run.exists():
        rlprims(command, config, f"run_dir={whole}")
        rlprims("resume", run)
        assert metrics_of(run) == metrics_of(whole)
