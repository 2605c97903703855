"""Environments of other packages, played by hand and trained on for two steps. Each package is the real one.

``make test-bridges`` installs them; a package that is not there is skipped.
"""

import asyncio
import io
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import of_gym as gym
import of_openenv as openenv
import of_reasoning_gym as reasoning_gym
import of_textarena as textarena
import pytest
import yaml
from rich.console import Console

from rlprims.environments import Completion, Environment, Episode, EpisodeLimits, TextRenderer, rollout
from rlprims.trainer.config import load_config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from tests import tiny

pytestmark = pytest.mark.bridges


class Letters:
    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def played(environment: Environment, *answers: str) -> Episode:
    """An episode of a model that writes these."""

    def sample(prompt_ids: Any, sample_id: int, turn: int) -> Completion:
        ids = [ord(letter) for letter in answers[turn]]
        return Completion(ids, [-0.5] * len(ids))

    return asyncio.run(rollout(environment, sample, TextRenderer(Letters()), EpisodeLimits(turns=len(answers))))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def trained(model: Path, folder: Path, rows: list[dict[str, Any]], environment: Any) -> list[dict[str, Any]]:
    """The metrics of two steps on episodes of at most three turns."""
    settings = {
        "run_dir": str(folder / "run"), "steps": 2, "prompts_per_step": 2,
        "algorithm": {"preset": "grpo", "kl_coef": 0.0, "group_size": 2},
        "model": {"path": str(model)},
        "data": {"train": str(tiny.write_jsonl(folder / "rows.jsonl", rows)), "environment": environment},
        "sampling": {"max_new_tokens": 8}, "episode_limits": {"turns": 3},
    }  # fmt: skip
    shutil.copytree(Path(gym.__file__).parent, folder, dirs_exist_ok=True)  # beside the config
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    config = load_config(folder / "config.yaml")
    parts = build(config, Console(file=io.StringIO()))
    trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
    return [trainer.step().metrics, trainer.step().metrics]


def no_failures(metrics: list[dict[str, Any]]) -> None:
    assert len(metrics) == 2
    for line in metrics:
        assert line["groups_failed"] == 0
        assert not [name for name in line if name.startswith(("failures/", "causes/rlprims", "ended/error"))]
        assert line["generated_tokens"] > 0


def test_a_game_of_gem(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gem")
    name = "game:GuessTheNumber-v0-easy"
    game = gym.Gym(name, 3, package="gem")
    game.reset()
    number = game.environment.game_number
    wrong = number % 10 + 1
    episode = played(gym.Gym(name, 3, package="gem"), rf"\boxed{{{wrong}}}", rf"\boxed{{{number}}}")
    assert (episode.failure, episode.score, len(episode.turns), episode.ended) == (None, 1.0, 2, "stop")
    assert "Guess The Number" in episode.messages[0]["content"]
    assert "lower" in episode.messages[2]["content"] or "higher" in episode.messages[2]["content"]
    rows = [{"name": name, "seed": seed} for seed in range(4)]
    no_failures(trained(model, tmp_path, rows, {"fn": "of_gym.Gym", "package": "gem"}))


def test_a_world_of_gymnasium(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    right = ["down 1", "1", "go right: 2", "2", "1", "2"]  # the way over the ice, of four by four, that is not slippery
    frozen = gym.Gym("tests.bridges.ice:Ice-v0", 0)
    assert played(frozen, *right).score == 1.0
    assert played(gym.Gym("tests.bridges.ice:Ice-v0", 0), "2", "1").score == 0.0  # into the water
    lost = played(gym.Gym("tests.bridges.ice:Ice-v0", 0), "over there")
    assert (lost.score, lost.failure, lost.columns) == (0.0, None, {"no_action": 1.0})
    rows = [{"name": "tests.bridges.ice:Ice-v0", "seed": seed} for seed in range(4)]
    no_failures(trained(model, tmp_path, rows, "of_gym.Gym"))


def test_a_game_of_textarena(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    name = "GuessTheNumber-v0"
    game = textarena.TextArena(name, 3)
    game.reset()
    number = game.game.state.game_state["game_number"]
    wrong = number % 20 + 1
    episode = played(textarena.TextArena(name, 3), f"[{wrong}]", f"[{number}]")
    assert (episode.failure, episode.score, episode.columns) == (None, 1.0, {"invalid_move": 0.0})
    assert "Guess The Number" not in episode.messages[2]["content"]  # what was said is not said again
    twice = played(textarena.TextArena(name, 3), *[f"[{wrong}]"] * 4)
    assert twice.columns == {"invalid_move": 1.0}
    rows = [{"name": name, "seed": seed} for seed in range(4)]
    no_failures(trained(model, tmp_path, rows, "of_textarena.TextArena"))


def test_questions_of_reasoning_gym(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    question = reasoning_gym.ReasoningGym("basic_arithmetic", 3)
    question.reset()
    answer = question.entry["answer"]
    episode = played(reasoning_gym.ReasoningGym("basic_arithmetic", 3), f"It is <answer>{answer}</answer>.")
    assert (episode.failure, episode.score, episode.columns) == (None, 1.0, {"acc": 1.0})
    assert played(reasoning_gym.ReasoningGym("basic_arithmetic", 3), answer).score == 1.0
    assert played(reasoning_gym.ReasoningGym("basic_arithmetic", 3), "no idea").columns == {"acc": 0.0}
    other = reasoning_gym.ReasoningGym("basic_arithmetic", 3, 7)
    other.reset()
    assert other.entry["question"] != question.entry["question"]
    rows = reasoning_gym.rows("basic_arithmetic", 4)
    no_failures(trained(model, tmp_path, rows, "of_reasoning_gym.ReasoningGym"))


@pytest.fixture
def server() -> Iterator[str]:
    """A server of OpenEnv, as its users write one."""
    pytest.importorskip("openenv")
    import socket

    import uvicorn

    from tests.bridges.openenv_server import app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app(), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_a_server_of_openenv(model: Path, tmp_path: Path, server: str) -> None:
    how = {"url": server, "action": "guess", "observation": "hint"}
    episode = played(openenv.OpenEnv(3, **how), "9", "3")
    assert (episode.failure, episode.score, episode.ended) == (None, 1.0, "stop")
    assert [m["content"] for m in episode.messages] == ["a digit", "9", "lower", "3", ""]
    wrong = played(openenv.OpenEnv(3, url=server, action="guess", observation="text"), "9")
    assert "the observation has no 'text', it has" in str(wrong.failure)
    rows = [{"seed": seed} for seed in range(4)]
    no_failures(trained(model, tmp_path, rows, {"fn": "of_openenv.OpenEnv", **how}))
