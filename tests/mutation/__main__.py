"""Break the maths one place at a time, and see whether a test fails: ``python tests/mutation [packages or files]``.

No file is written: each mutant lives in a forked process, whose import system hands out the broken source. A mutant
meets the tests of its file and its doctests, then its laws, then the exact enumerations and every golden case. At last
the tests that killed one run again with nothing broken.
"""

import argparse
import gc
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from plan import MATHS, ROOT, Plan, files, stages

if TYPE_CHECKING:
    from operators import Mutant

OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
STAGES = ("the tests of its file", "its laws", "enumerations and golden cases")
CPU_SECONDS = (120, 300, 300)
"""Of the processor, however busy it is, for each stage."""
GRACE = 30
"""Seconds that a mutant has to end after the time is up."""


class Broken(importlib.abc.MetaPathFinder):
    """Finds one module, with another source."""

    def __init__(self, module: str, path: Path, source: str) -> None:
        self.module, self.path, self.source = module, path, source

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.module:
            return None
        loader = importlib.machinery.SourceFileLoader(fullname, str(self.path))
        loader.get_code = lambda name: compile(self.source, str(self.path), "exec", dont_inherit=True)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class Watch:
    """Keeps the tests that are wanted, and the first that failed."""

    def __init__(self, wanted: str) -> None:
        self.wanted, self.failed = re.compile(wanted), ""

    def pytest_collection_modifyitems(self, items) -> None:
        items[:] = [item for item in items if self.wanted.search(item.nodeid)]

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report) -> None:
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"


def judge(path: Path, source: str, plan: Plan) -> dict[str, str]:
    """In this process: which test of the plan kills ``source`` in the place of the file."""
    import pytest

    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    sys.meta_path.insert(0, Broken(module, path, source))
    try:
        importlib.import_module(module)
    except Exception as error:
        return {"killer": f"import: {type(error).__name__}"}
    for paths, wanted in plan:
        watch = Watch(wanted)
        code = pytest.main([*OPTIONS, *paths], plugins=[watch])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"killer": watch.failed.replace(f"{ROOT}/", "") or f"pytest: {code!s}"}
    return {"killer": ""}


