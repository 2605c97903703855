"""Which laws do the functions of other trainers satisfy? ``python -m benchmarks.laws --sources DIR``

A row of the page is a function of examples/peer_functions.py, if its package is installed, or of
examples/peer_functions_of_sources.py, if ``DIR`` has the trainer's checkout. For each function and law the command
prints the first program that shows it; the page has three of them.
"""

import argparse
import contextlib
import importlib.metadata
import io
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import _machine
from examples import peer_functions, peer_functions_of_sources
from rlprims.testing._any_function import verdicts
from rlprims.testing._bindings import Kind

PAGE = Path("docs/benchmarks/laws.md")
MODULES = {"liger": "liger_kernel", "trl": "trl", "verl": "verl"}
SHOWN = {
    ("openrlhf_gspo", "far log ratios are finite"),
    ("skyrl_grpo_advantage", "padding changes nothing"),
    ("verl_vanilla", "masked is absent"),
}
"""The functions and laws whose programs the page has."""

Programs = dict[tuple[str, str], str]


class Peer(NamedTuple):
    """A trainer, the module with its functions, and their names by kind."""

    name: str
    module: str
    version: str
    functions: dict[Kind, list[str]]


def peers() -> list[Peer]:
    """The trainers that are here; a version is empty for one that is not."""
    found = []
    for name, package in MODULES.items():
        both: dict[Kind, dict[str, str]] = {"loss": peer_functions.LOSSES, "advantage": peer_functions.ESTIMATORS}
        functions = {kind: [f"{name}_{x}" for x in names.get(name, "").split()] for kind, names in both.items()}
        version = importlib.metadata.version(package) if find_spec(package) else ""
        found.append(Peer(package, "peer_functions", version, functions))
    for name in peer_functions_of_sources.CHECKOUTS:
        both = {"loss": peer_functions_of_sources.LOSSES, "advantage": peer_functions_of_sources.ESTIMATORS}
        functions = {kind: names.get(name, "").split() for kind, names in both.items()}
        found.append(Peer(name, "peer_functions_of_sources", commit(name), functions))
    return found


def commit(checkout: str) -> str:
    """The commit of a checkout: that of its repository, or the one that the page names if it has no repository."""
    folder = peer_functions_of_sources.sources(checkout)
    if folder is None:
        return ""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    is_repository = (folder / ".git").exists()
    repository, known = peer_functions_of_sources.CHECKOUTS[checkout]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout if is_repository else known
    return f"[{said[:7]}](https://github.com/{repository}/tree/{said.strip()})"


def row(peer: Peer, name: str, kind: Kind, programs: Programs) -> str:
    """The row of a function; its programs are added to the others, and why it breaks a law is printed."""
    module = peer_functions if peer.module == "peer_functions" else peer_functions_of_sources
    found = verdicts(getattr(module, name), f"{peer.module}:{name}", kind, {})
    broken = {law: cause for law, (cause, _) in found.items() if cause}
    programs |= {(name, law): program for law, (_, program) in found.items() if program}
    for law, cause in broken.items():
        print(f"{name}: {law}: {cause.splitlines()[0]}", file=sys.stderr)
    count = f"{len(found) - len(broken)} of {len(found)}"
    return f"| {peer.name} | `{name}` | {count} | {', '.join(broken) or 'none'} |"


def table(kind: Kind, programs: Programs) -> str:
    """The rows of the trainers that are here."""
    return "\n".join(row(p, name, kind, programs) for p in peers() if p.version for name in p.functions[kind])


def shown(program: str) -> str:
    """A program and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(program, {})
        except Exception as error:  # the law is broken so
            print(f"{type(error).__name__}: {error}")
    lines = "".join(f"# {line}\n" for line in said.getvalue().splitlines())
    return f"```python\n{program}{lines}```"


TEXT = """\
# The laws of other trainers' functions

`rlprims check-loss` and `check-advantage` ([your formula under the laws](../audit.md#your-formula-under-the-laws)) on
functions of other trainers. Those that are installed are called by
[peer_functions.py](../../examples/peer_functions.py), the others, from checkouts of their sources, by
[peer_functions_of_sources.py](../../examples/peer_functions_of_sources.py). Their settings are their defaults, on one
rank, without a KL.

A broken law is no bug: the batches are difficult on purpose, a trainer may never make such a batch, and most trainers
promise no such law. It says what to keep away from a function if you take it into another loop.

For the others `DIR` is a folder with checkouts of their repositories, under the names in this table.

| trainer | version or commit |
|---|---|
{versions}

{missing}| trainer | loss | satisfied | broken |
|---|---|---|---|
{losses}

| trainer | estimator | satisfied | broken |
|---|---|---|---|
{estimators}

- *masked is absent*: a NaN outside the mask reaches the value or a gradient, because losses are multiplied by the mask.
- *padding changes nothing*, *batches may be merged*, of estimators: rewards outside the mask are summed, or values
  outside it are read by the token before.
- *nothing valid gives zero*, *empty batches are legal*: a batch without a token, or without a row, gives NaN, raises
  or has no gradient. Where a trainer divides by the tokens of its whole step, only a step without a token matters.
- *far log ratios*, *impossible tokens*: exp of a log-ratio above 88, or of a token of probability 0, is not clamped.
- *gradient is the derivative*: a weight is detached on purpose (CISPO, DPPO, the token ratio of GSPO), or the ratio is
  float32 also for float64 inputs (SkyRL): no error.
- *float32 whatever comes in*: bf16 log-probs are computed in bf16. *float64 stays*: all is float32 on purpose.
- *equal rewards give zero*: rounding errors stay, or are divided by a std of rounding errors.
- *a scale passes or cancels*: a group of one, or of two for a baseline without the own score, is not divided by its
  std, and the others are.
- *a higher score never gets a lower advantage*: MaxRL divides by the mean of a group, so no reward may be negative.
- *nan stays in its group*, of estimators that whiten: they read the whole batch by design.

## Programs

The command of this page prints a program for every function and law of the mask, of padding, of a batch without tokens
and of extreme log-probs; `rlprims check-loss` prints those of one function. Three of them, which run in the folder
`examples`:

{programs}

{made}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="The laws of other trainers' functions.")
    parser.add_argument("--sources", default="", help="the folder with checkouts of trainers that are not installed")
    given = parser.parse_args()
    os.environ["PEER_SOURCES"] = str(Path(given.sources).resolve()) if given.sources else ""
    sys.path.insert(0, "examples")
    torch.set_num_threads(1)
    programs: Programs = {}
    values = {"losses": table("loss", programs), "estimators": table("advantage", programs)}
    parts = {which: shown(program) for which, program in programs.items()}
    absent = ", ".join(p.name for p in peers() if not p.version)
    values["missing"] = f"Not here, and left out: {absent}.\n\n" if absent else ""
    values["versions"] = "\n".join(f"| {p.name} | {p.version} |" for p in peers() if p.version)
    values["programs"] = "\n\n".join(parts[which] for which in sorted(SHOWN & parts.keys()))
    PAGE.write_text(TEXT.format(**values, made=_machine.made("python -m benchmarks.laws --sources DIR")))
    print("\n\n".join([PAGE.read_text(), *parts.values()]))


if __name__ == "__main__":
    main()
