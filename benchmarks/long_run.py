"""Does a long run keep its memory? ``python -m benchmarks.long_run local``, and ``... ray`` in ``.venv-ray``.

It needs the model and the data of ``make demo``. The words model is trained with checkpoints, evaluations, records and
TensorBoard (on Ray with two ranks and two vLLM engines), and the processes of the run are watched from outside, in
/proc. Each number is the median over an interval of steps; slopes are fitted to the intervals after step 50.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _machine

RESULTS = Path("docs/benchmarks/long_run.json")
FIRST = 50
"""Steps in which caches and buffers may fill."""
LIMIT = 1.0
"""MB per 100 steps: more is a leak."""
KEEP = 3
COMMON = (
    "prompts_per_step=2",
    "algorithm.mini_batches=1",
    "sampling.max_new_tokens=24",
    "optimizer.lr=1e-5",
    "optimizer.schedule=constant",
    "evaluation.every=100",
    "evaluation.limit=20",
    "evaluation.samples=1",
    "checkpoint.every=25",
    f"checkpoint.keep={KEEP}",
    "log_to=tensorboard",
)
ON_RAY = (
    "execution=ray",
    "ray.training_workers=2",
    "ray.rollout_workers=2",
    "ray.engine=vllm",
    "ray.kv_cache_bytes=4194304",  # an engine writes all of it within the first steps
)
PAGE = """\
# Long runs: memory, open files, threads, seconds and disk

The words model with checkpoints, evaluations, records and TensorBoard; made by `python -m benchmarks.long_run`, do not
edit. `runs/words-40` is made by `python examples/words/warm_up.py --updates 40 --out runs/words-40`. **Slope** is that
of a line through the medians of intervals of steps, after step {first}, in MB per 100 steps. Flat is below {limit:g}.
Other work on the same two cores came and went, which changes seconds by a third.

A run's own cluster sets `RAY_task_events_report_interval_ms=0`. With 1000, which is Ray's default, the GCS grew by 8.5
MB per 100 steps in steps 50 to 100 of the same run (at e22c70a, with `--steps 100`).

The engines' memory rises towards a limit: on a CPU oneDNN keeps a kernel for each new number of tokens, at most 1,024.
With `ONEDNN_PRIMITIVE_CACHE_CAPACITY=16` it rose by 1.0 and 5.8 MB per 100 steps in steps 50 to 220, without by 17 (at
e22c70a, with `--steps 220`).

![Memory, open files and CPU seconds of a step over the steps of both runs](long_run.png)

