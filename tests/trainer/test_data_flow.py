"""docs/data_flow.md: its files and functions exist, and a step calls them in its order; files that a call enters."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import rlprims
from rlprims import advantage, losses
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build

ROOT = Path(rlprims.__file__).parent
PAGE = (ROOT.parent / "docs/data_flow.md").read_text(encoding="utf-8")
ROWS = [
    (file, re.findall(r"`(\w+)`", functions))
    for file, functions in re.findall(r"^\| `rlprims/([\w/]+\.py)` \| (.*?) \|", PAGE, re.MULTILINE)
]
"""The files of the page's walk, each with its functions."""


@contextmanager
def recorded(
    calls: list[tuple[str, str]], *, is_counted: Callable[[FrameType], bool] = lambda _: True
) -> Iterator[None]:
    """Collects (file, function) of each call inside the package that is counted, in the order of the calls."""

    def record(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT) and is_counted(frame):
            calls.append((file.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_the_page_names_each_file_once_and_functions_that_exist() -> None:
    assert len(ROWS) > 10
    named = re.findall(r"[\w/]+\.py\b", PAGE)
    assert sorted(named) == sorted(f"rlprims/{file}" for file, _ in ROWS), (
        "a file has one row, and is named nowhere else"
    )
    assert len(set(named)) == len(named)
    for file, functions in ROWS:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert functions, file
        assert set(functions) <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, file


def test_a_step_calls_what_the_page_names_in_its_order(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config, calls = load(settings), list[tuple[str, str]]()
    parts = build(config, console)
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    with recorded(calls):
        trainer.step()
    assert {(file, name) for file, functions in ROWS for name in functions} <= set(calls)
    remaining = iter(calls)
    for file, functions in ROWS:
        assert any(call == (file, functions[0]) for call in remaining), f"{file} stands too early on the page"


MASK = torch.tensor([[True, True, False], [True, True, True]])
CU_SEQLENS = torch.tensor([0, 2, 5])


def grpo(rewards: Tensor) -> Tensor:
    return advantage.grpo(rewards, torch.tensor([0, 0]), MASK)


def packed_grpo(rewards: Tensor) -> Tensor:
    return advantage.grpo(rewards[MASK], torch.tensor([0, 0]), MASK[MASK], CU_SEQLENS)


def clipped_surrogate(log_probs: Tensor) -> Tensor:
    return losses.clipped_surrogate(log_probs, torch.zeros(2, 3), torch.ones(2, 3), MASK)


def packed_clipped_surrogate(log_probs: Tensor) -> Tensor:
    packed = torch.zeros(5)
    return losses.clipped_surrogate(log_probs[MASK], packed, packed + 1, MASK[MASK], CU_SEQLENS)


def depends_on_the_input(frame: FrameType) -> bool:
    """Whether an argument of the call was computed from the input: then it requires a gradient, as the input does."""
    given = list(frame.f_locals.values())
    given += [x for value in given if isinstance(value, dict) for x in value.values()]
    return any(isinstance(x, Tensor) and x.requires_grad for x in given)


@pytest.mark.parametrize(
    ("call", "files"),
    [
        (grpo, {"advantage/_group.py", "layout.py", "grouping.py", "masking.py"}),
        (packed_grpo, {"advantage/_group.py", "layout.py", "grouping.py", "masking.py"}),
        (clipped_surrogate, {"losses/_clipped.py", "ratios.py", "masking.py"}),
        (packed_clipped_surrogate, {"losses/_clipped.py", "ratios.py", "masking.py"}),
    ],
)
def test_an_input_walks_through_at_most_four_files(call: Callable[[Tensor], Tensor], files: set[str]) -> None:
    """Besides them only one file is entered: it says whether the checks of ids and boundaries may read values."""
    x = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5]], requires_grad=True)
    walked, entered = list[tuple[str, str]](), list[tuple[str, str]]()
    with recorded(walked, is_counted=depends_on_the_input):
        call(x)
    with recorded(entered):
        call(x)
    assert {file for file, _ in walked} == files
    assert len(files) <= 4
    assert {file for file, _ in entered} <= files | {"kernels/__init__.py"}
