"""The files of runs that went wrong name the cause, and no other; those of healthy runs name none.

The faults are planted by settings, or by one function that is wrong. Lengths, entropy and KL take hundreds of steps to
collapse: these three runs are the lines of a healthy step with the curves that such a run has.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlprims.cli import main
from rlprims.data_proto import DataProto
from rlprims.doctor.run import CHECKS, MILD, RunFiles, diagnose
from rlprims.execution.local import LocalExecution
from rlprims.runs.directory import RunDirectory
from tests import tiny
from tests.trainer.runs import rlprims

GRPO = {"preset": "grpo", "kl_coef": 0.0, "group_size": 3}
Run = Callable[..., Path]


@pytest.fixture
def run(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """A run of five steps of GRPO, with other settings; its directory."""
    monkeypatch.setattr("rlprims.trainer.session.draw_curves", lambda runs, out: out)  # the slowest part
    monkeypatch.setattr("rlprims.fit.session.draw_curves", lambda runs, out: out)

    def start(*overrides: str, command: str = "train", **changes: Any) -> Path:
        if command == "train":
            values = settings | {"algorithm": GRPO, "prompts_per_generation": None, "steps": 5}
            values |= {"evaluation": {"every": 100, "limit": 2, "samples": 1}, "checkpoint": {"every": 100}}
        else:
            values = {name: settings[name] for name in ("run_dir", "optimizer")} | {"model": {}, "data": {}}
        for name, value in changes.items():
            values[name] = {**values[name], **value} if name in ("model", "data", "sampling") else value
        rlprims(command, write_config(values), *overrides)
        return tmp_path / "run"

    return start


def causes(path: Path) -> set[str]:
    return {code for mark, code, *_ in diagnose(RunFiles.read(path)) if mark in ("no", "slow")}


def tried(path: Path) -> set[str]:
    return {code for mark, code, *_ in diagnose(RunFiles.read(path)) if mark != "–"}


def chat_model(directory: Path, turn: str) -> Path:
    """A model whose template begins with abc, and ends with the beginning of the assistant's turn."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "abc{% for m in messages %}{{ m.content }}{% endfor %}" + turn
    tiny.save_model(directory)
    tokenizer.save_pretrained(directory)
    return directory


