"""``rlprims fit`` on demonstrations: the loss is the model's own likelihood, and a run goes on where it ended."""

import json
import math
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlprims import losses
from rlprims.algorithms import use
from rlprims.cli import main
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf import StoredTraining
from rlprims.fit.config import FitConfig, FitDataConfig
from rlprims.fit.loop import FitTrainer
from rlprims.fit.rows import Reader, Response, StoredRow, StoredRows, as_batch
from rlprims.runs.config import load_as
from tests import tiny
from tests.trainer.runs import metrics_of, rlprims
from tests.trainer.test_resume import ROOT, command, wait_until
from tools.settings_tables import settings as of_section

Start = Callable[..., Path]


@pytest.fixture
def settings(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Seven steps on twenty sums, three to a step but for the last one."""
    rows = [{"prompt": row["question"], "response": row["answer"]} for row in tiny.sums(20)]
    return {
        "run_dir": str(tmp_path / "run"),
        "rows_per_step": 3,
        "model": {"path": str(model)},
        "data": {"train": str(tiny.write_jsonl(tmp_path / "rows.jsonl", rows)),
                 "eval": str(tiny.write_jsonl(tmp_path / "held_out.jsonl", rows[:5]))},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 2, "keep": 3},
    }  # fmt: skip


@pytest.fixture
def start(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Start:
    def start(name: str, *overrides: str) -> Path:
        run = tmp_path / name
        if name != "drawn":
            monkeypatch.setattr("rlprims.fit.session.draw_curves", lambda runs, out: out)  # the slowest part
        assert main(["fit", str(write_config(settings)), f"run_dir={run}", *overrides]) == 0
        return run

    return start


ROWS = [
    StoredRow(list(prompt), (Response(list(ids), [token != 9 for token in ids]),))
    for prompt, ids in [((5, 6, 7), (8, 9, 10, 1)), ((6, 7), (11, 1)), ((8,), (12, 13, 14, 15, 16, 1))]
]
"""What others wrote has the token 9."""


def training(model: Path, **changes: Any) -> StoredTraining:
    loss = use(changes.pop("loss", losses.nll))
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    options = {"loss": loss, "aggregation": use(losses.token_mean), "tokenizer": tiny.tokenizer(), "updates": 5}
    return StoredTraining(ModelConfig(path=str(model), **changes), optimizer, **options)


def likelihood(model: Any, rows: list[StoredRow]) -> torch.Tensor:
    """The token mean of −log π, each row by itself, by torch's cross-entropy."""
    parts = []
    for row in rows:
        ids, own = row.responses[0]
        logits = model(torch.tensor([row.prompt_ids + ids])).logits[0, len(row.prompt_ids) - 1 : -1]
        parts.append(cross_entropy(logits, torch.tensor(ids), reduction="none")[torch.tensor(own)])
    return torch.cat(parts).mean()


@pytest.mark.parametrize(
    "changes",
    [{}, {"packing": False}, {"max_tokens_per_micro_batch": 8}, {"fused_head": True}],
    ids=["packed", "padded", "split", "fused"],
)
def test_the_loss_and_its_gradient_are_the_cross_entropys(model: Path, changes: dict[str, Any]) -> None:
    direct = AutoModelForCausalLM.from_pretrained(model).eval()
    direct_loss = likelihood(direct, ROWS)
    gradients = torch.autograd.grad(direct_loss, list(direct.parameters()))
    loss = direct_loss.detach()
    trained = training(model, **changes)
    seen: list[torch.Tensor] = []
    step = trained.policy.step

    def spy() -> tuple[float, float, bool]:
        seen.extend(p.grad.clone() for p in trained.policy.masters if p.grad is not None)
        return step()

    trained.policy.step = spy  # type: ignore[method-assign]
    batch = as_batch(ROWS, tiny.PAD_ID)
    measured = {name: float(metric.value()) for name, metric in trained.measure_rows(batch).items()}
    report = trained.update_rows(batch)
    assert math.isclose(report.loss, float(loss), rel_tol=1e-5)
    assert math.isclose(float(report.metrics["nll"].value()), float(loss), rel_tol=1e-5)
    assert math.isclose(measured["nll"], float(loss), rel_tol=1e-5)
    torch.testing.assert_close(seen, list(gradients), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_run_learns_and_leaves_a_model_that_a_run_of_samples_loads(
    start: Start, settings: dict[str, Any], write_config: Any, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rarely = ["evaluation.every=99", "checkpoint.every=99"]
    run = start("drawn", "epochs=10", "rows_per_step=2", "optimizer.lr=3e-3", *rarely)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 100
    assert summary["after"]["nll"] < 0.2 < 1.0 < summary["before"]["nll"]
    assert summary["model"] in capsys.readouterr().out.replace("\n", "")
    assert (run / "curves.png").stat().st_size > 10_000
    told = write_config(
        {
            "run_dir": "unused",
            "algorithm": "grpo",
            "model": {"path": summary["model"]},
            "data": {"train": str(questions), "eval": str(questions)},
            "verifier": "rlprims.rewards.verifiers.exact",
            "sampling": {"max_new_tokens": 8},
        }
    )
    assert main(["eval", str(told), "evaluation.samples=1"]) == 0
    out = capsys.readouterr().out
    (greedy,) = (line for line in out.splitlines() if "greedy/acc " in line)
    assert float(greedy.split()[3]) > 0.5
    assert main(["plot", str(run)]) == 0
    assert "nll" in capsys.readouterr().out


def test_every_epoch_has_every_row_once_in_another_order(model: Path, settings: dict[str, Any]) -> None:
    config = FitConfig(**{**settings, "epochs": 2, "rows_per_step": 2})
    rows = StoredRows(ROWS, 0, 0, 0)
    trained = training(model)
    fitting = FitTrainer(config, trained, rows, pad_token_id=tiny.PAD_ID)
    steps = [fitting.step() for _ in range(fitting.steps)]
    firsts = [ids[0] for step in steps for ids in step.batch["responses"].tolist()]
    assert [len(step.batch) for step in steps] == [2, 2, 2]
    assert sorted(firsts[:3]) == sorted(firsts[3:]) == [8, 11, 12]
    assert [step.metrics["epoch"] for step in steps] == [2 / 3, 4 / 3, 2]
    assert sum(step.metrics["learned_tokens"] for step in steps) == 2 * (3 + 2 + 6)


def test_the_seed_decides_the_order(model: Path, settings: dict[str, Any]) -> None:
    rows = StoredRows([*ROWS, *ROWS], 0, 0, 0)
    trained = training(model)

    def order(**changes: Any) -> list[int]:
        config = FitConfig(**{**settings, **changes})
        return FitTrainer(config, trained, rows, pad_token_id=tiny.PAD_ID).order.take(12)

    assert order() == order()
    assert order() != order(seed=1)
    assert order(data={"train": "unread", "shuffle": False}) == [*range(6), *range(6)]


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["weights", "adapters"])
def test_resuming_repeats_the_run_exactly(start: Start, lora: bool) -> None:
    adapters = ["model.lora={rank: 2}", "steps=6"] if lora else ["steps=6"]
    whole = start("whole", *adapters)
    broken = start("broken", *adapters, "steps=4")
    (broken / ".lock").unlink()  # this process holds it still
    assert main(["resume", str(broken), "steps=6"]) == 0
    lines = metrics_of(broken)
    shorter_end = [line for line in lines if line["kind"] == "eval" and line["step"] == 4]  # its last evaluation
    assert [line for line in lines if line not in shorter_end] == metrics_of(whole)
    merged = whole / "checkpoints" / "step_000006" / "policy" / "model.safetensors"
    assert merged.read_bytes() == (broken / "checkpoints" / "step_000006" / "policy" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_sigkill_in_mid_run(settings: dict[str, Any], write_config: Any, start: Start, tmp_path: Path) -> None:
    settings |= {"epochs": 5, "checkpoint": {"every": 6}}
    whole, killed = start("whole"), tmp_path / "killed"
    arguments = ["fit", write_config(settings), f"run_dir={killed}", "--resume-if-exists"]
    metrics = killed / "metrics.jsonl"
    process = subprocess.Popen(command(*arguments), cwd=ROOT)
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 14, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    rlprims(*arguments)
    assert metrics_of(killed) == metrics_of(whole)


def test_other_commands_and_a_resume_refuse_a_fit_run(
    start: Start, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start("run", "steps=1")
    (run / ".lock").unlink()
    assert main(["eval", str(run)]) == 2
    assert "a run on stored rows, which has no questions" in " ".join(capsys.readouterr().err.split())
    assert main(["resume", str(run), "loss=dpo"]) == 2
    assert main(["rollouts", str(run)]) == 2
    tiny.write_jsonl(Path(settings["data"]["train"]), [{"prompt": "1", "response": "2"}] * 20)
    assert main(["resume", str(run), "steps=2"]) == 2
    assert "expected the rows that the run began with, got others" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["execution=ray"], "execution: ray does not support stored rows yet"),
        (["loss=kto"], "rlprims.losses.kto needs"),
        (["loss=dpoo"], "cannot import 'losses.dpoo'"),
        (["model.teacher=x"], "model.teacher is not used in a run on stored rows with rlprims.losses.nll"),
        (["model.replay_routes=true"], "model.replay_routes is not used in a run on stored rows"),
        (["model.reference=x"], "model.reference is not used in a run"),
        (["means=true"], "means is for losses on pairs"),
        (["tail_weight=0.5"], "tail_weight is for losses on pairs that compare sums"),
        (["loss=simpo", "tail_weight=0.5"], "tail_weight is for losses on pairs that compare sums"),
        (["loss=dpo", "means=true", "tail_weight=0.5"], "tail_weight is for losses on pairs that compare sums"),
        (["data.margin=gap"], "data.margin is for losses.bradley_terry"),
        (["data.template=hello"], "expected text with {prompt} in it, or chat"),
        (["epoch=2"], "epoch: unknown; did you mean 'epochs'?"),
        (["model.path=no/such/model"], "model.path: cannot load 'no/such/model'"),
        (["data.train=none.jsonl", "model.path=no/such/model"], "none.jsonl: No such file or directory"),
    ],
)
def test_mistakes_are_one_message(
    settings: dict[str, Any], write_config: Any, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert main(["fit", str(write_config(settings)), *overrides]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path(settings["run_dir"]).exists()


def test_help_says_what_the_rows_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fit", "--help"])
    assert left.value.code == 0
    assert "prompt, chosen and rejected" in " ".join(capsys.readouterr().out.split())


def test_a_config_may_extend_another(settings: dict[str, Any], write_config: Any, tmp_path: Path) -> None:
    base = write_config(settings | {"loss": {"fn": "dpo", "beta": 0.3}})
    (tmp_path / "more.yaml").write_text(f"extends: {base.name}\nloss: hinge\n")
    assert load_as(FitConfig, tmp_path / "more.yaml").loss == use(losses.hinge)
    assert load_as(FitConfig, base, ["loss.beta=0.5"]).loss == use(losses.dpo, beta=0.5)


def test_gsm8k_as_it_is_published(settings: dict[str, Any]) -> None:
    fields = {"prompt": "question", "response": "answer", "max_length": 400, "max_prompt_length": 300}
    data = FitDataConfig(train=Path(__file__).parent / "gsm8k_sample.jsonl", **fields)
    rows = Reader(data, "demonstrations", tiny.tokenizer(), [tiny.EOS_ID], 512).read(data.train)
    assert len(rows.rows) + rows.filtered == 24
    assert 0 < rows.truncated <= len(rows.rows)


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "stored_data.md").read_text().split("## Settings")[1]
    elsewhere = ("model.", "optimizer.", "checkpoint.", "profile.")
    own = [name for name, _ in of_section(FitConfig) if not name.startswith(elsewhere)]
    assert sorted(re.findall(r"^\| `([a-z_.]+)` \|", page, re.MULTILINE)) == sorted(own)


@pytest.mark.parametrize("name", ["words/sft", "words/dpo", "words/reward", "smollm/gsm8k-sft"])
def test_the_examples_are_settings(name: str) -> None:
    assert load_as(FitConfig, ROOT / "examples" / f"{name}.yaml").steps is None