{runs}
"""


@dataclass(frozen=True)
class Kind:
    title: str
    steps: int
    every: int  # steps of an interval
    settings: tuple[str, ...]


KINDS = {
    "local": Kind("one process", 2000, 20, COMMON),
    "ray": Kind("Ray: two ranks and two vLLM engines", 600, 20, COMMON + ON_RAY),
}


def watch(kind: Kind, steps: int, other: list[str], folder: Path) -> dict[str, Any]:
    """Train, and look at the processes every half second; medians by interval of steps."""
    run, begun = folder / "run", time.time()
    command = [sys.executable, "-m", "rlprims", "train", "examples/words/grpo.yaml", f"run_dir={run}"]
    out = (folder / "output").open("w")
    job = subprocess.Popen([*command, f"steps={steps}", *kind.settings, *other], stdout=out, stderr=out)
    seen: dict[int, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    disk: dict[int, dict[str, float]] = {}
    names: dict[int, str] = {}
    signal.signal(signal.SIGINT, lambda *_: job.terminate())  # the run saves, and what was seen is told
    while job.poll() is None:
        interval = _steps_done(run) // kind.every
        looks = list(_processes(job.pid, names))
        for name, numbers in looks:
            seen[interval][name].append(numbers)
        if interval not in disk:
            disk[interval] = _disk(run, job.pid)
        time.sleep(0.5)
    if job.returncode not in (0, 128 + signal.SIGTERM):
        raise SystemExit((folder / "output").read_text()[-2000:])
    seconds: dict[int, list[float]] = defaultdict(list)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "time/step" in metrics:
            seconds[(metrics["step"] - 1) // kind.every].append(metrics["time/step"])
    steps = _steps_done(run)
    used = range(1, steps // kind.every)  # not the start, and not the end
    lasting = [name for name in names.values() if all(seen[i][name] for i in used)]
    columns = ("memory", "shared", "files", "threads")
    used_cpu = [sum(statistics.median(look[4] for look in seen[i][name]) for name in lasting) for i in used]
    return {
        "steps": steps,
        "interval": kind.every,
        "settings": list(kind.settings),
        "minutes": round((time.time() - begun) / 60, 1),
        "at": [(i + 0.5) * kind.every for i in used],
        "seconds": [round(statistics.median(seconds[i]), 4) for i in used],
        "cpu": [round(float(x), 4) for x in np.gradient(used_cpu) / kind.every],
        "disk": {part: [disk.get(i, {}).get(part) for i in used] for part in _disk(run, os.getpid())},
        "checkpoints": len(list((run / "checkpoints").glob("step_*"))),
        "recorded": len(list((run / "rollouts").glob("step_*"))),
        "short": len(set(names.values()) - set(lasting)),
        "processes": {
            name: {
                column: [round(statistics.median(each[k] for each in seen[i][name]), 2) for i in used]
                for k, column in enumerate(columns)
            }
            for name in lasting
        },
    }


def _steps_done(run: Path) -> int:
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    return text.count('"time/step"')


def _processes(root: int, names: dict[int, str]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Each process of the tree: MB of its own and of shared memory, open files, threads, and its CPU seconds so far."""
    for pid in _tree(root):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            files = len(os.listdir(f"/proc/{pid}/fd"))
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
        fields = dict(re.findall(r"^(RssAnon|RssShmem|Threads):\s+(\d+)", status, re.MULTILINE))
        if len(fields) < 3:
            continue
        if pid not in names or names[pid].startswith("other"):
            base = "driver" if pid == root else _name(command)
            taken = sum(name.rstrip(" 0123456789") == base for other, name in names.items() if other != pid)
            names[pid] = f"{base} {taken}" if taken or base in ("rank", "engine") else base
        memory = int(fields["RssAnon"]) / 1024, int(fields["RssShmem"]) / 1024
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        yield names[pid], (*memory, files, int(fields["Threads"]), seconds)


def _name(command: str) -> str:
    kinds = {
        r"ray::TrainingWorker": "rank",
        r"ray::RolloutWorker": "engine",
        r"gcs_server": "GCS",
        r"raylet/raylet": "raylet",
        r"DashboardAgent|dashboard/agent": "agent of the raylet",
        r"dashboard/dashboard": "dashboard",
        r"RuntimeEnvAgent|runtime_env/agent": "agent of environments",
        r"log_monitor": "log monitor",
        r"monitor\.py": "autoscaler",
    }
    return next((name for pattern, name in kinds.items() if re.search(pattern, command)), "other")


def _tree(root: int) -> list[int]:
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree


def _disk(run: Path, root: int) -> dict[str, float]:
    """MB of the parts of a run's folder, and of the logs of its cluster."""
    parts = {name: run / name for name in ("checkpoints", "rollouts", "tensorboard", "metrics.jsonl")}
    sizes = {name: _size(path) for name, path in parts.items()}
    for pid in _tree(root):
        try:
            match = re.search(r"--session_dir=(\S+)", Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
        if match:
            sizes["Ray's logs"] = _size(Path(match[1]) / "logs")
    return sizes


def _size(path: Path) -> float:
    total = 0
    for file in [path, *path.rglob("*")]:
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # removed meanwhile
    return round(total / 2**20, 3)


def slope(at: list[float], values: list[float], after: float = FIRST) -> float:
    """Per 100 steps, of the line through the intervals after this step."""
    used = [(x, y) for x, y in zip(at, values, strict=True) if x > after]
    return float(np.polyfit(*zip(*used, strict=True), 1)[0]) * 100


def _section(name: str, found: dict[str, Any]) -> str:
    at = found["at"]
    first = next(i for i, x in enumerate(at) if x > FIRST)
    rows = []
    for process, series in found["processes"].items():
        own, late = slope(at, series["memory"]), slope(at, series["memory"], at[-1] / 2)
        shared = slope(at, series["shared"])
        counts = [f"{series[c][first]:.0f} to {series[c][-1]:.0f}" for c in ("files", "threads")]
        rows.append(
            f"| {process} | {series['memory'][first]:.0f} | {series['memory'][-1]:.0f} | {own:+.2f} | {late:+.2f} | "
            f"{shared:+.2f} | "
            f"{' | '.join(counts)} | {'flat' if own < LIMIT else '**grows**'} |"
        )
    seconds, cpu = found["seconds"], found["cpu"]
    usual = statistics.median(cpu[first:])
    disk = [
        f"{part} {next(x for x in sizes[first:] if x is not None):.1f} to {sizes[-1]:.1f}"
        for part, sizes in found["disk"].items()
        if sizes[-1] is not None
    ]
    return "\n".join(
        (
            f"## {KINDS[name].title}: {found['steps']:,} steps\n",
            "| process | MB after step 50 | at the end | slope | of the second half | of shared memory | open files | "
            "threads | |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---|",
            *rows,
            "",
            f"A step took {statistics.median(seconds[first:]):.2f} s, and {usual:.2f} CPU s of all processes, with a "
            f"slope of {slope(at, cpu) / usual:+.1%} per 100 steps. "
            "MB on the disk: "
            f"{', '.join(disk)}. At the end there were {found['checkpoints']} checkpoints (`checkpoint.keep: {KEEP}`) "
            f"and the records of {found['recorded']:,} steps.\n",
            f"{found['made']}\n",
        )
    )


def draw(runs: dict[str, dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, len(runs), figsize=(4.5 * len(runs), 6.5), squeeze=False, layout="constrained")
    for column, (name, found) in zip(axes.T, runs.items(), strict=True):
        at = np.array(found["at"])
        later = at > FIRST
        for i, (process, series) in enumerate(found["processes"].items()):
            memory, color = np.array(series["memory"]), pyplot.get_cmap("tab20")(i)
            column[0].plot(at[later], (memory - memory[later][0])[later], linewidth=1, color=color, label=process)
            column[1].plot(at[later], np.array(series["files"])[later], linewidth=1, color=color)
        column[0].set_title(KINDS[name].title, fontsize=9)
        column[0].legend(fontsize=6, ncols=2, framealpha=0.5)
        column[2].plot(at[later], np.array(found["cpu"])[later], linewidth=1)
        column[2].set_xlabel("step", fontsize=8)
    for row, label in zip(axes, ("MB more than after step 50", "open files", "CPU seconds of a step"), strict=True):
        row[0].set_ylabel(label, fontsize=8)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, -10) if axis in axes[0] else 0, max(high, 15) if axis in axes[0] else high * 1.1)
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def write(runs: dict[str, dict[str, Any]]) -> None:
    runs = {name: runs[name] for name in KINDS if name in runs}
    RESULTS.write_text(json.dumps(runs) + "\n")
    draw(runs, RESULTS.with_suffix(".png"))
    sections = "\n".join(_section(name, found) for name, found in runs.items())
    RESULTS.with_suffix(".md").write_text(PAGE.format(first=FIRST, limit=LIMIT, runs=sections.rstrip("\n")))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.long_run", description="The memory of a long run.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, help="how many; other than the default's are printed alone")
    parser.add_argument("settings", nargs="*", help="further settings, such as model.path=...")
    options = parser.parse_intermixed_args()
    kind = KINDS[options.kind]
    with tempfile.TemporaryDirectory() as folder:
        found = watch(kind, options.steps or kind.steps, options.settings, Path(folder))
    found["made"] = _machine.made(" ".join(("python -m benchmarks.long_run", options.kind, *options.settings)))
    print(_section(options.kind, found))
    if options.steps is None:
        runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        write({**runs, options.kind: found})


if __name__ == "__main__":
    main()
