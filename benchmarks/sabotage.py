"""Does a run survive whatever is done to its processes? ``python -m benchmarks.sabotage``, in ``.venv-ray``.

It needs the model of ``python examples/words/warm_up.py --updates 400 --out runs/words-400``, which is trained on Ray
(two ranks, two engines) and in one process. At random moments a random process (a rank, an engine, the driver) gets
SIGKILL, SIGSTOP or SIGTERM, and a run that ended is resumed. A run that reached its last step must have every line of
the metrics of a run that nobody disturbed, but for seconds and memory. All is drawn by ``--seed``, for ``--minutes``.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import _machine

COMMON = (
    "prompts_per_step=4",
    "sampling.max_new_tokens=56",
    "optimizer.schedule=constant",
    "evaluation.every=8",
    "evaluation.limit=20",
    "evaluation.samples=1",
    "checkpoint.every=2",
)
WHERE = {
    "local": (*COMMON, "steps=30"),
    "ray": (
        *COMMON,
        "steps=16",
        "execution=ray",
        "ray.training_workers=2",
        "ray.rollout_workers=2",
        "ray.heartbeat_timeout=10",
        "ray.call_timeout=20",  # an engine that answers nothing for so long is replaced
    ),
}
NAMES = {"rank": r"^ray::TrainingWorker", "engine": r"^ray::RolloutWorker"}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
LONGEST = 240
"""Seconds after which a run that neither ends nor makes a step hangs."""


class Blow(NamedTuple):
    where: str
    victim: str
    signal: str
    phase: str
    ended: str
    """The exit code, or that the run went on."""
    said: str


def processes(root: int) -> Iterator[tuple[int, str, float]]:
    """The process and its descendants, but for Ray's: their names, and the CPU seconds that they have used."""
    found, queue = {}, [root]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        found[int(pid)] = int(fields[1]), command, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for pid in queue:
        queue += [child for child, (parent, _, _) in found.items() if parent == pid]
        if pid in found:
            of = [name for name, pattern in NAMES.items() if re.search(pattern, found[pid][1])]
            if pid == root or of:
                yield pid, of[0] if of else "driver", found[pid][2]


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"time/step"') if path.exists() else 0


def phase_of(root: int, run: Path) -> str:
    """What the run does: by its files, or by who works in the next tenth of a second."""
    if not re.search(r"resuming|step \d+/", (run.parent / "said").read_text(errors="replace")):
        return "the start"
    if list(run.glob("checkpoints/.writing-*")):
        return "a checkpoint"
    before = {pid: seconds for pid, _, seconds in processes(root)}
    time.sleep(0.1)
    used = [(seconds - before.get(pid, seconds), name) for pid, name, seconds in processes(root)]
    most, name = max(used, default=(0.0, "driver"))
    return {"rank": "ranks work", "engine": "engines work", "driver": "the driver works"}[name] if most else "a pause"


