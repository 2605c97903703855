"""``rlprims fit`` on pairs: the losses of the library on the model's own log-probs, whatever the micro-batches are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlprims import losses
from rlprims.algorithms import BoundFunction, use
from rlprims.cli import main
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf import StoredTraining
from rlprims.fit.config import FitConfig
from rlprims.fit.loop import batch_of, reference_log_probs
from rlprims.fit.rows import Response, StoredRow
from tests import tiny
from tests.trainer.runs import metrics_of


def response(*ids: int) -> Response:
    return Response(list(ids), [True] * len(ids))


PAIRS = [
    StoredRow([5, 6, 7], (response(8, 9, 1), response(10, 1))),
    StoredRow([6, 7], (response(11, 1), response(12, 13, 14, 1))),
    StoredRow([8, 7, 6, 5], (response(9, 1), response(9, 9, 9, 9, 1))),
]


def training(
    model: Path, loss: BoundFunction, *, means: bool = False, tail_weight: float = 1.0, **changes: Any
) -> StoredTraining:
    return StoredTraining(
        ModelConfig(path=str(model), **changes),
        OptimizerConfig(lr=1e-2, weight_decay=0.0),
        loss=loss,
        aggregation=use(losses.token_mean),
        tokenizer=tiny.tokenizer(),
        updates=5,
        means=means,
        tail_weight=tail_weight,
    )


def sums(model: Any, *, means: bool = False, tail_weight: float = 1.0) -> torch.Tensor:
    """(2P,): each response's log-prob by itself, chosen ones first."""
    found = []
    for which in (0, 1):
        for row in PAIRS:
            ids = row.responses[which].ids
            logits = model(torch.tensor([row.prompt_ids + ids])).logits[0, len(row.prompt_ids) - 1 : -1]
            each = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])
            tail = each[min(len(response.ids) for response in row.responses) :]
            found.append(each.mean() if means else each.sum() - (1 - tail_weight) * tail.sum())
    return torch.stack(found)


def gradients(trained: StoredTraining) -> list[torch.Tensor]:
    """What the next step will find."""
    seen: list[torch.Tensor] = []
    step = trained.policy.step

    def spy() -> tuple[float, float, bool]:
        seen.extend(p.grad.clone() for p in trained.policy.masters if p.grad is not None)
        return step()

    trained.policy.step = spy  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("reference"), seed=1)


SPLIT = {"max_tokens_per_micro_batch": 12}
CASES: dict[str, tuple[Any, dict[str, Any], bool, dict[str, Any]]] = {
    "dpo packed": (losses.dpo, {"beta": 0.3}, False, {}),
    "dpo padded": (losses.dpo, {"beta": 0.3}, False, {"packing": False}),
    "dpo split": (losses.dpo, {"beta": 0.3}, False, SPLIT),
    "ipo": (losses.ipo, {"tau": 0.2}, True, {}),
    "simpo": (losses.simpo, {}, True, SPLIT),
    "orpo": (losses.orpo, {}, True, {"packing": False}),
    "ld-dpo packed": (losses.dpo, {"beta": 0.3}, False, {"tail_weight": 0.25, **SPLIT}),
    "ld-dpo padded": (losses.dpo, {"beta": 0.3}, False, {"tail_weight": 0.0, "packing": False}),
    "cpo": (losses.simpo, {"beta": 0.1, "margin": 0.0, "nll_coef": 1.0}, False, {"tail_weight": 0.5}),
}


