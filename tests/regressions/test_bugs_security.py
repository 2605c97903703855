"""What must never be in the source: code from data, in any spelling that a reader would find."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlprims

ROOT = Path(rlprims.__file__).parent
SOURCES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
BANNED = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "dill.loads",
    "cloudpickle.loads",
    "joblib.load",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "shelve.open",
    "marshal.loads",
    "sympy.sympify",
    "sympy.parse_expr",
}
INSIDE_THE_WALLS = {f"rewards/sandbox/{name}.py" for name in ("_cases", "_functions", "_program", "_tests")}
"""Programs of the sandbox's own processes, which run what they are given: that is what the walls are for."""
BANNED_OPTIONS = {"shell", "trust_remote_code", "allow_pickle"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if (called := ast.unparse(node.func)) in BANNED:
            yield f"line {node.lineno}: {called}"
        for option in node.keywords:
            allowed = isinstance(option.value, ast.Constant) and option.value.value is False
            if option.arg in BANNED_OPTIONS and not allowed:
                yield f"line {node.lineno}: {option.arg}={ast.unparse(option.value)}"


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - INSIDE_THE_WALLS))
def test_x1_x2_x6_x7_no_data_becomes_code(name: str) -> None:
    """slime 46c2d0938, verl#4133: expressions; CVE-2026-31253: torch.load; NeMo-RL 739fc6485: remote code."""
    assert [*offences(SOURCES[name].read_text(encoding="utf-8"))] == []


def test_x2_the_trainer_imports_nothing_of_what_runs_inside() -> None:
    assert SOURCES.keys() >= INSIDE_THE_WALLS
    inside = {Path(name).stem for name in INSIDE_THE_WALLS}
    for name in SOURCES.keys() - INSIDE_THE_WALLS:
        tree = ast.walk(ast.parse(SOURCES[name].read_text(encoding="utf-8")))
        modules = {node.module or "" for node in tree if isinstance(node, ast.ImportFrom)}
        assert not [module for module in modules if "sandbox" in module and module.rsplit(".", 1)[-1] in inside]


@pytest.mark.parametrize("line", ["eval(text)", "pickle.loads(x)", "f(trust_remote_code=True)", "run(x, shell=flag)"])
def test_an_offence_is_found(line: str) -> None:
    assert [*offences(line)]
    assert not [*offences("model.eval(); np.load(x, allow_pickle=False)")]