def sampled(change: Callable[[LocalExecution, DataProto], DataProto], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that is sampled is changed."""
    generate = LocalExecution.generate
    monkeypatch.setattr(LocalExecution, "generate", lambda self, *a, **k: change(self, generate(self, *a, **k)))


def no_rate(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("rlprims.execution.hf._train_state.learning_rate", lambda *_: 0.0)
    return run()


def a_verifier_that_never_finds_it(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return run(verifier="tests.trainer.verifiers.always_wrong")


def a_verifier_that_mostly_fails(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return run(verifier="tests.trainer.verifiers.fails_without_a_tag", unscored="leave_out")


def scores_of_questions(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return run(verifier="tests.trainer.verifiers.of_the_question")


def an_adapter_that_stays(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The sampler has the weights of the start."""
    generate = LocalExecution.generate

    def stale(self: LocalExecution, *args: Any, **kwargs: Any) -> DataProto:
        weights = [x.data for name, x in self.training.policy.module.named_parameters() if "lora_B" in name]
        kept = [x.clone() for x in weights]
        for x in weights:
            x.zero_()
        rows = generate(self, *args, **kwargs)
        for x, value in zip(weights, kept, strict=True):
            x.copy_(value)
        return rows

    monkeypatch.setattr(LocalExecution, "generate", stale)
    return run("optimizer.lr=0.01", model={"lora": {}})


def sets_that_are_lost(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A run ends in its first step then: here, as in another version, nothing compares."""

    def without_sets(_: LocalExecution, rows: DataProto) -> DataProto:
        return rows.select([name for name in rows.batch.keys() if not name.startswith("kept")])  # noqa: SIM118

    sampled(without_sets, monkeypatch)
    monkeypatch.setattr("rlprims.trainer.loop.disagreements", lambda *_: ())
    return run(sampling={"top_k": 6})


def means_of_micro_batches(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("rlprims.execution.local.with_counts", lambda batch, _: (batch, {}))
    return run("model.max_tokens_per_micro_batch=40", algorithm=GRPO | {"aggregation": "rlprims.losses.token_mean"})


def products_of_long_responses(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """0.05 nats a token, which bfloat16 may explain, over 60 tokens: exp(-3) = 0.05."""

    def too_likely(_: LocalExecution, rows: DataProto) -> DataProto:
        rows["rollout_log_probs"] = rows["rollout_log_probs"] + 0.05 * rows["response_mask"]
        return rows

    sampled(too_likely, monkeypatch)
    product = {"fn": "rlprims.corrections.importance_weights", "level": "sequence"}
    limits = {"sampling": {"max_new_tokens": 60}, "steps": 3}
    return run(algorithm=GRPO | {"corrections": [product]}, model={"dtype": "bfloat16"}, **limits)


def a_template_that_is_edited(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Between the start of a run and its resume: the assistant's turn now begins with more."""
    path = run("data.template=chat", model={"path": str(chat_model(tmp_path / "model", "def"))}, steps=4)
    chat_model(tmp_path / "model", "defghi")
    rlprims("resume", path, "steps=8")
    return path


def a_critic_that_stands_still(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    ppo = {"preset": "ppo", "group_size": 2, "lam": 1.0}
    return run("critic.optimizer={lr: 1.0e-12}", steps=24, algorithm=ppo)


PLANTED = {
    no_rate: "learning-rate",
    a_verifier_that_never_finds_it: "verifier",
    a_verifier_that_mostly_fails: "verifier",
    scores_of_questions: "dead-groups",
    an_adapter_that_stays: "stale-weights",
    sets_that_are_lost: "truncation",
    means_of_micro_batches: "denominators",
    products_of_long_responses: "sequence-weights",
    a_template_that_is_edited: "template",
    a_critic_that_stands_still: "critic",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_and_no_other(
    plant: Any, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = plant(run, monkeypatch, tmp_path)
    assert causes(path) == {PLANTED[plant]}
    assert main(["doctor", str(path)]) == (PLANTED[plant] not in {"critic", "dead-groups"})


Curve = Callable[[float], float]
HELD_OUT = "sampled/acc"
FLAT: dict[str, Curve] = {"score": lambda t: 0.5, "length": lambda t: 200.0, "length_score_correlation": lambda t: 0.0,
                          "entropy": lambda t: 0.6, "approx_kl": lambda t: 0.003, HELD_OUT: lambda t: 0.4}  # fmt: skip
LONGER: dict[str, Curve] = {"length": lambda t: 200 * 3**t, "length_score_correlation": lambda t: 0.7 * t,
                            "score": lambda t: 0.3 + 0.5 * t}  # fmt: skip
SHORTER: dict[str, Curve] = {"length": lambda t: 200 / 4**t, "length_score_correlation": lambda t: -0.6 * t}
SURER: dict[str, Curve] = {"entropy": lambda t: 0.6 * 0.03**t}

COLLAPSED: dict[str, tuple[dict[str, Curve], str]] = {
    "long answers score, and are not right more often": (LONGER, "length-hacking"),
    "short answers score": (SHORTER, "length-hacking"),
    "the entropy is gone and the task unsolved": (
        SURER | {"score": lambda t: min(0.6, 0.3 + t)},
        "entropy-collapse",
    ),
    "the policy leaves its reference": ({"ref_kl": lambda t: 1.5 * t**2}, "kl-grows"),
    "the steps are larger than a trust region": ({"approx_kl": lambda t: 0.003 * 100**t}, "kl-grows"),
    "the gradient was never applied": ({"lr": lambda t: 0.0}, "learning-rate"),
    "the schedule ended long ago": ({"lr": lambda t: 1e-6 * max(0.0, 1 - 4 * t)}, "learning-rate"),
}
LEARNED: dict[str, dict[str, Curve]] = {
    "nothing changes": {},
    "long answers are right": LONGER | {HELD_OUT: lambda t: 0.3 + 0.4 * t},
    "short answers are right": SHORTER | {HELD_OUT: lambda t: 0.3 + 0.4 * t},
    "the task is solved": SURER | {"score": lambda t: min(0.97, 0.3 + t)},
    "the score still rises": SURER | {"score": lambda t: 0.1 + 0.6 * t},
    "the reference is near": {"ref_kl": lambda t: 0.3 * t},
    "one step is far away": {"approx_kl": lambda t: 0.003 + 2 * (abs(t - 0.5) < 0.01)},
    "the last step is far away": {"approx_kl": lambda t: 0.003 + 0.3 * (t == 1)},
    "the schedule ends at 0": {"lr": lambda t: 1e-6 * (1 - t)},
}


@pytest.fixture
def curves(settings: dict[str, Any], load: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """A run of sixty steps, written as the trainer writes it, whose metrics follow curves of the time from 0 to 1."""

    def write(changes: dict[str, Curve], steps: int = 60) -> Path:
        config = load(settings | {"algorithm": GRPO, "prompts_per_generation": None, "steps": steps})
        with RunDirectory.claim(tmp_path / "curves") as run:
            run.begin(config)
        for step in range(1, steps + 1):
            t, noise = (step - 1) / (steps - 1), 1 + 0.1 * ((7 * step) % 11 / 5 - 1)
            line = {name: curve(t) * noise for name, curve in (FLAT | changes).items() if name != HELD_OUT}
            run.log("train", step, {"lr": 1e-6, "staleness_max": 0.0, "mismatch_k3": 1e-9, "filter_yield": 1.0} | line)
            if step % 20 == 1 or step == steps:
                run.log("eval", step, {HELD_OUT: (FLAT | changes)[HELD_OUT](t)})
        return run.path

    return write


@pytest.mark.parametrize("name", COLLAPSED)
def test_a_curve_that_collapses_is_named_with_its_step(name: str, curves: Callable[..., Path]) -> None:
    changes, code = COLLAPSED[name]
    path = curves(changes)
    assert causes(path) == {code}
    (found,) = [found for mark, _, found, _ in diagnose(RunFiles.read(path)) if mark in ("no", "slow")]
    since = int(found.rpartition("since step ")[2])
    assert since == {"the gradient was never applied": 1, "the schedule ended long ago": 16}.get(name, since)
    assert code == "learning-rate" or 10 < since < 60


@pytest.mark.parametrize("name", LEARNED)
def test_a_curve_of_a_run_that_learns_is_not(name: str, curves: Callable[..., Path]) -> None:
    assert causes(curves(LEARNED[name])) == set()


def test_what_cannot_be_told_is_said(curves: Callable[..., Path]) -> None:
    """Too few steps, no records, no critic."""
    said = {code: found for mark, code, found, _ in diagnose(RunFiles.read(curves({}, 19))) if mark == "–"}
    assert said["entropy-collapse"] == "not tried: 19 lines with entropy, and it needs 20"
    assert said["critic"] == "not tried: no explained_variance"
    assert said["denominators"].startswith("not tried: ")
    assert said["template"] == "not tried: no recorded rollouts"


def test_a_run_without_a_step_is_one_line(curves: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = curves({})
    (path / "metrics.jsonl").write_text("")
    assert main(["doctor", str(path)]) == 2
    assert "curves has no step in metrics.jsonl: what ended it stands in its terminal" in capsys.readouterr().err
    assert main(["doctor", str(path), "lr=1"]) == 2
    assert "is a run, whose files are read: leave lr=1 out" in capsys.readouterr().err


def preset(name: str, **changes: Any) -> dict[str, Any]:
    return {"algorithm": {"preset": name, "group_size": 3, **changes}}


DAPO = preset("dapo", max_length=8, buffer_length=4, filter={"max_generation_batches": 50})
TIS = GRPO | {"corrections": ["rlprims.corrections.tis"]}
GEOMETRIC = {"fn": "rlprims.corrections.importance_weights", "level": "sequence", "mean": "geometric"}
EPISODES = {"data": {"environment": "tests.trainer.environments.Digits"}, "verifier": None}

HEALTHY: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "grpo with a reference": ((), preset("grpo")),
    "dapo with dropped groups": ((), DAPO),
    "rloo in padded micro-batches": (("model.max_tokens_per_micro_batch=40", "model.packing=false"), preset("rloo")),
    "gspo, four updates a batch": ((), preset("gspo", mini_batches=2, epochs=2)),
    "an adapter and batches ahead": (("max_staleness=1", "model.lora={}", "optimizer.lr=0.01"), {"algorithm": TIS}),
    "top-p": (("sampling.top_p=0.8", "sampling.top_k=20"), {"algorithm": TIS}),
    "top-k with the fused head": (("sampling.top_k=6", "model.fused_head=true"), preset("dr_grpo")),
    "episodes": (("episode_limits.turns=3",), EPISODES | preset("grpo", kl_coef=0.0)),
    "a chat template": (("data.template=chat",), {}),
    "bfloat16": (("model.dtype=bfloat16",), {"algorithm": TIS | {"aggregation": "rlprims.losses.token_mean"}}),
}
LONG: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ppo": ((), preset("ppo", lam=1.0) | {"prompts_per_step": 8}),
    "ppo with a KL in the reward": ((), preset("ppo", lam=1.0, kl_in_reward={"estimator": "k1"})),
    "grpo with a reference": ((), preset("grpo", kl_coef=0.05)),
    "dapo": ((), DAPO),
    "reinforce": ((), {"algorithm": {"preset": "reinforce", "group_size": 1}, "prompts_per_step": 12}),
    "remax": ((), preset("remax")),
    "cispo, two updates a batch": ((), preset("cispo", mini_batches=2)),
    "log-probs of the sampler": (("recompute_log_probs_every=2",), {}),
    "weights of responses": (("max_staleness=1",), {"algorithm": GRPO | {"corrections": [GEOMETRIC]}}),
    "episodes of ppo": (
        ("episode_limits.turns=3", "critic.optimizer={lr: 0.01}"),  # with that of the policy it explains 0.4 %
        EPISODES | preset("ppo", lam=1.0),
    ),
}


def healthy(run: Run, overrides: tuple[str, ...], changes: dict[str, Any], directory: Path, steps: int) -> Path:
    changes = {"model": {"path": str(chat_model(directory / "model", "def"))}, "steps": steps} | changes
    return run(*overrides, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name: str, run: Run, tmp_path: Path) -> None:
    path = healthy(run, *HEALTHY[name], tmp_path, 4)
    assert causes(path) == set()
    assert main(["doctor", str(path)]) == 0
    untold = {"rloo in padded micro-batches": "stale-weights", "gspo, four updates a batch": "denominators"}
    needs = {"learning-rate", "verifier", "dead-groups", "stale-weights", "truncation", "denominators", "template"}
    assert tried(path) >= needs - {untold.get(name, "truncation" if "fused" in name else "")}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_healthy_run_of_thirty_steps_raises_none(name: str, run: Run, tmp_path: Path) -> None:
    path = healthy(run, *LONG[name], tmp_path, 30)
    assert causes(path) == set()
    assert tried(path) >= {"entropy-collapse", "length-hacking", *(["critic"] if "ppo" in name else [])}


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_of_a_run_on_stored_rows_some_checks_apply(loss: str, run: Run, model: Path, tmp_path: Path) -> None:
    pair = loss != "sft"
    rows = [{"prompt": row["question"], "chosen" if pair else "response": row["answer"]} for row in tiny.sums(20)]
    path = tiny.write_jsonl(tmp_path / "rows.jsonl", [row | {"rejected": "a"} for row in rows])
    stored = {"loss": loss, "model": {"path": str(model)}, "data": {"train": str(path)}, "rows_per_step": 4}
    found = run(command="fit", **stored)
    assert causes(found) == set()
    assert tried(found) == {"learning-rate"}


def test_the_table_of_the_docs_has_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "something_is_wrong.md").read_text()
    named = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(named) == sorted(CHECKS)
    assert set(MILD) < set(CHECKS)
