"""Break the maths one place at a time, and see whether a test fails: ``python tests/mutation [packages or files]``.

No file is written: each mutant lives in a forked process, whose import system hands out the broken source. A mutant
meets the tests of its file and its doctests, then its laws, then the exact enumerations and every golden case. At last
the tests that killed one run again with nothing broken.
"""

import argparse
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("advantage", "losses", "filters", "corrections")
OPTIONS = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
CPU_SECONDS = 120
FAR = (["tests/test_enumeration.py", "tests/test_enumeration_losses.py", "tests/test_golden.py"], "")


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


def public_names(path: Path) -> set[str]:
    """The package's public names that this file defines, or that a file of the package defines that imports it."""
    package = path.parent
    public = set(re.findall(r'^    "(\w+)",$', (package / "__init__.py").read_text(), re.M))
    files, sources = {path}, {p: p.read_text() for p in package.glob("_*.py") if p.name != "__init__.py"}
    while True:
        stems = "|".join(p.stem for p in files)
        more = {
            p for p, s in sources.items() if re.search(rf"^from rlprims\.{package.name}\.({stems}) import", s, re.M)
        }
        if more <= files:
            break
        files |= more
    defined = {name for p in files for name in re.findall(r"^(?:def|class) (\w+)", p.read_text(), re.M)}
    return public & defined


def stages(path: Path) -> list[tuple[list[str], str]]:
    """Test files, and which of their tests: the near ones first."""
    package, names = path.parent.name, public_names(path)
    word = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    own = [p for p in sorted((ROOT / "tests" / package).glob("test_*.py")) if word.search(p.read_text())]
    own.sort(key=lambda p: p.stem != f"test{path.stem}")
    laws = rf"test_(laws|every_public_name_has_a_record)\[{package}\.({'|'.join(sorted(names))})[-\]]"
    return [([str(path), *map(str, own)], ""), (["tests/test_laws.py"], laws), FAR]


def judge(path: Path, source: str, plan: list[tuple[list[str], str]]) -> dict[str, str]:
    """In this process: which test of the plan kills ``source`` in the place of the file."""
    import pytest

    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    sys.meta_path.insert(0, Broken(module, path, source))
    try:
        importlib.import_module(module)
    except Exception as error:
        return {"killer": f"import: {type(error).__name__}"}
    for files, wanted in plan:
        watch = Watch(wanted)
        code = pytest.main([*OPTIONS, *files], plugins=[watch])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return {"killer": watch.failed.replace(f"{ROOT}/", "") or f"pytest: {code!s}"}
    return {"killer": ""}


def forked(path: Path, source: str, plan: list[tuple[list[str], str]], *, modules: bool = False) -> dict:
    """:func:`judge` in a fork, which may hang or die."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))  # of the processor, however busy it is
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=PACKAGES, help="packages, or files in them")
    parser.add_argument("--per-function", type=int, default=6, help="mutants of each function (6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a pattern of the mutants' names, to repeat some")
    parser.add_argument("--out", type=Path, help="keep the results here, and do not repeat those it has")
    options = parser.parse_args()

    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    sys.dont_write_bytecode = True
    import torch

    torch.set_num_threads(1)
    from operators import mutants

    packages = [w for w in options.what if w in PACKAGES]
    paths = [
        p for package in packages for p in sorted((ROOT / "rlprims" / package).glob("_*.py")) if p.name != "__init__.py"
    ]
    paths += [Path(w).resolve() for w in options.what if w not in PACKAGES]
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(1))  # its start, once for all forks
    for name in forked(paths[0], paths[0].read_text(), stages(paths[0])[:2], modules=True)["modules"]:
        with suppress(Exception):  # what every fork would import again
            importlib.import_module(name)
    gc.freeze()  # or each fork would collect what it inherited

    known = {}
    if options.out and options.out.exists():
        known = {(d["name"], d["stage"]): d["killer"] for d in map(json.loads, options.out.read_text().splitlines())}
    alive = [
        m for p in paths for m in mutants(str(p.relative_to(ROOT)), p.read_text(), options.per_function, options.seed)
    ]
    alive = [m for m in alive if re.search(options.only, m.name)]
    killers = set()
    for stage, what in enumerate(("the tests of its file", "its laws", "enumerations and golden cases")):
        left = []
        for mutant in alive:
            killer = known.get((mutant.name, stage))
            if killer is None:
                path = ROOT / mutant.path
                killer = forked(path, mutant.source, [stages(path)[stage]])["killer"]
                if options.out:
                    record = {k: v for k, v in vars(mutant).items() if k != "source"}
                    with options.out.open("a") as lines:
                        lines.write(json.dumps({"name": mutant.name, "stage": stage, "killer": killer} | record) + "\n")
            killers.add(killer)
            left += [] if killer else [mutant]
        say(f"{what}: {len(alive) - len(left)} of {len(alive)} killed")
        alive = left
    for m in alive:
        say(f"{m.name} in {m.function or 'the module'}\n  - {m.before}\n  + {m.after}")
    tests = sorted(k for k in killers if "::" in k and not k.startswith("import"))
    sane = forked(paths[0], paths[0].read_text(), [(tests, "")] if tests else [])
    sys.exit(f"fails with nothing broken, so its kills do not count: {sane['killer']}" if sane["killer"] else 0)


if __name__ == "__main__":
    main()