def lines_of(run: Path) -> list[str]:
    """The lines of the metrics without seconds and memory, as text, because NaN is not equal to itself."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}) for line in lines]


def begin(where: str, model: Path, run: Path) -> subprocess.Popen[bytes]:
    train = ["train", "examples/words/grpo.yaml", f"run_dir={run}", f"model.path={model}", *WHERE[where]]
    command = ["resume", str(run)] if (run / "config.yaml").exists() else train
    with (run.parent / "said").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "rlprims", *command], stdout=out, stderr=out, start_new_session=True
        )


def strike(where: str, job: subprocess.Popen[bytes], run: Path, dice: random.Random) -> Blow | None:
    """Wait for a random moment, and hit a random process; None if the run ended before it."""
    first, steps, begun = steps_done(run), dice.choice((None, 0, 1, 2, 4, 6)), time.monotonic()
    late = dice.uniform(0, 25 if steps is None else 2)
    while job.poll() is None and steps is not None and steps_done(run) < first + steps + 1:
        time.sleep(0.02)
        if time.monotonic() - begun > LONGEST:
            break
    end = time.monotonic() + late
    while job.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    by_name: dict[str, list[int]] = {}
    for pid, name, _ in processes(job.pid):
        by_name.setdefault(name, []).append(pid)
    victim = dice.choice(sorted(by_name) or ["driver"])
    which, number = dice.randrange(8), dice.choice(SIGNALS)
    phase = phase_of(job.pid, run)
    if job.poll() is not None or not by_name:
        return None
    pid = by_name[victim][which % len(by_name[victim])]
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return None
    if victim == "driver" and number == signal.SIGSTOP:  # whoever stops it also lets it go on
        time.sleep(5.0)
        os.kill(pid, signal.SIGCONT)
    return Blow(where, victim, number.name, phase, "", "")


def follow(job: subprocess.Popen[bytes], run: Path) -> str:
    """Wait until the run has ended, or makes steps again; returns which."""
    seen, begun = steps_done(run), time.monotonic()
    while job.poll() is None:
        if steps_done(run) >= seen + 2:
            return "went on"
        if time.monotonic() - begun > LONGEST:
            return "HANGS"
        time.sleep(0.1)
    return f"exit code {job.returncode}"


def said(run: Path, since: int) -> str:
    """The last line that the run wrote after the blow, by its end, without folders."""
    time.sleep(2.0)  # a process that waits for the end of the driver says so a moment later
    text = (run.parent / "said").read_bytes()[since:].decode(errors="replace")
    lines = [line for line in text.splitlines() if re.search(r"error|died|answer|replaced|stop|signal|lost", line)]
    line = re.sub(r"\S*/(\w[\w.-]*)", r"\1", lines[0] if lines else "")
    return line if len(line) < 150 else f"{line[:150]} ..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=Path("runs/words-400"))
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("where", nargs="*", default=["ray", "local"])
    options = parser.parse_args()
    WHERE["ray"] += (f"ray.engine={options.engine}", "ray.kv_cache_bytes=4194304")
    dice = random.Random(options.seed)
    blows: list[Blow] = []
    compared = dict.fromkeys(options.where, 0)
    with tempfile.TemporaryDirectory() as name:
        folders = {where: Path(name) / where for where in options.where}
        whole, numbers = {}, dict.fromkeys(options.where, 0)
        for where, folder in folders.items():
            folder.mkdir()
            if begin(where, options.model.resolve(), folder / "whole").wait():
                raise SystemExit((folder / "said").read_text())
            whole[where] = lines_of(folder / "whole")
        turn, end = 0, time.monotonic() + 60 * options.minutes
        unfinished = set[str]()
        while time.monotonic() < end or unfinished:  # at last each run is finished, and nobody disturbs it
            late = time.monotonic() >= end
            where = min(unfinished) if late else options.where[turn % len(options.where)]
            turn += 1
            unfinished.add(where)
            run = folders[where] / f"run-{numbers[where]}"
            job = begin(where, options.model.resolve(), run)
            while job.poll() is None and not late:
                written = (run.parent / "said").stat().st_size
                blow = strike(where, job, run, dice)
                if blow is not None:
                    ended = follow(job, run)
                    blows.append(blow._replace(ended=ended, said=said(run, written)))
                    print(" | ".join(blows[-1]), flush=True)
                    if ended == "HANGS":
                        os.killpg(job.pid, signal.SIGKILL)
            if job.wait() == 0:
                compared[where] += 1
                numbers[where] += 1
                unfinished.discard(where)
                found = lines_of(run)
                if found != whole[where]:
                    pairs = zip(found, whole[where], strict=False)
                    apart = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(found))
                    raise SystemExit(f"{run}: line {apart} of {len(whole[where])} differs\n{found[apart : apart + 1]}")
                print(f"{where}: {len(found)} lines, all as in the run that nobody disturbed", flush=True)
            elif late:
                raise SystemExit((run.parent / "said").read_text())
    print(f"{len(blows)} signals in {options.minutes:g} minutes, seed {options.seed}")
    print(_machine.made("python -m benchmarks.sabotage"))
    print("; ".join(f"{where}: {count} runs equal" for where, count in compared.items()))
    print("| run | process | signal | phase | the run | what it said |\n|---|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(blow)} |" for blow in sorted(blows)))


if __name__ == "__main__":
    main()
