"""Lines of a run's files, made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

MakeRun = Callable[..., Path]


def train(step: int, **metrics: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "score": 0.1 * step, "length": 30.0 + step, "time/step": 0.5, **metrics}


def evaluation(step: int, **metrics: Any) -> dict[str, Any]:
    accuracy = {"greedy/acc": 0.2 + step / 100, "sampled/acc": 0.1 + step / 100}
    return {"kind": "eval", "step": step, "generated_tokens_total": 1000 * step, **accuracy, **metrics}


def sample(sample_id: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "sample_id": sample_id,
        "group": sample_id // 2,
        "prompt": f"What is {sample_id // 2} + 1?",
        "response": "<answer>4</answer>",
        "answer": "4",
        "data_source": "words/2",
        "score": 1.0,
        "shaped_scores": 0.5,
        "acc": 1.0,
        "failure": None,
        "status": "trained",
        "ended": "stop",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_tokens": ["<answer>", "4", "</answer>"],
        "rollout_log_probs": [-0.1, -0.25, None],
        "advantages": [1.5, -0.75, 0.0],
        **changes,
    }
