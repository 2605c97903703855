"""Which functions a change touched: those whose code is in no changed file of the base."""

import ast
import subprocess
from pathlib import Path

COMMITS = 10
"""How far back the base lies if the commit itself is on main."""


def default_base(root: Path) -> str:
    """Where the branch left main; on main, the commit ten landings before."""
    for main in ("origin/main", "main"):
        base = _git(root, "merge-base", "HEAD", main, may_fail=True)
        if base and base != _git(root, "rev-parse", "HEAD"):
            return base
    return _git(root, "rev-list", "--first-parent", f"--max-count={COMMITS + 1}", "HEAD").split()[-1]


def changed_functions(root: Path, base: str, under: str) -> dict[Path, set[str]]:
    """The functions and methods of each file below ``under`` that have other code than at ``base``, wherever it stood.

    What only moved, and other docstrings, comments or annotations, are no change. The name of a module's own lines is
    the empty string.
    """
    names = _git(root, "diff", "--name-only", base, "--", f"{under}/**.py", f"{under}/*.py").splitlines()
    sources = [_git(root, "show", f"{base}:{name}", may_fail=True) for name in names]  # a new file has none
    before = {code for source in sources for code in codes(source).values()}
    now = {root / name: codes((root / name).read_text()) for name in names if (root / name).is_file()}
    changed = {path: {name for name, code in of.items() if code not in before} for path, of in now.items()}
    return {path: functions for path, functions in changed.items() if functions}


def codes(source: str) -> dict[str, str]:
    """The code of each function and method, and of the module's own lines, without docstrings and annotations."""
    tree = _Bare().visit(ast.parse(source))
    found: dict[str, str] = {}
    for node in tree.body:
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for inner in node.body if prefix else [node]:
            if isinstance(inner, ast.FunctionDef):
                found[prefix + inner.name] = ast.dump(inner)
    own = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)]
    return found | {"": ast.dump(ast.Module(own, []))} if own else found


class _Bare(ast.NodeTransformer):
    """Drops docstrings and annotations."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _git(root: Path, *args: str, may_fail: bool = False) -> str:
    """What git prints; nothing if it fails."""
    done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=not may_fail)
    return done.stdout.strip()
