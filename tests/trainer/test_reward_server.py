"""``examples/reward_server.py`` with vLLM's own server: its numbers are those of the model in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from tests import tiny
from tests.trainer.vllm_server import serving

pytestmark = pytest.mark.ray
SCRIPT = Path(__file__).parents[2] / "examples" / "reward_server.py"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_a_run_is_scored_by_the_server(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    path = tiny.save_classifier(tmp_path / "scorer", seed=1)
    options = ("--runner", "pooling", "--chat-template", TEMPLATE)
    with serving(path, tmp_path / "server.log", *options) as url:
        fn = {"fn": f"{SCRIPT}:reward", "url": url, "model": str(path)}
        one = {**settings, "rewards": [{"fn": fn, "name": "preference"}], "steps": 1}
        one.pop("verifier", None)
        parts, steps = build(config := load(one), console), list[StepResult]()
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        train(trainer, [lambda _, step: steps.append(step)])
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path).eval(),
        AutoTokenizer.from_pretrained(path),
    )
    batch = steps[0].batch
    assert len(batch) > 1
    for question, response, score in zip(batch["question"], batch["response"], batch["scores"].tolist(), strict=True):
        ids = torch.tensor([tokenizer(question + response)["input_ids"]])
        with torch.no_grad():
            assert float(model(ids).logits) == pytest.approx(score, abs=1e-4)
