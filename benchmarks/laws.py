"""Which laws do the functions of other trainers satisfy? ``python -m benchmarks.laws``, where these are installed.

A row of the page is a function of examples/peer_functions.py; for each package and law the first program that shows it.
"""

import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks import _machine
from examples import peer_functions
from rlprims.testing._any_function import verdicts
from rlprims.testing._bindings import Kind

PAGE = Path("docs/benchmarks/laws.md")
MODULES = {"liger": "liger_kernel", "trl": "trl", "verl": "verl"}
Programs = dict[tuple[str, str], str]


def row(package: str, name: str, kind: Kind, programs: Programs) -> str:
    """The row of a function; its programs are added to those that are known."""
    path = f"peer_functions:{package}_{name}"
    found = verdicts(getattr(peer_functions, f"{package}_{name}"), path, kind, {})
    broken = {law: cause for law, (cause, _) in found.items() if cause}
    for law, (_, program) in found.items():
        if program:
            programs.setdefault((package, law), program)
    return f"| `{package}_{name}` | {len(found) - len(broken)} of {len(found)} | {', '.join(broken) or 'none'} |"


def table(kind: Kind, names: dict[str, str], programs: Programs) -> str:
    """The rows of the packages that are installed."""
    functions = [(package, name) for package in names if find_spec(MODULES[package]) for name in names[package].split()]
    return "\n".join(row(package, name, kind, programs) for package, name in functions)


def shown(program: str) -> str:
    """A program and what it prints."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd="examples", check=False)
    said = done.stdout + "".join(done.stderr.splitlines(keepends=True)[-1:] if done.returncode else "")
    lines = "".join(f"# {line}\n" for line in said.splitlines())
    return f"```python\n{program}{lines}```"


TEXT = """\
# The laws of other trainers' functions

`rlprims check-loss` and `check-advantage` ([your formula under the laws](../audit.md#your-formula-under-the-laws)) on
functions of {versions}, by [examples/peer_functions.py](../../examples/peer_functions.py).
The batches are difficult on purpose; a trainer may never make such a batch, and then the law does not matter to it. The
programs run in the folder `examples`.

| loss | satisfied | broken |
|---|---|---|
{losses}

| estimator | satisfied | broken |
|---|---|---|
{estimators}

- *masked is absent*: a NaN outside the mask reaches the value or a gradient, because losses are multiplied by the mask.
- *padding changes nothing*, *batches may be merged*, of estimators: rewards outside the mask are summed.
- *nothing valid gives zero*, *empty batches are legal*: a micro-batch without a token gives NaN.
- *far log ratios*, *impossible tokens*: exp of a log-ratio above 88, or of a token of probability 0, is not clamped.
- *gradient is the derivative*: a weight is detached on purpose (CISPO, DPPO, the token ratio of GSPO): no error.
- *float32 whatever comes in*: bf16 log-probs are computed in bf16.
- *equal rewards give zero*: rounding errors stay, or are divided by a std of rounding errors.
- *a scale passes or cancels*: a group of one keeps its score, and the others are divided by their std.
- *nan stays in its group*, of estimators that whiten: they read the whole batch by design.

{programs}

{made}
"""


def main() -> None:
    torch.set_num_threads(1)
    programs: Programs = {}
    values = {
        "losses": table("loss", peer_functions.LOSSES, programs),
        "estimators": table("advantage", peer_functions.ESTIMATORS, programs),
    }
    parts = [f"## {package}: {law}\n\n{shown(program)}" for (package, law), program in sorted(programs.items())]
    installed = [name for name in MODULES.values() if find_spec(name)]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in installed)
    made = _machine.made("python -m benchmarks.laws")
    PAGE.write_text(TEXT.format(**values, programs="\n\n".join(parts), versions=versions, made=made))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
