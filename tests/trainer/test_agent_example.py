"""The example of docs/agents.md: its base model, its environment and its config, from the root as the page says."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlprims.environments import Completion, EpisodeLimits, TextRenderer, rollout

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_plays_trains_and_is_drawn(tmp_path: Path) -> None:
    places = ["--out", str(tmp_path / "base"), "--data", str(tmp_path / "data")]
    script = ROOT / "examples" / "agent" / "warm_up.py"
    subprocess.run([sys.executable, str(script), *places, "--updates", "30"], cwd=tmp_path, check=True)
    config = ["train", "examples/agent/grpo.yaml", f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'base'}"]
    data = [f"data.{split}={tmp_path / 'data' / split}.jsonl" for split in ("train", "eval")]
    small = ["steps=2", "evaluation.limit=10", "evaluation.samples=1"]
    subprocess.run([sys.executable, "-m", "rlprims", *config, *data, *small], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["eval", "train", "train", "eval"]
    assert all(line["groups_failed"] == 0 and line["turns"] >= 1 for line in lines if line["kind"] == "train")
    assert (tmp_path / "run" / "curves.png").exists()
    recorded = [
        json.loads(line) for path in tmp_path.glob("run/rollouts/*.jsonl") for line in path.read_text().splitlines()
    ]
    assert len(recorded) == 2 * 8 * 6
    questions = [json.loads(line) for line in (tmp_path / "data" / "train.jsonl").read_text().splitlines()]
    reconstruct(recorded, questions, AutoTokenizer.from_pretrained(tmp_path / "base"))


def reconstruct(recorded: list[dict[str, Any]], questions: list[dict[str, Any]], tokenizer: Any) -> None:
    """Of every recorded episode: a model that writes its tokens reads its tokens, and earns its rewards.

    So what is trained on is what the sampler read and drew, turn by turn, and what the environment said between.
    """
    sys.path.insert(0, str(ROOT / "examples" / "agent"))
    stories = importlib.import_module("calculator").Stories
    of = {tuple(tokenizer.encode(row["question"])): row for row in questions}
    for line in recorded:
        prompt, ids = line["prompt_ids"], line["response_ids"]
        turns: dict[int, list[int]] = {}
        for place, (turn, was_read) in enumerate(zip(line["turn_ids"], line["observation"], strict=True)):
            if not was_read:
                turns.setdefault(turn, []).append(place)

        def sample(prompt_ids: Any, sample_id: int, turn: int, turns: Any = turns, line: Any = line) -> Completion:
            places, ids = turns[turn], line["response_ids"]
            assert list(prompt_ids) == line["prompt_ids"] + ids[: places[0]]
            drawn = [ids[place] for place in places]
            finish = "stop" if drawn[-1] == tokenizer.eos_token_id else "length"
            return Completion(drawn, [line["rollout_log_probs"][place] for place in places], finish)

        row = of[tuple(prompt)]
        environment = stories(row["question"], row["answer"], price=0.05)
        episode = asyncio.run(rollout(environment, sample, TextRenderer(tokenizer), EpisodeLimits(turns=5)))
        (merged,) = episode.rows()
        assert list(merged.token_ids) == prompt + ids
        assert len(episode.turns) == len(turns)
        assert episode.score == pytest.approx(line["score"])
        assert [turn.reward for turn in episode.turns] == pytest.approx(list(line["turn_rewards"].values()), abs=1e-5)