def forked(path: Path, source: str, plan: Plan, *, cpu_seconds: int, seconds: float = 0, modules: bool = False) -> dict:
    """:func:`judge` in a fork, which may hang or die; ``seconds`` of the clock, if not 0, end it too."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            try:
                answer = judge(path, source, plan)
            except BaseException as error:
                answer = {"killer": f"{type(error).__name__}"}
        if modules:
            answer["modules"] = [name for name, m in list(sys.modules.items()) if not _ours(m)]
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else {"killer": "time"}


def _ours(module: object) -> bool:
    """Of the project, so not to be imported before a mutant is."""
    file = getattr(module, "__file__", None) or ""
    return file.startswith(str(ROOT)) and "site-packages" not in file


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Verdicts:
    """Which test kills a mutant at a stage, and in ``out`` what is known already of the same code and tests."""

    def __init__(self, out: Path | None, seconds: float | None) -> None:
        self.out, self.end = out, None if seconds is None else time.monotonic() + seconds
        lines = out.read_text().splitlines() if out and out.exists() else []
        self.known = {(d["name"], d["stage"], d["of"]): d["killer"] for d in map(json.loads, lines)}

    @property
    def is_over(self) -> bool:
        return self.end is not None and time.monotonic() > self.end

    def killer(self, mutant: "Mutant", stage: int) -> str | None:
        """The test; nothing if the mutant survives; None if there was no time to find out."""
        path = ROOT / mutant.path
        key = mutant.name, stage, _digest(path, mutant.function, stage)
        if key in self.known:
            return self.known[key]
        if self.is_over:
            return None
        seconds = 0 if self.end is None else self.end - time.monotonic() + GRACE
        plan = [stages(path, mutant.function)[stage]]
        killer = forked(path, mutant.source, plan, cpu_seconds=CPU_SECONDS[stage], seconds=seconds)["killer"]
        if killer == "time" and self.is_over:
            return None
        if self.out:
            verdict = {"name": mutant.name, "stage": stage, "of": key[2], "killer": killer}
            about = {k: v for k, v in vars(mutant).items() if k != "source"}
            with self.out.open("a") as lines:
                lines.write(json.dumps(verdict | about) + "\n")
        return killer


@cache
def _digest(path: Path, function: str, stage: int) -> str:
    """Of the code and of the files of tests."""
    texts = [(ROOT / name).read_bytes() for name in (path, *stages(path, function)[stage][0])]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=MATHS, help="packages, modules, or files in them")
    parser.add_argument("--per-function", type=int, default=6, help="mutants of each function (6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a pattern of the mutants' names, to repeat some")
    parser.add_argument("--out", type=Path, help="keep the results here, and do not repeat those it has")
    parser.add_argument(
        "--changed", nargs="?", const="", metavar="BASE", help="only functions changed since this commit"
    )
    parser.add_argument("--seconds", type=float, help="judge no further mutant after these")
    parser.add_argument("--allowed", type=float, default=1.0, help="the share that may survive, beyond three (1)")
    return parser.parse_args(arguments)


def draw(options: argparse.Namespace) -> list["Mutant"]:
    from changed import changed_functions, default_base
    from operators import mutants

    only: dict[Path, set[str] | None] = {path: None for what in options.what for path in files(what)}
    if options.changed is not None:
        base = options.changed or default_base(ROOT)
        changed = changed_functions(ROOT, base, "rlprims")
        only = {path: changed[path] for path in only if path in changed}
        say(f"{sum(map(len, only.values()))} functions of the maths in {len(only)} files differ from {base[:12]}")
    found = [
        mutants(str(path.relative_to(ROOT)), path.read_text(), options.per_function, options.seed, functions)
        for path, functions in only.items()
    ]
    in_turn = chain.from_iterable(zip_longest(*found) if options.seconds else found)
    return [m for m in in_turn if m is not None and re.search(options.only, m.name)]


def prepare() -> None:
    """Import what every fork would import again."""
    import torch

    torch.set_num_threads(1)
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1))  # its start, once for all forks
    path = files("advantage")[0]
    plan = stages(path)[:2]
    for name in forked(path, path.read_text(), plan, cpu_seconds=CPU_SECONDS[1], modules=True)["modules"]:
        with suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # or each fork would collect what it inherited


def fail_without_a_mutant(tests: Iterable[str]) -> str:
    """The first of the tests that fails with nothing broken."""
    path = files("advantage")[0]
    tests = sorted(k for k in tests if "::" in k and not k.startswith("import"))
    plan = [(tests, "")] if tests else []
    return forked(path, path.read_text(), plan, cpu_seconds=CPU_SECONDS[1])["killer"]


def main() -> None:
    options = options_of()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    sys.dont_write_bytecode = True
    verdicts = Verdicts(options.out, options.seconds)
    drawn = draw(options)
    if drawn:
        prepare()
    met, killed, killers = Counter[int](), Counter[int](), set[str]()
    alive, left = [], 0
    for m in drawn:
        for stage in range(len(STAGES)):
            killer = verdicts.killer(m, stage)
            if killer is None:
                left += 1
                break
            met[stage] += 1
            if killer:
                killed[stage] += 1
                killers.add(killer)
                break
        else:
            alive.append(m)
            say(f"{m.name} in {m.function or 'the module'}\n  - {m.before}\n  + {m.after}")
    for stage, what in enumerate(STAGES):
        say(f"{what}: {killed[stage]} of {met[stage]} killed")
    judged = len(drawn) - left
    say(f"{len(alive)} of {judged} survive; {left} were not judged in time")
    insane = fail_without_a_mutant(killers) if killers else ""
    if insane:
        sys.exit(f"fails with nothing broken, so its kills do not count: {insane}")
    if len(alive) > max(3, options.allowed * judged):
        sys.exit(f"more than {options.allowed:.0%} survive: a test is missing, or say in docs/mutation.md why not")


if __name__ == "__main__":
    main()
