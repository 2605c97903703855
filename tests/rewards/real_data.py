"""Real answers and real code: excerpts beside the tests, or the whole sets of the folder that RLPRIMS_DATA names."""

import ast
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
_FOLDER = os.environ.get("RLPRIMS_DATA")
WHOLE = pytest.mark.skipif(_FOLDER is None, reason="needs the whole sets: RLPRIMS_DATA names their folder")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")


def folder() -> Path | None:
    return None if _FOLDER is None else Path(_FOLDER)


def gold_solutions() -> list[str]:
    """GSM8K's own solutions."""
    files = [_HERE.parent / "trainer" / "gsm8k_sample.jsonl"]
    if (whole := folder()) is not None:
        files = [whole / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")]
    return [row["answer"] for file in files for row in _lines(file.read_text())]


def model_answers() -> list[tuple[str, str, bool]]:
    """Response, answer, and whether people call it right; four responses to each question, side by side."""
    file = _HERE / "data" / "gsm8k_model_answers.jsonl"
    if (whole := folder()) is not None:
        file = whole / "gsm8k" / "example_model_solutions.jsonl"
    rows = _lines(file.read_text())
    return [(row[m]["solution"], row["ground_truth"], row[m]["is_correct"]) for row in rows for m in MODELS]


def humaneval() -> list[dict[str, Any]]:
    if (whole := folder()) is not None:
        return list(_lines(gzip.decompress((whole / "humaneval" / "HumanEval.jsonl.gz").read_bytes()).decode()))
    return list(_lines((_HERE / "data" / "humaneval.jsonl").read_text()))


def _lines(text: str) -> Iterator[Any]:
    return map(json.loads, text.split("\n")[:-1])


_OTHER: dict[type, type] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutants(problem: dict[str, Any]) -> Iterator[str]:
    """The canonical program with one operator, constant or returned value changed; the returned values first."""
    source = problem["prompt"] + problem["canonical_solution"]
    count = len(list(ast.walk(ast.parse(source))))
    for wanted in (ast.Return, ast.Compare, ast.BinOp, ast.BoolOp, ast.Constant):
        for index in range(count):
            tree = ast.parse(source)
            node = list(ast.walk(tree))[index]
            if isinstance(node, wanted) and _change(node):
                yield ast.unparse(ast.fix_missing_locations(tree))


def _change(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _OTHER:
            node.ops = [_OTHER[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in _OTHER:
            node.op = _OTHER[type(operator)]()
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as value):
            node.value = value + 1
        case ast.Return(value=ast.Compare() | ast.BoolOp() as value):
            node.value = ast.UnaryOp(ast.Not(), value)
        case ast.Return(value=ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult()) as value):
            node.value = ast.Tuple([value], ast.Load())
        case _:
            return False
    return True
