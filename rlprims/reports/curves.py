"""The metrics of runs, read from their directories: as a list, a figure or a table."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rlprims._json import finite_number
from rlprims.reports._curve_panels import FAINT, INK, PANELS, colours_of, decorate, draw, has_data, series


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of ``run/metrics.jsonl``; non-finite numbers are None, an incomplete last line is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        wanted = "the directory of a run, with config.yaml, metrics.jsonl and rollouts/"
        found = "one without metrics.jsonl" if Path(run).is_dir() else "no folder"
        raise ValueError(f"{run}: expected {wanted}, got {found}")
    lines = path.read_bytes().rstrip().splitlines()
    rows: list[dict[str, Any]] = []
    for at, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if at == len(lines):
                break
            raise ValueError(f"{path}, line {at}: expected a JSON object ({error}); remove the line") from error
        rows.append(row)
    return rows


def draw_curves(runs: Sequence[Path], out: Path) -> Path:
    """Draw the curves of runs as one figure of small panels, and save it; the suffix of ``out`` is the format.

    In training panels a faint line has every step, a strong one the running mean. Panels without data are left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    runs = [Path(run) for run in runs]
    metrics = [read_metrics(run) for run in runs]
    panels = [panel for panel in PANELS if any(has_data(panel, rows) for rows in metrics)]
    if not panels:
        where = ", ".join(map(str, runs)) or "no runs"
        raise ValueError(f"nothing to draw in {where}: pass a run with at least one finished step")
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.02, hspace=0.03)
    figure = Figure(figsize=(12, 2.55 * down + 0.95), dpi=150, layout=layout, facecolor="white")
    grid = figure.subplots(down, across, squeeze=False).ravel()
    colours = colours_of(len(runs))
    smoothed = False
    for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
        for rows, colour in zip(metrics, colours, strict=True):
            smoothed |= draw(axes, panel, rows, colour, faint=0.3 if len(runs) < 4 else 0.12)
        decorate(axes, panel, lowest=place + across >= len(panels))
    for axes in grid[len(panels) :]:
        axes.remove()
    _name_runs(figure, [label.replace("$", r"\$") for label in _labels(runs)], colours)
    if smoothed:
        note = "Training: each step faint, a running mean strong."
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, color=FAINT)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    return out


def summary_table(runs: Sequence[Path]) -> Table:
    """A table with a row per run: accuracy and length at the first and last evaluation, cost, unscored responses."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "algorithm", "seed"):
        table.add_column(name)
    for name in ("sampled %", "greedy %", "gain", "length", "tokens", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    metrics = [read_metrics(Path(run)) for run in runs]
    causes = [_unscored(rows) for rows in metrics]
    if any(causes):
        table.add_column("unscored")
    for run, rows, unscored in zip(map(Path, runs), metrics, causes, strict=True):
        sampled, greedy = (_values(rows, "eval", key) for key in ("sampled/acc", "greedy/acc"))
        accuracy = sampled or greedy
        length = _values(rows, "eval", "sampled/length") or _values(rows, "train", "length")
        tokens = [_values(rows, kind, "generated_tokens_total") for kind in ("train", "eval")]
        cells = (
            _change(sampled, percent=True),
            _change(greedy[-1:], percent=True),
            f"{100 * (accuracy[-1] - accuracy[0]):+.1f}" if len(accuracy) > 1 else "–",
            _change(length),
            f"{max(map(max, filter(None, tokens))) / 1000:,.0f}k" if any(tokens) else "–",
            _seconds(run, rows),
        )
        last = [unscored or "–"] if any(causes) else []
        table.add_row(*map(Text, (run.resolve().name, *_identity(run), *cells, *last)))
    return table


def _unscored(rows: Sequence[Mapping[str, Any]]) -> str:
    """The number of responses without a score by cause, the most frequent first; empty if all have one."""
    counts: Counter[str] = Counter()
    for row in rows:
        if row.get("kind") == "train":
            counts.update({key.removeprefix("failures/"): n for key, n in row.items() if key.startswith("failures/")})
    return ", ".join(f"{n:.0f} {cause}" for cause, n in counts.most_common() if n)


def _values(rows: Sequence[Mapping[str, Any]], kind: str, key: str) -> list[float]:
    return series(rows, kind, key)[1]


def _name_runs(figure: Any, labels: Sequence[str], colours: Sequence[Any]) -> None:
    from matplotlib.lines import Line2D

    if len(labels) == 1:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
        return
    handles = [Line2D([], [], color=colour, linewidth=3) for colour in colours]
    columns = max(1, min(len(labels), 130 // (max(map(len, labels)) + 8)))
    place = {"loc": "outside upper left", "ncols": columns}
    figure.legend(handles, labels, **place, frameon=False, fontsize=10.5, labelcolor=INK, handlelength=1.4)


def _identity(run: Path) -> tuple[str, str]:
    """The algorithm (or the loss on stored rows) and the seed in the run's config; – for what it does not have."""
    import yaml

    try:
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    config = config if isinstance(config, dict) else {}
    algorithm = config.get("algorithm", config.get("loss"))
    if isinstance(algorithm, dict):
        algorithm = algorithm.get("name", algorithm.get("fn"))
    name = re.split("[.:]", algorithm)[-1] if isinstance(algorithm, str) else algorithm
    return str(name or "–"), str(config.get("seed", "–"))


def _labels(runs: Sequence[Path]) -> list[str]:
    """A label for each run: algorithm and seed, and the directory if several runs have the same."""
    names = []
    for run in runs:
        name, seed = _identity(run)
        name = f"run {run.resolve().name}" if name == "–" else name
        names.append(name if seed == "–" else f"{name}, seed {seed}")
    for places in ([run.resolve().name for run in runs], [str(run) for run in runs]):
        shared = {name for name, count in Counter(names).items() if count > 1}
        names = [f"{name} ({place})" if name in shared else name for name, place in zip(names, places, strict=True)]
    return names


def _change(values: Sequence[float], *, percent: bool = False) -> str:
    ends = [values[0], values[-1]] if len(values) > 1 else values
    return " → ".join(f"{100 * value if percent else value:.1f}" for value in ends) or "–"


def _seconds(run: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Wall time: the larger of the summary's, which after a resume begins there, and the sum of the steps."""
    try:
        summary = json.loads((run / "summary.json").read_bytes())
    except (OSError, ValueError):
        summary = None
    recorded = finite_number(summary.get("seconds")) if isinstance(summary, dict) else None
    seconds = max(recorded or 0.0, sum(_values(rows, "train", "time/step")))
    return f"{seconds:,.0f}" if seconds else "–"
