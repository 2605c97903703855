"""What to break: cosmic-ray's operators, and three for code that is mostly calls."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import cosmic_ray.ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword, PythonNode
from parso.tree import NodeOrLeaf

SHIFTS_AND_BITS_OF_FLOATS = ("_RShift", "_LShift", "_BitOr", "_BitAnd", "_BitXor")
NEEDS_ARGUMENTS = ("VariableReplacer", "VariableInserter")
ONE_FOR_THE_OTHER = ("_Eq_Is", "_Is_Eq", "_NotEq_IsNot", "_IsNot_NotEq")
"""Python keeps one copy of a small number and of a word, and None equals nothing else."""
MODULES = ("torch", "math", "functional")
"""``torch.minimum`` is no method of anything."""

Position = tuple[int, int]


class DropMethod:
    """``x.detach()`` becomes ``x``, wherever it stands in a chain."""

    @staticmethod
    def _calls(node: NodeOrLeaf) -> list[int]:
        children = getattr(node, "children", [])
        if node.type not in ("atom_expr", "power") or children[0].get_code().strip() in MODULES:
            return []
        return [
            i for i in range(1, len(children) - 1) if children[i].get_code()[0] == "." and _is_call(children[i + 1])
        ]

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        for i in self._calls(node):
            yield node.children[i].start_pos, node.children[i + 1].end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        i = self._calls(node)[index]
        return PythonNode(node.type, node.children[:i] + node.children[i + 2 :])


class FirstArgument:
    """``zero_outside(x, mask)`` becomes ``(x)``."""

    @staticmethod
    def _call(node: NodeOrLeaf) -> int | None:
        children = getattr(node, "children", [])
        if node.type not in ("atom_expr", "power") or node.parent.type in ("raise_stmt", "simple_stmt"):
            return None
        last = len(children) - 1
        if not _is_call(children[last]) or len(children[last].children) != 3:
            return None
        named = all(c.type == "name" or c.get_code()[0] == "." for c in children[:last])
        return last if named and _first(children[last]) is not None else None

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        if self._call(node) is not None:
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        call = node.children[-1]
        open_, _, close = call.children
        return PythonNode("atom", [open_, _first(call), close])


class DropStatement:
    """A call for its effect, such as a check of the arguments, becomes ``None``."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[Position, Position]]:
        if node.type == "atom_expr" and node.parent.type == "simple_stmt" and _is_call(node.children[-1]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        return Keyword("None", node.start_pos, node.get_first_leaf().prefix)


def _is_call(node: NodeOrLeaf) -> bool:
    return node.type == "trailer" and node.get_code().lstrip()[0] == "("


def _first(call: NodeOrLeaf) -> NodeOrLeaf | None:
    """The first positional argument."""
    given = call.children[1]
    first = given.children[0] if given.type == "arglist" else given
    return None if first.type == "argument" else first


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    function: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator}/{self.occurrence}"


def operators() -> dict[str, Any]:
    provider = OperatorProvider()
    of_cosmic_ray = {
        name: provider[name]()
        for name in provider
        if name not in NEEDS_ARGUMENTS
        and not name.endswith(ONE_FOR_THE_OTHER)
        and not (name.startswith("ReplaceBinaryOperator") and _always_a_type_error(name))
    }
    return of_cosmic_ray | {op.__name__: op() for op in (DropMethod, FirstArgument, DropStatement)}


def _always_a_type_error(name: str) -> bool:
    """Among tensors of floats; & and | of masks are exchanged."""
    return name.endswith(SHIFTS_AND_BITS_OF_FLOATS) and not name.endswith(("_BitAnd_BitOr", "_BitOr_BitAnd"))


def mutants(path: str, source: str, per_function: int, seed: int, only: set[str] | None = None) -> list[Mutant]:
    """``per_function`` mutants of each function or method (all, if it has fewer), at as many places as there are.

    ``only`` names the functions, if not all are wanted. The mutants are of each function in turn.
    """
    functions, silent = _spans(source)
    places: dict[str, dict[Position, list[tuple[str, int]]]] = {}
    tree = cosmic_ray.ast.get_ast(source)
    nodes = list(cosmic_ray.ast.ast_nodes(tree))
    known = operators()
    for name, operator in known.items():
        occurrence = -1
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                occurrence += 1
                if any(low <= start < high for low, high in silent):
                    continue
                function = next((f for f, (low, high) in functions.items() if low <= start[0] <= high), "")
                if only is None or function in only:
                    places.setdefault(function, {}).setdefault(start, []).append((name, occurrence))
    found: list[list[Mutant]] = []
    for function, at in sorted(places.items()):
        draw = random.Random(f"{seed} {path} {function}")
        order = list(at.values())
        draw.shuffle(order)
        for choices in order:
            draw.shuffle(choices)
        turns = (choice for turn in zip_longest(*order) for choice in turn if choice is not None)
        own: list[Mutant] = []
        for name, occurrence in turns:
            if len(own) == per_function:
                break
            mutated = mutate_code(source, known[name], occurrence)
            if mutated is None or _same(mutated, source):
                continue
            line, before, after = _difference(source, mutated)
            own.append(Mutant(path, function, name, occurrence, line, before, after, mutated))
        found.append(own)
    return [mutant for turn in zip_longest(*found) for mutant in turn if mutant is not None]


def _spans(source: str) -> tuple[dict[str, tuple[int, int]], list[tuple[Position, Position]]]:
    """First and last line of each function or method; and where no mutant is made: annotations, words of an error, and
    the decorator of docstrings.
    """
    tree = ast.parse(source)
    functions: dict[str, tuple[int, int]] = {}
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for f in inside:
            if isinstance(f, ast.FunctionDef):
                first = min([f.lineno, *(d.lineno for d in f.decorator_list)])
                functions[prefix + f.name] = (first, f.end_lineno)
    silent: list[Any] = []
    for node in ast.walk(tree):
        silent += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        silent += [node] if isinstance(node, ast.Raise) else []
    spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in silent if n is not None]
    of_docstrings = [
        d for f in ast.walk(tree) for d in getattr(f, "decorator_list", ()) if ast.unparse(d) == "described"
    ]
    spans += [((d.lineno, d.col_offset - 1), (d.end_lineno, d.end_col_offset)) for d in of_docstrings]  # from the @ on
    return functions, spans


def _same(mutated: str, source: str) -> bool:
    try:
        return ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return True  # no mutant at all


def _difference(source: str, mutated: str) -> tuple[int, str, str]:
    old, new = source.splitlines(), mutated.splitlines()
    first = next(i for i, (a, b) in enumerate(zip_longest(old, new)) if a != b)
    rest = next(i for i, (a, b) in enumerate(zip_longest(reversed(old), reversed(new))) if a != b)
    end_old, end_new = max(first + 1, len(old) - rest), max(first + 1, len(new) - rest)
    return first + 1, _squeeze(old[first:end_old]), _squeeze(new[first:end_new])


def _squeeze(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)
