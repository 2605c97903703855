"""A run that is taught: what the teacher reads, which rows it says something of, and that the student gets there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from rlprims.trainer.teacher import teacher_columns
from tests import tiny


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("teacher"), seed=1)


def settings_of(settings: dict[str, Any], algorithm: Any, *, model: Any = None, data: Any = None) -> dict[str, Any]:
    parts = {"model": {**settings["model"], **(model or {})}, "data": {**settings["data"], **(data or {})}}
    return {**settings, **parts, "algorithm": algorithm, "evaluation": {"before_training": False}}


def run(config: Config, console: Console) -> tuple[Trainer, list[StepResult]]:
    parts = build(config, console)
    trainer, steps = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows), list[StepResult]()
    train(trainer, [lambda _, step: steps.append(step)])
    return trainer, steps


def test_the_teacher_alone_reads_the_answer(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Its numbers are those of a direct forward of its own prompt and the student's response, verbatim."""
    shown = settings_of(settings, {"preset": "opd"}, data={"teacher_template": "{question}{answer} "})
    trainer, (step,) = run(load(shown, "steps=1", "optimizer.lr=1.0e-12"), console)
    model, tokenizer = trainer.execution.training.policy.module, trainer.tokenizer  # type: ignore[attr-defined]
    for row in range(len(step.batch)):
        mask = step.batch["response_mask"][row]
        response = step.batch["responses"][row][mask].tolist()
        question, answer = step.batch["question"][row], step.batch["answer"][row]
        prompt = tokenizer.encode(f"{question}{answer} ")
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(response)), response]
        torch.testing.assert_close(step.batch["teacher_log_probs"][row][mask], expected, rtol=0, atol=1e-4)
    gap = (step.batch["teacher_log_probs"] - step.batch["old_log_probs"])[step.batch["response_mask"]]
    torch.testing.assert_close(step.batch["advantages"][step.batch["response_mask"]], gap)
    assert step.metrics["teacher_kl"] == pytest.approx(float(-gap.mean()), abs=1e-5)


def test_a_sibling_that_was_right_is_shown_and_else_nothing_is_learned(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    algorithm = {"preset": "sdpo", "group_size": 3, "support": {"size": 5}}
    shown = settings_of(settings, algorithm, data={"teacher_template": "{question}{sibling}"})
    trainer, steps = run(load(shown, "steps=2"), console)
    for step in steps:
        scores = step.batch["scores"].view(-1, 3)
        others = (scores >= 1).sum(1, keepdim=True) - (scores >= 1).long()
        taught = step.batch["teacher_mask"].any(-1).view(-1, 3)
        assert torch.equal(taught, (others > 0) & step.batch["response_mask"].any(-1).view(-1, 3))
        assert step.metrics["teacher_rows"] == pytest.approx(float(taught.float().mean()))
        assert step.batch["topk_ids"].shape[-1] == 5
    assert any(0 < step.metrics["teacher_rows"] < 1 for step in steps)
    with pytest.raises(KeyError):
        teacher_columns(trainer.execution, trainer.config, trainer.tokenizer, steps[0].batch)["teacher_log_probs"]


def test_each_row_has_its_own_teacher(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path
) -> None:
    teachers = {"teacher": {"sums": str(teacher), "else": settings["model"]["path"]}}
    named = settings_of(settings, "mopd", model=teachers, data={"teacher": "data_source"})
    alone = settings_of(settings, "opd", model={"teacher": str(teacher)})
    (_, (a,)), (_, (b,)) = run(load(named, "steps=1"), console), run(load(alone, "steps=1"), console)
    assert torch.equal(a.batch["teacher_log_probs"], b.batch["teacher_log_probs"])


@pytest.mark.slow
def test_the_student_comes_near_its_teacher(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path
) -> None:
    taught = settings_of(settings, {"preset": "opd", "group_size": 8}, model={"teacher": str(teacher)})
    _, steps = run(load(taught, "steps=60", "optimizer.lr=3.0e-2", "prompts_per_step=8"), console)
    kl = [step.metrics["teacher_kl"] for step in steps]
    before, after = sum(kl[:2]) / 2, sum(kl[-5:]) / 5  # seeds 0 to 5: 0.42 to 0.52 of it is left
    assert after < 0.6 * before, (before, after)


TOP = {"coefficient": 1.0, "loss": "rlprims.losses.topk_kl"}
WHOLE = {"preset": "opd", "policy_loss": {"fn": "rlprims.logprobs.fused_full_kl", "divergence": "forward"}}


def test_a_run_compares_whole_vocabularies(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, teacher: Path
) -> None:
    """The loss is the divergence, and becomes smaller; opd's own advantage shows the gap of the sampled tokens."""
    taught = settings_of(settings, WHOLE, model={"teacher": str(teacher), "fused_head": True})
    _, steps = run(load(taught, "steps=12", "optimizer.lr=1.0e-2"), console)
    losses = [step.metrics["loss"] for step in steps]
    assert 0 < losses[-1] < 0.8 * losses[0]
    assert steps[-1].metrics["teacher_kl"] < steps[0].metrics["teacher_kl"]


@pytest.mark.parametrize(
    ("model", "data", "extra"),
    [
        ({}, {}, {}),
        ({"fused_head": True}, {}, {"execution": "ray"}),
        ({"fused_head": True}, {"teacher_template": "{question}{answer}"}, {}),
        ({"fused_head": True, "replay_routes": True}, {}, {}),
        ({"fused_head": True}, {}, {"algorithm": {**WHOLE, "loss_terms": [TOP]}}),
        ({"fused_head": True, "teacher": {"a": "x"}}, {"teacher": "data_source"}, {}),
    ],
)
def test_where_whole_vocabularies_cannot_be_compared(
    load: Callable[..., Config], settings: dict[str, Any], model: Any, data: Any, extra: Any
) -> None:
    with pytest.raises(ValueError, match=r"reads hidden states, which needs execution: local, model.fused_head: true"):
        load(settings_of(settings, WHOLE, model=model, data=data) | extra)
    with pytest.raises(ValueError, match="sampling truncates"):
        load(settings_of(settings, WHOLE, model={"fused_head": True}) | {"sampling": {"top_k": 2}})


@pytest.mark.parametrize(
    ("model", "data", "extra", "message"),
    [
        ({"teacher": {"a": "x"}}, {}, {}, "need each other"),
        ({}, {"teacher": "data_source"}, {}, "need each other"),
        ({"teacher_follows": {}}, {}, {"execution": "ray"}, "execution: local"),
        ({}, {}, {"algorithm": "sdft", "sampling": {"top_k": 2}}, "sampling truncates"),
    ],
)
def test_settings_that_cannot_be(
    load: Callable[..., Config], settings: dict[str, Any], model: Any, data: Any, extra: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(settings_of(settings, "opd", model=model, data=data) | extra)


def test_a_row_without_what_the_teacher_is_shown_is_named(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    shown = settings_of(settings, "sdft", data={"teacher_template": "{question} {solution}"})
    with pytest.raises(ValueError, match=r"sums.jsonl:1: data.teacher_template needs \['solution'\]"):
        build(load(shown), console)


def test_a_teacher_with_nothing_to_say_is_warned_of(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    assert any("the teacher is the model itself" in line for line in load(settings_of(settings, "opd")).warnings())
    idle = settings_of(settings, "rloo", model={"teacher": "somewhere"})
    assert any("it is not loaded" in line for line in load(idle).warnings())
