"""Does ``audit.identify`` name every preset's and dialect's step, how fast, and which bugs does ``audit.check`` find?

``python -m benchmarks.audit``, from the root.

A step is made as in tests/audit/test_identify_presets.py, at two sizes. It is named if the answer computes the step's
numbers to 1e-5.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import _machine
from rlprims import advantage, audit, losses
from rlprims.rewards import at_last_token
from tests.audit.bugs import BUGS, planted
from tests.audit.steps import SETUPS, make
from tests.audit.steps import named as with_names
from tests.audit.test_identify_presets import CASES, check, check_gradient, made

PAGE = Path("docs/benchmarks/audit.md")
SIZES = ((24, 6), (64, 40))
ROWS, WIDTH = 512, 2048
CALLS: tuple[tuple[str, set[str]], ...] = (
    ("identify", {"gradients", "log_probs", "responses", "rollout_log_probs"}),
    ("identify", {"scores", "responses", "rollout_log_probs"}),
    ("report", set()),
)
"""Calls, and the columns that they are not given."""


def named() -> list[str]:
    """Rows of the table: how many steps were named, by what was given."""
    lines, missed = [], []
    for given, run in (("advantages, losses, loss", check), ("gradients", check_gradient)):
        for rows, width in SIZES:
            results = Counter[bool]()
            for name, dialect in CASES:
                try:
                    if run(name, dialect, rows, width) is not False:  # it has what is given
                        results[True] += 1
                except (AssertionError, ValueError) as error:
                    results[False] += 1
                    missed.append(f"\nNot named: {name} {dialect or ''} ({rows}): {str(error).splitlines()[0]}")
            lines.append(f"| {given} | {rows} x {width} | {results[True]} of {results.total()} |")
    return lines + missed


def bugs() -> tuple[list[str], str]:
    """A row for each planted bug, three seeds in each of its setups, and how many were found."""
    results: dict[tuple[str, str], Counter[bool]] = {}
    for each in BUGS:
        found = Counter(each.code in audit.check(planted(each, seed)).codes for seed in range(3))
        results[each.code, each.what] = results.get((each.code, each.what), Counter()) + found
    lines = [f"| {what} | {code} | {n[True]} of {n.total()} |" for (code, what), n in results.items()]
    total = sum(results.values(), Counter[bool]())
    return lines, f"{len(results)} bugs, {total[True]} of {total.total()} steps"


def right(seeds: int = 25) -> str:
    """Findings in right steps."""
    found = Counter[str]()
    for setup, seed in ((setup, seed) for setup in SETUPS for seed in range(seeds)):
        found.update(f"{x.code} ({x.severity})" for x in audit.check(with_names(make(setup, seed)[0], setup)).findings)
    aged = seeds * sum("ages" in setup for setup in SETUPS)
    said = ", ".join(f"{n} x {code}" for code, n in found.items()) or "none"
    return f"In {seeds * len(SETUPS)} right steps of {len(SETUPS)} kinds of runs, {aged} with old weights: {said}."


def large() -> dict[str, torch.Tensor]:
    """A step of 512 responses of up to 2,048 tokens, by DAPO's clip with a KL."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(WIDTH) < torch.randint(200, WIDTH, (ROWS, 1), generator=generator)
    old = -torch.rand(ROWS, WIDTH, generator=generator) - 1
    moved = {
        name: old + by * torch.randn(ROWS, WIDTH, generator=generator)
        for name, by in (("log_probs", 0.1), ("ref", 0.1))
    }
    scores, group_ids = (torch.rand(ROWS, generator=generator) < 0.5).float(), torch.arange(ROWS) // 8
    advantages = advantage.grpo(at_last_token(scores, mask), group_ids, mask, eps=1e-4)
    log_probs = moved["log_probs"].requires_grad_()
    policy = losses.clipped_surrogate(log_probs, old, advantages, mask, clip_high=0.28)
    loss = losses.token_mean(policy + 1e-3 * losses.kl(log_probs, moved["ref"], mask), mask)
    return {
        "response_mask": mask,
        "scores": scores,
        "group_ids": group_ids,
        "advantages": advantages,
        "old_log_probs": old,
        "ref_log_probs": moved["ref"],
        "log_probs": log_probs.detach(),
        "rollout_log_probs": old + 1e-3 * torch.randn(ROWS, WIDTH, generator=generator),
        "responses": torch.randint(1000, (ROWS, WIDTH), generator=generator),
        "gradients": torch.autograd.grad(loss, log_probs)[0],
    }


