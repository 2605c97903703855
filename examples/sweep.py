"""A sweep: a run for each combination of a few values, as processes of this machine.

``python examples/sweep.py run.yaml optimizer.lr=1.0e-6,1.0e-5 seed=0,1 --parallel 2`` starts four runs, two at once,
each in a folder of ``run_dir`` that its values name, with its output beside it in a ``.log``. At the end there are a
table of all runs and one picture. Started again it goes on: what has ended stays. All runs see the same devices.
"""

import argparse
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlprims.fit.config import FitConfig
from rlprims.reports.curves import draw_curves, read_metrics
from rlprims.reports.terminal import make_table, open_console
from rlprims.runs.config import load_as, read_yaml
from rlprims.trainer.config import Config

_POLL = 0.5  # seconds


def choices_of(changes: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each setting.

    >>> choices_of(["optimizer.lr=1.0e-6,1.0e-5", "optimizer.betas=[0.9, 0.99]"])
    {'optimizer.lr': [1e-06, 1e-05], 'optimizer.betas': [[0.9, 0.99]]}
    """
    choices = dict[str, list[Any]]()
    for change in changes:
        key, _, text = change.partition("=")
        try:
            choices[key] = yaml.safe_load(f"[{text}]") or [None]
        except yaml.YAMLError:
            raise ValueError(f"{change!r}: write key=a,b,c; texts with braces or colons need quotes") from None
    return choices


def runs_of(choices: Mapping[str, list[Any]], load: Callable[[list[str]], Any]) -> dict[Path, tuple[list[str], Any]]:
    """The overrides and the settings of each run, by its folder. An error of any is told before the first starts."""
    runs = dict[Path, tuple[list[str], Any]]()
    for values in itertools.product(*choices.values()):
        given = dict(zip(choices, values, strict=True))
        name = ",".join(f"{key}={value}" for key, value in given.items() if len(choices[key]) > 1) or "run"
        overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
        try:
            config = load(overrides)
            run = config.run_dir / re.sub(r"[^\w.=,+-]+", "-", name)
            overrides.append(f"run_dir={json.dumps(str(run))}")
            runs[run] = overrides, load(overrides)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if (config.run_dir / "config.yaml").exists():
            raise ValueError(f"{config.run_dir} is a run: write run_dir=... for the folder of the sweep")
    if len(runs) < math.prod(map(len, choices.values())):
        raise ValueError("two runs would have the same values or the same folder: leave one out")
    return runs


def run_all(command: Sequence[str], runs: Mapping[Path, Sequence[str]], *, parallel: int, console: Any) -> None:
    """Start the command of each run, ``parallel`` at once. If this is interrupted, the runs save and end too."""
    waiting, running, begun = list(runs), dict[Path, subprocess.Popen[bytes]](), time.monotonic()
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with console.status("") as status:
            while waiting or running:
                for run in waiting[: parallel - len(running)]:
                    waiting.remove(run)
                    run.parent.mkdir(parents=True, exist_ok=True)
                    with run.with_name(f"{run.name}.log").open("wb") as log:
                        how: Any = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                        running[run] = subprocess.Popen([sys.executable, "-m", "rlprims", *command, *runs[run]], **how)
                time.sleep(_POLL)
                for run in [run for run, process in running.items() if process.poll() is not None]:
                    del running[run]
                    done, problem = len(runs) - len(waiting) - len(running), problem_of(run)
                    text = f"{done}/{len(runs)} {run.name}: {problem or 'ended'} ({time.monotonic() - begun:.0f} s)"
                    console.print(text, highlight=False, soft_wrap=True)
                steps = [f"{run.name}: step {rows[-1]['step'] if (rows := _rows(run)) else 0}" for run in running]
                status.update(", ".join(steps))
    finally:
        signal.signal(signal.SIGTERM, previous)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def problem_of(run: Path) -> str:
    """The error of a run that has not ended well; empty if it has."""
    log = run.with_name(f"{run.name}.log")
    if (run / "summary.json").exists() or not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else f"see {log}")


def values_of(lines: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[float]:
    return [line[name] for line in lines if line["kind"] == kind and isinstance(line.get(name), int | float)]


def _rows(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run) if (run / "metrics.jsonl").exists() else []


def report(runs: Mapping[Path, Sequence[str]], keys: Sequence[str], console: Any) -> None:
    """Print the table of all runs, and draw their curves."""
    table = []
    for run, overrides in runs.items():
        values, lines = dict(override.split("=", 1) for override in overrides), _rows(run)
        series = {name: values_of(lines, "eval", name) for name in ("sampled/acc", "pairs/accuracy", "nll")}
        name, found = next(((name, found) for name, found in series.items() if found), ("", []))
        best = [(min if name == "nll" else max)(found)] if found else []
        cells = [f"{x[0]:.4g}" if x else "–" for x in (found[-1:], best, values_of(lines, "train", "score")[-1:])]
        seconds = sum(values_of(lines, "train", "time/step"))
        steps = len(values_of(lines, "train", "step"))
        table.append((*(values[key] for key in keys), name, *cells, str(steps), f"{seconds:.0f}", problem_of(run)))
    columns = (*keys, "evaluation", "last", "best", "score", "steps", "seconds", "error")
    console.print(make_table(columns, table))
    if drawn := [run for run in runs if values_of(_rows(run), "train", "step")]:
        console.print(f"plot: {draw_curves(drawn, drawn[0].parent / 'curves.png')}", highlight=False, soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("changes", nargs="+", metavar="key=a,b", help="such as optimizer.lr=1.0e-6,1.0e-5 seed=0,1")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at once (default 1)")
    options, console = parser.parse_args(arguments), open_console()
    try:
        choices = choices_of(options.changes)
        command = "train" if "algorithm" in {*read_yaml(options.config), *choices} else "fit"
        kind: Any = Config if command == "train" else FitConfig
        runs = runs_of(choices, lambda overrides: load_as(kind, options.config, overrides))
    except (ValueError, OSError) as error:
        open_console(stderr=True).print(f"error: {error}")
        return 2
    given = {run: overrides for run, (overrides, _) in runs.items()}
    left = {run: given[run] for run in runs if not (run / "summary.json").exists()}
    start = [command, "--resume-if-exists", str(options.config)]
    run_all(start, left, parallel=max(1, options.parallel), console=console)
    report(given, [key for key, values in choices.items() if len(values) > 1], console)
    return 1 if any(map(problem_of, runs)) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