@pytest.mark.parametrize(("loss", "options", "means", "changes"), CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_each_response_by_itself(
    model: Path, reference: Path, loss: Any, options: dict[str, Any], means: bool, changes: dict[str, Any]
) -> None:
    direct, fixed = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (model, reference))
    how = {"means": means, "tail_weight": changes.get("tail_weight", 1.0)}
    x = sums(direct, **how)
    with torch.no_grad():
        ref = sums(fixed, **how)
    data = [*x.chunk(2), *(ref.chunk(2) if "ref_chosen_log_probs" in use(loss).needs else [])]
    expected = loss(*data, **options).mean()
    wanted = torch.autograd.grad(expected, list(direct.parameters()))

    trained = training(model, use(loss, **options), means=means, **changes)
    interleaved = ref.view(2, -1).T.flatten()
    batch = batch_of(PAIRS, range(3), tiny.PAD_ID, interleaved if len(data) == 4 else None)
    seen = gradients(trained)
    held_out = trained.measure_rows(batch)
    report = trained.update_rows(batch)
    torch.testing.assert_close(torch.tensor(report.loss), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(held_out["pairs/loss"].value(), expected.detach(), rtol=1e-5, atol=1e-6)
    mine, other = (torch.cat([g.flatten() for g in each]) for each in (seen, wanted))
    assert (mine - other).norm() < 1e-5 * other.norm()


def test_fit_reports_metrics_of_pairs(model: Path, reference: Path) -> None:
    x = sums(AutoModelForCausalLM.from_pretrained(model).eval()).detach()
    ref = sums(AutoModelForCausalLM.from_pretrained(reference).eval()).detach()
    chosen, rejected = (0.3 * (x - ref)).chunk(2)
    trained = training(model, use(losses.dpo, beta=0.3))
    metrics = trained.measure_rows(batch_of(PAIRS, range(3), tiny.PAD_ID, ref.view(2, -1).T.flatten()))
    told = {name: round(float(metric.value()), 4) for name, metric in metrics.items()}
    assert told == {
        "pairs/loss": round(float(losses.dpo(*x.chunk(2), *ref.chunk(2), beta=0.3).mean()), 4),
        "pairs/accuracy": round(float((chosen > rejected).float().mean()), 4),
        "pairs/margin": round(float((chosen - rejected).mean()), 4),
        "pairs/chosen_reward": round(float(chosen.mean()), 4),
        "pairs/rejected_reward": round(float(rejected.mean()), 4),
    }


def test_the_reference_of_ld_dpo_weighs_the_tail_too(model: Path) -> None:
    trained = training(model, use(losses.dpo), tail_weight=0.25)
    got = trained.sequence_log_probs(batch_of(PAIRS, range(3), tiny.PAD_ID, None))
    wanted = sums(AutoModelForCausalLM.from_pretrained(model).eval(), tail_weight=0.25).detach()
    torch.testing.assert_close(got, wanted.view(2, -1).T.flatten(), rtol=1e-5, atol=1e-5)


def test_a_reference_is_measured_once_and_is_the_model_at_the_start(model: Path) -> None:
    config = FitConfig(
        run_dir="unused", loss="dpo", rows_per_step=2, model={"path": str(model)}, data={"train": "unread"}
    )
    trained = training(model, config.loss)
    reference = reference_log_probs(trained, PAIRS, config, tiny.PAD_ID)
    expected = sums(AutoModelForCausalLM.from_pretrained(model).eval()).view(2, -1).T.flatten()
    torch.testing.assert_close(reference, expected.detach(), rtol=1e-5, atol=1e-5)
    batch = batch_of(PAIRS, [2, 0], tiny.PAD_ID, reference)
    torch.testing.assert_close(batch["ref_sequence_log_probs"], reference[[4, 5, 0, 1]])
    loss = trained.update_rows(batch).loss
    assert loss == pytest.approx(0.6931, abs=1e-4)  # log 2: the policy is still the reference


@pytest.fixture
def settings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The right sum against the next number."""
    rows = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": str(int(row["answer"]) + 1)}
        for row in tiny.sums(20)
    ]
    monkeypatch.setattr("rlprims.fit.session.draw_curves", lambda runs, out: out)  # the slowest part
    return {
        "run_dir": str(tmp_path / "run"),
        "loss": {"fn": "dpo", "beta": 0.5},
        "rows_per_step": 5,
        "model": {"path": str(model)},
        "data": {"train": str(tiny.write_jsonl(tmp_path / "pairs.jsonl", rows)),
                 "eval": str(tiny.write_jsonl(tmp_path / "held_out.jsonl", rows[:5]))},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "checkpoint": {"every": 2},
    }  # fmt: skip


Write = Callable[[dict[str, Any]], Path]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapters"])
def test_a_resumed_run_keeps_its_reference(
    settings: dict[str, Any], write_config: Write, tmp_path: Path, lora: bool
) -> None:
    if lora:
        settings["model"]["lora"] = {"rank": 2}
    config, whole, broken = str(write_config(settings)), tmp_path / "whole", tmp_path / "broken"
    assert main(["fit", config, f"run_dir={whole}", "steps=4"]) == 0
    assert main(["fit", config, f"run_dir={broken}", "steps=2"]) == 0
    (broken / ".lock").unlink()  # this process holds it still
    assert main(["resume", str(broken), "steps=4"]) == 0
    lines = metrics_of(broken)
    assert [line for line in lines if (line["kind"], line["step"]) != ("eval", 2)] == metrics_of(whole)
    last = json.loads((whole / "summary.json").read_text())["after"]
    assert last["pairs/loss"] < 0.69


def test_another_model_is_the_reference(
    settings: dict[str, Any], write_config: Write, reference: Path, tmp_path: Path
) -> None:
    settings["model"]["reference"] = str(reference)
    assert main(["fit", str(write_config(settings)), "steps=1"]) == 0
    before = json.loads((Path(settings["run_dir"]) / "summary.json").read_text())["before"]
    assert abs(before["pairs/margin"]) > 0.1  # the policy is not the reference
    assert abs(before["pairs/loss"] - 0.6931) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_pairs_are_learned(settings: dict[str, Any], write_config: Write, loss: str) -> None:
    more = [f"loss={loss}", "epochs=10", "evaluation.every=99", "checkpoint.every=99"]
    assert main(["fit", str(write_config(settings)), *more]) == 0
    after = json.loads((Path(settings["run_dir"]) / "summary.json").read_text())["after"]
    assert after["pairs/accuracy"] == 1
    assert after["pairs/margin"] > 0


def test_a_pair_longer_than_the_usual_budget_is_one_micro_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting the budget is the longest pair, not the longest row."""
    monkeypatch.setattr("rlprims.execution.hf._micro_batches.token_budget", lambda config, longest: longest)
    reference = torch.zeros(2 * len(PAIRS))
    trained = training(model, use(losses.dpo), packing=False)
    whole = training(model, use(losses.dpo), max_tokens_per_micro_batch=1000)
    batch = batch_of(PAIRS, range(3), tiny.PAD_ID, reference)
    assert trained.update_rows(batch).loss == pytest.approx(whole.update_rows(batch).loss, rel=1e-5)
