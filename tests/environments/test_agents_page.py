"""The first page of docs/agents.md is enough: its three files, as they are, train a model with a chat template."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from rlprims.environments import ChatRenderer, Completion, Step, answer_calls, rollout, tool
from tests import tiny
from tests.turns.chat_templates import byte_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer("qwen tools")
    tokenizer.pad_token = "<|endoftext|>"
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(tiny.config(vocab_size=len(tokenizer), max_position_embeddings=2048, **ids))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_files_of_the_page_train(chat_model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "agents.md").read_text().split("It needs no model")[0]
    lines = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].splitlines()  # type: ignore[index]
    (tmp_path / "shop.py").write_text("\n".join(line[4:] for line in lines))
    whole = (ROOT / "docs" / "agents.md").read_text()
    for language, name in (("json", "shop.jsonl"), ("yaml", "shop.yaml")):
        (tmp_path / name).write_text(re.search(rf"```{language}\n(.*?)```", whole, re.DOTALL)[1])  # type: ignore[index]
    command = [sys.executable, "-m", "rlprims", "train", "shop.yaml", "run_dir=runs/shop", f"model.path={chat_model}"]
    small = ["steps=1", "prompts_per_step=2", "algorithm.group_size=2", "sampling.max_new_tokens=8"]
    done = subprocess.run([*command, *small], cwd=tmp_path, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    [line] = map(json.loads, (tmp_path / "runs" / "shop" / "metrics.jsonl").read_text().splitlines())
    assert (line["groups_sampled"], line["turns"], line["groups_failed"]) == (2, 1, 0)
    recorded = (tmp_path / "runs" / "shop" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert "<tools>" in json.loads(recorded[0])["prompt"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_an_episode_by_a_chat_template_is_what_the_template_writes() -> None:
    @tool
    def price(item: str) -> int:
        """The price of a thing."""
        return {"apple": 30}[item]

    class Shopping:
        def reset(self) -> Any:
            return [{"role": "user", "content": "the price?"}], [price]

        def step(self, message: Any) -> Step:
            answers = answer_calls(message, [price])
            return Step(answers) if answers else Step(reward=1.0, done=True)

    tokenizer = byte_tokenizer("qwen tools")
    call = '{"name": "price", "arguments": {"item": "apple"}}'
    texts = [f"let me see<tool_call>\n{call}\n</tool_call>", "it is 30."]

    def sample(prompt_ids: Any, sample_id: int, turn: int) -> Completion:
        ids = tokenizer.encode(texts[turn] + "<|im_end|>", add_special_tokens=False)
        return Completion(ids, [-0.5] * len(ids))

    episode = asyncio.run(rollout(Shopping(), sample, ChatRenderer(tokenizer)))
    assert not episode.causes
    assert [message["content"] for message in episode.messages] == ["the price?", "let me see", "30", "it is 30."]
    [row] = episode.rows()
    messages = [dict(message) for message in episode.messages]
    rendered = tokenizer.apply_chat_template(messages, tools=[price.schema], tokenize=False)
    assert tokenizer.decode(row.token_ids) + "\n" == rendered
    sampled = [i for i, mask in zip(row.token_ids, row.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == "<|im_end|>".join([*texts, ""])
