"""The maths is formulas in plain torch: what its syntax trees may not contain, outside the kernels."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlprims

ROOT = Path(rlprims.__file__).parent
MODULES = ("layout", "masking", "_sharding", "ratios", "scan", "grouping", "trajectories", "routing")
PACKAGES = ("advantage", "batching", "corrections", "diagnostics", "filters", "logprobs", "losses", "rewards")
FILES = [ROOT / f"{name}.py" for name in MODULES] + [f for p in PACKAGES for f in sorted((ROOT / p).glob("*.py"))]

ON_THE_HOST = {
    "dense_ids": "ids of any labels",
    "_rows_of": "rows by name",
    "majority_at_k": "answers are labels",
    "_win_probability": "counts choices in integers of any size",
    "RoleBaseline": "keeps numbers by name",
    "ValueTracker": "keeps numbers by name",
    "DifficultyPools": "keeps numbers by name",
    "DynamicSampling": "keeps groups by name",
}
"""Functions and classes of labels: they read what they are given, and fill dictionaries and arrays of their own."""
NOT_OF_TENSORS = (
    *("batching/", "rewards/pool", "rewards/scoring", "rewards/several"),
    *("rewards/_calls", "rewards/_columns", "rewards/_outcome", "rewards/_pool_server"),
    *("rewards/_rates", "rewards/_waiting"),
)
"""Files of lengths on the host, of texts and of processes."""
WITH_NUMPY = ("grouping.py",)

READS = {"item", "tolist", "numpy", "from_numpy", "data_ptr", "is_compiling"}


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but for those of definitions that work on the host."""
    for node in ast.iter_child_nodes(tree):
        if getattr(node, "name", None) not in ON_THE_HOST:
            yield node
            yield from nodes(node)


def breach(node: ast.AST) -> str | None:
    """What the rule forbids, if this is it."""
    match node:
        case ast.ClassDef(bases=bases) if any(ast.unparse(base).endswith("autograd.Function") for base in bases):
            return "autograd.Function"
        case ast.keyword(arg="out"):
            return "out="
        case ast.Attribute(attr="type", value=ast.Attribute(attr="device")):
            return "device.type"
        case ast.Attribute(attr=name) if name in READS:
            return name
        case ast.Call(func=ast.Attribute(attr=name)) if name.endswith("_") and not name.endswith("__"):
            return f"{name}()"
        case ast.AugAssign():
            return f"in place: {ast.unparse(node)}"
        case ast.Assign(targets=targets) if any(writes_an_element(target) for target in targets):
            return f"in place: {ast.unparse(node)}"
    return None


def writes_an_element(target: ast.expr) -> bool:
    """An element or a slice; a key that is a string is a dictionary's."""
    match target:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return any(writes_an_element(element) for element in elements)
        case ast.Subscript(slice=ast.Constant(value=str()) | ast.JoinedStr()):
            return False
    return isinstance(target, ast.Subscript)


@pytest.mark.parametrize("file", [f for f in FILES if not name_of(f).startswith(NOT_OF_TENSORS)], ids=name_of)
def test_the_maths_is_plain_torch(file: Path) -> None:
    found = [(node.lineno, what) for node in nodes(ast.parse(file.read_text())) if (what := breach(node))]
    assert not found, (
        f"line and breach: {found}; formulas are plain torch, and what is faster is a kernel in rlprims.kernels"
    )


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_numpy_is_for_labels_and_lengths(file: Path) -> None:
    imports = [ast.unparse(node) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import)]
    assert not any("numpy" in line for line in imports) or name_of(file).startswith((*WITH_NUMPY, *NOT_OF_TENSORS))


def test_the_lists_name_what_is_there() -> None:
    defined = {getattr(node, "name", None) for file in FILES for node in ast.parse(file.read_text()).body}
    assert set(ON_THE_HOST) <= defined
    for prefix in NOT_OF_TENSORS:
        assert any(name_of(file).startswith(prefix) for file in FILES), prefix


@pytest.mark.parametrize(
    "source",
    [
        "class F(torch.autograd.Function): pass",
        "torch.mul(x, y, out=z)",
        "x.mul_(y)",
        "x[0] = 1",
        "x[mask], y = 1, 2",
        "x += y",
        "x[0] *= y",
        "if torch.compiler.is_compiling(): pass",
        "x.device.type == 'cpu'",
        "x.sum().item()",
        "x.detach().numpy()",
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert any(breach(node) for node in nodes(ast.parse(source)))


def test_the_rule_lets_pass() -> None:
    source = "x.requires_grad\ntorch.zeros(2, device=x.device)\ntotals['a'] = x\nfn.token_wise = True\nx = x + y"
    assert not [what for node in nodes(ast.parse(source)) if (what := breach(node))]
