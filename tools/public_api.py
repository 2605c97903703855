"""Writes tests/public_api.txt: every public name and how it is called. ``python -m tools.public_api``, from the root.

A module is public if it has ``__all__`` and no underscore hides it; a top-level module of one file is public without,
and so are its names. The signatures are those of the source: nothing is imported or evaluated, so that they are the
same on every machine, with every version of torch, and without the extras. Inherited methods stand where they are
defined.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
ROOT = TESTS.parent
FILE = TESTS / "public_api.txt"
COMMAND = "python -m tools.public_api"


@dataclass(frozen=True, eq=False)
class Definition:
    """Where a name is defined: its statements, several if overloaded; none if it is a module."""

    module: str
    name: str
    nodes: tuple[ast.stmt, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.name


def table() -> str:
    """The whole text."""
    places: dict[tuple[str, str], list[str]] = {}
    found = [(module, name, _resolve(module, name)) for module in _public_modules() for name in _names(module)]
    for module, _, definition in found:
        places.setdefault(definition.key, []).append(module)
    lines: set[str] = set()
    for module, name, definition in found:
        home = max(places[definition.key], key=len)
        if module != home:
            lines.add(f"{module}.{name} = {home}.{definition.name}")
        elif not definition.nodes:
            lines.add(f"{module}.{name}: module")
        else:
            lines.update(_described(f"{module}.{name}", definition))
    return "\n".join(sorted(lines)) + "\n"


def _public_modules() -> list[str]:
    top = {f"rlprims.{name}" for name in _names("rlprims")}
    modules = []
    for file in sorted((ROOT / "rlprims").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        hidden = any(part.startswith("_") for part in module.split("."))
        if not hidden and (module in top or "\n__all__ = " in file.read_text()):
            modules.append(module)
    return modules


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@dataclass
class Names:
    """What a module's text says of each name."""

    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    starred: list[str] = field(default_factory=list)


@cache
def _read(module: str) -> Names:
    names = Names()
    body: list[ast.stmt] = []
    for statement in ast.parse(_file(module).read_text()).body:
        body += statement.body if isinstance(statement, ast.If) else [statement]  # if TYPE_CHECKING
    for statement in body:
        for name in _defined(statement):
            names.defined.setdefault(name, []).append(statement)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("rlprims"):
            for alias in statement.names:
                if alias.name == "*":
                    names.starred.append(statement.module or "")
                else:
                    names.imported[alias.asname or alias.name] = (statement.module or "", alias.name)
    return names


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case (
            ast.FunctionDef(name=name)
            | ast.AsyncFunctionDef(name=name)
            | ast.ClassDef(name=name)
            | ast.AnnAssign(target=ast.Name(id=name))
        ):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _names(module: str) -> list[str]:
    """``__all__``, or of a module without it what it defines under a public name."""
    defined = _read(module).defined
    if "__all__" not in defined:
        return [name for name in defined if not name.startswith("_")]
    names: list[str] = []
    for element in _elements(module, "__all__"):
        match element:
            case ast.Starred(value=ast.Attribute(value=ast.Name(id=inner), attr="__all__")):
                names += _names(_resolve(module, inner).module)
            case ast.Starred(value=ast.Name(id=inner)):
                names += [ast.literal_eval(name) for name in _elements(module, inner)]
            case _:
                names.append(ast.literal_eval(element))
    return [name for name in names if not name.startswith("__")]


def _elements(module: str, name: str) -> list[ast.expr]:
    match _read(module).defined[name]:
        case [ast.Assign(value=ast.List(elts=elements) | ast.Tuple(elts=elements))]:
            return elements
    raise AssertionError(f"{module}.{name} must be a list or tuple that is written out")


def _resolve(module: str, name: str) -> Definition:
    """Follow imports to the definition."""
    here = _read(module)
    if name in here.defined:
        return Definition(module, name, tuple(here.defined[name]))
    source, original = here.imported.get(name, (module, name))
    if source != module:
        return _resolve(source, original)
    for other in here.starred:
        if name in _names(other):
            return _resolve(other, name)
    if _file(f"{module}.{name}").exists():
        return Definition(f"{module}.{name}", "", ())
    raise AssertionError(f"{module}.{name} is public, and is not found in the source")


def _described(name: str, definition: Definition) -> Iterator[str]:
    for node in definition.nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield name + _signature(node)
            case ast.ClassDef():
                yield f"class {name}" + _bases(node)
                for member in node.body:
                    yield from _member(name, member, definition.module)
            case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
                yield f"{name} = {_text(node.value)}"
            case ast.AnnAssign():
                called = _called(node.annotation, definition.module)
                signature = _signature(called).replace("self, ", "", 1) if called else f": {_text(node.annotation)}"
                yield name + signature
            case ast.Assign(value=ast.Constant() as value):
                yield f"{name} = {_text(value)}"
            case _:
                yield name


def _called(annotation: ast.expr, module: str) -> ast.FunctionDef | None:
    """``__call__`` of a protocol of the same file, which a function made by another one has as its type."""
    protocols = _read(module).defined.get(_text(annotation), [])
    members = [member for protocol in protocols if isinstance(protocol, ast.ClassDef) for member in protocol.body]
    return next((m for m in members if isinstance(m, ast.FunctionDef) and m.name == "__call__"), None)


def _member(owner: str, member: ast.stmt, module: str) -> Iterator[str]:
    for name in _defined(member):
        if name.startswith("_") and name != "__init__":
            continue
        match member:
            case ast.FunctionDef(decorator_list=[ast.Name(id="property"), *_]):
                yield f"{owner}.{name}: {_text(member.returns)}"
            case ast.FunctionDef():
                yield f"{owner}.{name}{_signature(member)}"
            case ast.AnnAssign():
                default = "" if member.value is None else f" = {_text(member.value)}"
                yield f"{owner}.{name}: {_text(member.annotation)}{default}"
            case ast.Assign(value=value):
                yield from _borrowed(f"{owner}.{name}", value, module)


def _borrowed(name: str, value: ast.expr, module: str) -> Iterator[str]:
    """A method that another file defines: ``slice = _rows.slice_rows``."""
    match value:
        case ast.Call(func=ast.Name(id="staticmethod"), args=[inner]):
            yield from _borrowed(name, inner, module)
        case ast.Attribute(value=ast.Name(id=inner), attr=attr):
            yield from _described(name, _resolve(_resolve(module, inner).module, attr))
        case _:
            yield f"{name} = {_text(value)}"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = f" -> {_text(node.returns)}" if node.returns else ""
    return f"({_text(node.args)}){returns}"


def _bases(node: ast.ClassDef) -> str:
    bases = [_text(base) for base in node.bases]
    return f"({', '.join(bases)})" if bases else ""


def _text(node: ast.AST | None) -> str:
    """The source on one line, without what a setting's description says of it."""
    if isinstance(node, ast.Call):
        keywords = [keyword for keyword in node.keywords if keyword.arg != "description"]
        node = ast.Call(func=node.func, args=node.args, keywords=keywords)
    return "" if node is None else " ".join(ast.unparse(node).split())


if __name__ == "__main__":
    FILE.write_text(table())
