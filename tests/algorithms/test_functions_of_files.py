"""A function of an arbitrary file: ``/data/mine.py:reward``."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprims import algorithms
from rlprims.algorithms import BoundFunction, use
from rlprims.rewards.pool import Pool
from rlprims.runs.loggers import check_loggers
from rlprims.trainer.config import Config, load_config

MINE = """
from dataclasses import dataclass

from rlprims import losses

@dataclass
class Part:
    n: int

def reward(response: str, answer: str, *, bonus: float = 0.0) -> float:
    return float(response == answer) + Part(1).n * bonus

def loss(log_probs, old_log_probs, advantages, response_mask, *, clip: float = 0.2):
    return losses.clipped_surrogate(log_probs, old_log_probs, advantages, response_mask, clip_low=clip, clip_high=clip)

class Lines:
    def __init__(self, run, settings): ...
    def log(self, metrics, step): ...
    def close(self): ...
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "json.py").write_text(MINE)  # the name of an installed module, which it does not hide
    return tmp_path / "json.py"


def test_it_is_named_by_its_path_and_read_back(mine: Path) -> None:
    bound = use(f"{mine}:reward", bonus=0.5)
    assert bound.path == f"{mine}:reward"
    assert BoundFunction.model_validate_json(bound.model_dump_json()) == bound
    assert bound.fn("a", "a", bonus=1.0) == 2
    assert json.loads("1") == 1


@pytest.mark.slow
def test_another_process_gets_it(mine: Path) -> None:
    """As a rank does, whose arguments are pickled, and a pool's worker, which has the path."""
    spec = algorithms.grpo().replace(policy_loss=use(f"{mine}:loss", clip=0.1))
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).policy_loss)"
    answer = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(spec), capture_output=True, check=True)
    assert answer.stdout.decode().strip() == f"{mine}:loss(clip=0.1)"
    for verifier in (f"{mine}:reward", use(f"{mine}:reward").fn):
        with Pool(verifier, {"bonus": 0.5}, workers=1) as pool:
            assert pool(["1", "2"], ["1", "1"]).scores.tolist() == [1.5, 0.5]


def minimal(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"run_dir": str(folder / "run"), "model": {"path": "m"}, "algorithm": "grpo"}
    return {**settings, "data": {"train": "x.jsonl"}, **changes}


def test_it_is_found_beside_the_settings(
    mine: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("cwd")
    (other / "json.py").write_text("1 / 0")
    monkeypatch.chdir(other)
    spec = {"preset": "grpo", "policy_loss": {"fn": "json.py:loss", "clip": 0.1}}
    file = tmp_path / "c.yaml"
    file.write_text(
        yaml.safe_dump(minimal(tmp_path, verifier="json.py:reward", log_to="json.py:Lines", algorithm=spec))
    )
    config = load_config(file)
    check_loggers(config)
    assert (config.verifier and config.verifier.path, config.log_to) == (f"{mine}:reward", (f"{mine}:Lines",))
    file.write_text(config.to_yaml())  # as a run records it, for a resume from anywhere
    assert load_config(file) == config


def test_a_config_in_python_is_relative_to_the_process(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(**minimal(tmp_path, verifier="json.py:reward", log_to="json.py:Lines"))
    assert (config.verifier and config.verifier.path, config.log_to) == (f"{mine}:reward", (f"{mine}:Lines",))


def fails(text: str, name: str = "reward") -> Callable[[Path], str]:
    def path(folder: Path) -> str:
        (folder / "bad.py").write_text(text)
        return f"{folder}/bad.py:{name}"

    return path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (lambda folder: f"{folder}/no.py:reward", "no.py:reward: there is no such file on this machine"),
        (lambda folder: "no.py:reward", "no.py:reward: there is no such file on this machine, neither beside"),
        (lambda folder: "s3://bucket/no.py:reward", "there is no such file on this machine"),
        (fails("def rewards(): ..."), "bad.py:reward: the file has no 'reward'; did you mean 'rewards'?"),
        (fails("\nimport os\n1 / 0"), "bad.py, line 3: ZeroDivisionError: division by zero"),
        (fails("def f(:"), "bad.py, line 1: SyntaxError: invalid syntax"),
        (fails("exit(3)"), "bad.py, line 1: SystemExit: 3"),
    ],
)
def test_what_is_wrong_is_one_line(path: Callable[[Path], str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(minimal(tmp_path, verifier=path(tmp_path))))
    with pytest.raises(ValueError, match="verifier: ") as raised:
        load_config(file)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=r"there is no such file|has no|line"):
        Pool(path(tmp_path))