def timed() -> list[str]:
    """Rows of the table: each call in a process of its own, with the columns in files."""
    batch = large()
    lines = []
    with TemporaryDirectory() as folder:
        for name, x in batch.items():
            numpy.save(f"{folder}/{name}.npy", x.numpy())
        for call, left_out in CALLS:
            columns = batch.keys() - left_out
            arguments = [sys.executable, "-m", "benchmarks.audit", call, folder, *columns]
            result = subprocess.run(arguments, capture_output=True, text=True, check=True)
            size = sum(batch[name].nbytes for name in columns) / 2**20
            lines.append(f"| `{call}`, {len(columns)} columns | {size:.0f} | {result.stdout.strip()} |")
    return lines


def peak() -> float:
    """MiB of this process alone: ``ru_maxrss`` also has those of its parent."""
    return float(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def tensors(run: Callable[[], object]) -> float:
    """MiB of the tensors that a call makes, at their peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with TemporaryDirectory() as folder:
        profiled.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    sizes = [x["args"] for x in sorted(events, key=lambda x: x.get("ts", 0)) if x.get("name") == "[memory]"]
    before = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
    return float(max(x["Total Allocated"] for x in sizes) - before) / 2**20


def measure(call: str, folder: str, *names: str) -> None:
    """Print the seconds, the memory and the answer of one call."""
    batch = {name: torch.from_numpy(numpy.load(f"{folder}/{name}.npy")) for name in names}
    run = getattr(audit, call)
    run({name: x[:16, :64] if x.dim() == 2 else x[:16] for name, x in batch.items()})  # what is imported and cached
    before, began = peak(), process_time()
    found = run(batch)
    seconds, grown = process_time() - began, peak() - before
    said = "; ".join(each.said for each in found.stages.values()) if call == "identify" else str(found).splitlines()[-1]
    print(f"{tensors(lambda: run(batch)):.0f} | {grown:.0f} | {seconds:.1f} | `{said}`")


TEXT = """\
# What `audit.identify` and `audit.check` find, and their time

{cases} steps, of every preset and every dialect, made at two sizes. A step is named if the algorithm of the answer
computes its advantages, its losses per token and its loss, or its gradients, to 1e-5. Losses of several tokens of the
vocabulary have no gradient by `log_probs`.

| given | rows x tokens | right |
|---|---|---|
{named}

Real steps of TRL 1.16 (8 kinds), and 15 results of verl 0.9.1's trainer and actor, are tests of `make test-peers`.

A step of {rows} responses of up to {width:,} tokens, one thread. Tensors are those that the call makes,
and the process is what it grows by, both at their peaks:

| call | batch, MiB | tensors, MiB | process, MiB | CPU s | answer |
|---|---|---|---|---|---|
{timed}

{made}

## Bugs that `audit.check` finds

Each is planted in a right step ([tests/audit/bugs.py](../../tests/audit/bugs.py)), with three seeds in each setup:
{count}. {right} `L3` is true there.

| bug | code | found |
|---|---|---|
{bugs}

{made}
"""


def main() -> None:
    assert all(made(name, dialect) for name, dialect in CASES)
    lines, count = bugs()
    values = {
        "bugs": "\n".join(lines),
        "count": count,
        "right": right(),
        "timed": "\n".join(timed()),
        "named": "\n".join(named()),
        "cases": len(CASES),
        "rows": ROWS,
        "width": WIDTH,
    }
    PAGE.write_text(TEXT.format(**values, made=_machine.made("python -m benchmarks.audit")))
    print(PAGE.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        measure(*sys.argv[1:])
    else:
        main()
