"""``rlprims fit`` with ``loss: bradley_terry``: a reward model, and the ``reward`` role that loads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlprims import algorithms, losses
from rlprims.algorithms import use
from rlprims.cli import main
from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf import StoredTraining
from rlprims.execution.local import LocalExecution
from rlprims.fit.rows import StoredRow, as_batch
from tests import tiny
from tests.trainer.runs import metrics_of
from tests.trainer.test_fit_pairs import PAIRS


def training(path: Path, *, centering: float = 0.0, **changes: Any) -> StoredTraining:
    return StoredTraining(
        ModelConfig(path=str(path), **changes),
        OptimizerConfig(lr=1e-3, weight_decay=0.0),
        loss=use(losses.bradley_terry, centering=centering),
        aggregation=use(losses.token_mean),
        tokenizer=tiny.tokenizer(),
        updates=5,
    )


def alone(model: Any, row: StoredRow, which: int) -> torch.Tensor:
    """The score of one response without padding or library: the head on the last hidden state."""
    tokens = torch.tensor([row.prompt_ids + row.responses[which].ids])
    score: torch.Tensor = model.score(model.model(tokens).last_hidden_state[0, -1])
    return score[0]


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_micro_batch": 20}], ids=["whole", "split"])
def test_loss_and_gradient_are_those_of_each_response_by_itself(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tiny.save_classifier(tmp_path / "model", pad_token_id=tiny.EOS_ID)  # every response ends with its padding
    direct = AutoModelForSequenceClassification.from_pretrained(path).eval()
    chosen, rejected = (torch.stack([alone(direct, row, which) for row in PAIRS]) for which in (0, 1))
    margins = torch.tensor([0.5, 0.0, 1.0])
    expected = losses.bradley_terry(chosen, rejected, margins, centering=0.1).mean()
    wanted = torch.autograd.grad(expected, [p for p in direct.parameters() if p.requires_grad])

    trained = training(path, centering=0.1, **changes)
    assert trained.scorer is not None
    seen: list[torch.Tensor] = []
    masters = trained.scorer.masters

    def spy() -> tuple[float, float, bool]:
        seen.extend(p.grad.clone() for p in masters if p.grad is not None)
        return 0.0, 0.0, False

    trained.scorer.step = spy  # type: ignore[method-assign]
    rows = [row._replace(margin=float(margin)) for row, margin in zip(PAIRS, margins, strict=True)]
    report = trained.update_rows(as_batch(rows, tiny.PAD_ID))
    torch.testing.assert_close(torch.tensor(report.loss), expected.detach(), rtol=1e-5, atol=1e-6)
    mine, other = (torch.cat([g.flatten() for g in each]) for each in (seen, wanted))
    assert (mine - other).norm() < 1e-5 * other.norm()
    reward = report.metrics["pairs/chosen_reward"].value()
    torch.testing.assert_close(reward, chosen.mean().detach(), rtol=1e-5, atol=1e-6)


def test_a_language_model_gets_a_head_whose_first_scores_are_0(model: Path) -> None:
    metrics = training(model).measure_rows(as_batch(PAIRS, tiny.PAD_ID))
    assert {name: round(float(metric.value()), 4) for name, metric in metrics.items()} == {
        "pairs/loss": 0.6931,
        "pairs/accuracy": 0.0,
        "pairs/margin": 0.0,
        "pairs/chosen_reward": 0.0,
        "pairs/rejected_reward": 0.0,
    }


@pytest.fixture
def settings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of two answers that which has more of the letter a is better; the held-out prompts are new."""
    answers = [("aab", "bba"), ("aba", "bbb"), ("aaa", "abb"), ("baa", "bab"), ("aa", "b"), ("ab", "bb")]
    rows = [{"prompt": f"{n}=", "chosen": more, "rejected": less} for n in range(10) for more, less in answers]
    monkeypatch.setattr("rlprims.fit.session.draw_curves", lambda runs, out: out)  # the slowest part
    return {
        "run_dir": str(tmp_path / "run"),
        "loss": "bradley_terry",
        "rows_per_step": 12,
        "epochs": 10,
        "model": {"path": str(model)},
        "data": {"train": str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows[:48])),
                 "eval": str(tiny.write_jsonl(tmp_path / "held_out.jsonl", rows[48:]))},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "checkpoint": {"every": 20},
        "evaluation": {"every": 40},
    }  # fmt: skip


Write = Callable[[dict[str, Any]], Path]


def scored(policy: Path, reward: str, texts: list[tuple[str, str]]) -> list[float]:
    """By the ``reward`` role of a run, as it scores what a policy has sampled."""
    execution = LocalExecution(
        ModelConfig(path=str(policy), reward=reward),
        OptimizerConfig(),
        algorithm=algorithms.reinforce(),
        tokenizer=tiny.tokenizer(),
        temperature=1.0,
        updates=1,
    )
    tokenizer = tiny.tokenizer()
    rows = [[*tokenizer.encode(prompt)] for prompt, _ in texts]
    ends = [[*tokenizer.encode(response), tiny.EOS_ID] for _, response in texts]
    found: list[float] = []
    for prompt, response in zip(rows, ends, strict=True):
        columns = {"prompts": torch.tensor([prompt]), "responses": torch.tensor([response])}
        columns["attention_mask"] = torch.ones(1, len(prompt) + len(response), dtype=torch.bool)
        found += execution.reward_scores(DataProto.from_dict(tensors=columns)).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["weights", "adapters"])
def test_the_reward_role_loads_what_was_trained(
    settings: dict[str, Any], write_config: Write, model: Path, lora: dict[str, int] | None
) -> None:
    settings["model"]["lora"] = lora
    settings["optimizer"]["lr"] = 1e-2 if lora else 1e-3
    assert main(["fit", str(write_config(settings))]) == 0
    summary = json.loads((Path(settings["run_dir"]) / "summary.json").read_text())
    assert summary["after"]["pairs/accuracy"] == 1
    assert summary["model"].endswith("step_000040/reward")
    a, b, c, d = scored(model, summary["model"], [("9=", text) for text in ("aaab", "bbba", "aa", "bb")])
    assert a > b
    assert c > d
    rows = [json.loads(line) for line in Path(settings["data"]["eval"]).read_text().splitlines()]
    chosen = [(row["prompt"], row["chosen"]) for row in rows]
    mean = sum(scored(model, summary["model"], chosen)) / len(chosen)
    assert mean == pytest.approx(summary["after"]["pairs/chosen_reward"], abs=1e-4)
    config = json.loads((Path(summary["model"]) / "config.json").read_text())
    assert config["pad_token_id"] == tiny.PAD_ID  # as transformers' own pipelines need it


@pytest.mark.slow
def test_resuming_repeats_the_run(settings: dict[str, Any], write_config: Write, tmp_path: Path) -> None:
    config, whole, broken = str(write_config(settings)), tmp_path / "whole", tmp_path / "broken"
    rarely = ["checkpoint.every=2", "data.eval=null"]
    assert main(["fit", config, f"run_dir={whole}", "steps=4", *rarely]) == 0
    assert main(["fit", config, f"run_dir={broken}", "steps=2", *rarely]) == 0
    (broken / ".lock").unlink()  # this process holds it still
    assert main(["resume", str(broken), "steps=4"]) == 0
    assert metrics_of(broken) == metrics_of(whole)
