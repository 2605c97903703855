"""The files of checkouts in ``examples/peer_functions_of_sources.py``: what runs of them, and what is refused."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.laws import peers
from examples.peer_functions_of_sources import CHECKOUTS, ESTIMATORS, LOSSES, own

FILES = {
    "pack/__init__.py": "raise RuntimeError('the package needs a GPU')\n",
    "pack/losses.py": """
from dataclasses import dataclass
import not_installed_anywhere
from not_installed_anywhere import Float, register
import torch.nn as nn
import math
from .tools import halved as half
from pack import tools
from pack.registry import register_policy_loss

logger = not_installed_anywhere.make()
SCALE: Float = 3

@dataclass
class Inputs:
    x: Float[int, "rows"]
    y: Float = 2

class Loss(nn.Module):
    def forward(self, x: Float) -> Float:
        logger.warning("never printed")
        return SCALE * half(x) + math.floor(1.5)

@register_policy_loss("plain")
def plain(inputs: Inputs, weight: Float = SCALE) -> Float:
    return weight * inputs.x + tools.halved(inputs.y)

@register("other")
def registered(x):
    return x

def missing(x):
    return not_installed_anywhere.scale(x)
""",
    "pack/tools.py": """
from functools import cache
raise RuntimeError("not a definition: it does not run")
@cache
def halved(x: "Number"):
    return x / 2
""",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in FILES.items():
        path = tmp_path / "slime" / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PEER_SOURCES", str(tmp_path))
    return own("slime", "pack.losses", "src")


def test_a_definition_runs_with_those_that_it_reads(module: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert module.Loss()(8) == 3 * 4 + 1
    assert module.plain(module.Inputs(5)) == 3 * 5 + 1
    assert module.plain(module.Inputs(5, 4), weight=10) == 50 + 2
    assert capfd.readouterr().err == ""


def test_other_decorators_stay_and_a_decorator_of_numbers_runs(module: Any) -> None:
    assert module.tools.halved(4) == 2
    assert module.tools.halved.cache_info().currsize == 1
    with pytest.raises(NameError, match="register"):
        _ = module.registered


def test_what_is_not_installed_raises_and_is_not_replaced(module: Any) -> None:
    with pytest.raises(NameError, match="not_installed_anywhere"):
        module.missing(1)
    with pytest.raises(AttributeError, match="has no gone"):
        _ = module.gone


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_a_folder_that_is_not_there_is_named(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PEER_SOURCES", raising=False)
    if folder:
        monkeypatch.setenv("PEER_SOURCES", str(tmp_path / folder))
    with pytest.raises(ValueError, match=r"^PEER_SOURCES: expected a folder with ROLL, a checkout of https://\S+ROLL$"):
        own("ROLL", "roll.utils.functionals")


def test_every_checkout_has_functions_and_a_commit() -> None:
    assert set(CHECKOUTS) == set(LOSSES) | set(ESTIMATORS)
    assert all(len(commit) == 40 for _, commit in CHECKOUTS.values())


def test_the_page_names_the_commit_that_is_here_and_no_trainer_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEER_SOURCES", str(tmp_path))
    (tmp_path / "ROLL").mkdir()
    git = ("git", "-C", str(tmp_path / "slime"), "-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", "init", "-q", str(tmp_path / "slime")], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    said = subprocess.run([*git, "log", "-1", "--format=%H"], capture_output=True, text=True, check=True).stdout.strip()
    versions = {peer.name: peer.version for peer in peers() if peer.name in CHECKOUTS}
    assert versions["slime"] == f"[{said[:7]}](https://github.com/THUDM/slime/tree/{said})"
    assert versions["ROLL"].endswith(f"/{CHECKOUTS['ROLL'][1]})")
    assert not any(versions[name] for name in CHECKOUTS.keys() - {"slime", "ROLL"})
