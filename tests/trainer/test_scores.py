"""What a score is made of: verifier, reward model and recorded scores; and what a response without one costs."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.reports.progress import print_samples
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.scoring.groups import join_groups, split_groups
from rlprims.trainer.scoring.rewards import score
from rlprims.trainer.session import build, evaluate_parts, start
from tests import tiny
from tests.trainer.runs import metrics_of
from tests.trainer.test_loop import run

Load = Callable[..., Config]
Settings = dict[str, Any]
NAN = float("nan")


@pytest.fixture(scope="session")
def reward(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save_classifier(tmp_path_factory.mktemp("reward"), seed=5))


@pytest.fixture
def rewarded(settings: Settings, reward: str) -> Settings:
    return settings | {"model": {**settings["model"], "reward": reward}, "steps": 1}


class TestARewardModel:
    @pytest.mark.parametrize(
        ("weights", "expected"),
        [
            (None, {"verifier_scores": 1.0, "reward_model_scores": 1.0}),
            ({"verifier_scores": 2.0, "reward_model_scores": 0.5}, None),
            ({"reward_model_scores": 1.0}, None),
            ({"verifier_scores": 1.0}, None),
            ({"acc": 1.0, "reward_model_scores": -0.25}, None),
        ],
    )
    def test_is_weighed_with_the_verifier(
        self, load: Load, rewarded: Settings, console: Console, weights: Any, expected: Any
    ) -> None:
        trainer, (step,) = run(load(rewarded | {"score_weights": weights}), console)
        batch = step.batch
        parts = {name: weight * batch[name] for name, weight in (weights or expected).items()}
        torch.testing.assert_close(batch["scores"], sum(parts.values()))
        torch.testing.assert_close(
            batch["reward_model_scores"], trainer.execution.reward_scores(batch), rtol=1e-5, atol=1e-5
        )
        assert torch.equal(batch["verifier_scores"], batch["acc"])  # of this verifier

    def test_each_part_is_logged_raw(self, load: Load, rewarded: Settings, console: Console) -> None:
        weights = {"verifier_scores": 3.0, "reward_model_scores": 0.5, "acc": 0.0}
        _, (step,) = run(load(rewarded | {"score_weights": weights}), console)
        rows = [step.batch, *(rows for rows, _ in step.dropped), *step.surplus]
        for name in weights:
            mean = torch.cat([part[name] for part in rows]).mean()
            assert step.metrics[f"score/{name}"] == pytest.approx(float(mean), abs=1e-6)
        total = 3 * step.metrics["score/verifier_scores"] + 0.5 * step.metrics["score/reward_model_scores"]
        assert step.metrics["score"] == pytest.approx(total, abs=1e-6)

    def test_is_watched_without_a_weight(self, load: Load, rewarded: Settings, console: Console) -> None:
        _, (step,) = run(load(rewarded | {"score_weights": {"verifier_scores": 1.0}}), console)
        assert "score/reward_model_scores" in step.metrics

    @pytest.mark.parametrize("metric", ["acc", "scores", "shaped_scores", "verifier_scores", "reward_model_scores"])
    def test_a_filter_reads_any_column(self, load: Load, rewarded: Settings, console: Console, metric: str) -> None:
        _, (step,) = run(load(rewarded, f"algorithm.filter.metric={metric}"), console)
        groups = step.batch[metric].reshape(4, 3)
        assert (groups.amax(1) > groups.amin(1)).all()
        assert all(reason.startswith(f"{metric} is ") for _, reason in step.dropped)

    def test_its_score_may_be_a_component(self, load: Load, rewarded: Settings, console: Console) -> None:
        parts = ["verifier_scores", "reward_model_scores"]
        _, (step,) = run(
            load(rewarded | {"algorithm": {"preset": "gdpo", "group_size": 2, "components": parts}}), console
        )
        assert torch.equal(step.batch["component_scores"], torch.stack([step.batch[name] for name in parts], 1))

    def test_evaluation_does_not_ask_it(self, load: Load, rewarded: Settings, settings: Settings) -> None:
        def accuracy(values: Settings) -> dict[str, float]:
            config = load(values)
            console = Console(file=io.StringIO())
            return evaluate_parts(config, build(config, console), console)

        assert accuracy(rewarded | {"score_weights": {"reward_model_scores": 1.0}}) == accuracy(settings)

    def test_the_greedy_baseline_is_scored_alike(self, load: Load, rewarded: Settings, console: Console) -> None:
        _, (step,) = run(load(rewarded | {"algorithm": {"preset": "remax", "group_size": 2}}), console)
        greedy = {int(r["group"]): r for rows, why in step.dropped if why == "greedy baseline" for r in rows.split(1)}
        for row in step.batch.split(1):
            parts = greedy[int(row["group"])]
            expected = parts["verifier_scores"] + parts["reward_model_scores"]
            torch.testing.assert_close(row["baseline_scores"], expected)

    @pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
    def test_a_row_that_a_weighed_source_could_not_score_has_no_score(
        self, load: Load, rewarded: Settings, console: Console
    ) -> None:
        changes = {"verifier": "tests.trainer.verifiers.raises_on_some", "algorithm": {"preset": "rloo"}, "steps": 2}
        _, steps = run(load(rewarded | changes), console)
        failed = [
            row for s in steps for rows, _ in s.dropped for row in rows.split(1) if row["verifier_scores"].isnan()
        ]
        assert failed
        for row in failed:
            assert row["scores"].isnan()
            assert row["reward_model_scores"].isfinite()

    def test_what_it_cannot_read_is_counted(
        self, load: Load, settings: Settings, console: Console, tmp_path: Path
    ) -> None:
        small = str(tiny.save_classifier(tmp_path / "small", max_position_embeddings=10))  # a prompt has 4 tokens
        changes = {"model": {**settings["model"], "reward": small}, "steps": 1, "unscored": "leave_out"}
        algorithm = {"preset": "rloo", "group_size": 4}
        _, (step,) = run(load(settings | changes | {"algorithm": algorithm}), console)
        long = [int((rows["attention_mask"].sum(-1) > 10).sum()) for rows in
                [step.batch, *(rows for rows, _ in step.dropped), *step.surplus]]  # fmt: skip
        assert step.metrics["failures/no reward model score"] == sum(long) > 0


def test_weights_of_what_is_not_there(load: Load, settings: Settings, console: Console) -> None:
    with pytest.raises(ValueError, match=r"there is no reward model: set model\.reward"):
        load(settings | {"score_weights": {"reward_model_scores": 1.0}})
    with pytest.raises(ValueError, match="score_weights"):
        load(settings | {"score_weights": {}})
    with pytest.raises(ValueError, match=r"score_weights names \['f1'\]; the columns are .*'acc'"):
        run(load(settings | {"score_weights": {"f1": 1.0}}), console)
    with pytest.raises(ValueError, match=r"model.reward_template.*write chat"):
        load(settings, "model.reward_template=plain")


class TestKnownScores:
    """``rm_scores`` that came with the responses."""

    def rows(self, rm_scores: torch.Tensor) -> DataProto:
        texts = {name: np.array([name] * 3, dtype=object) for name in ("prompt", "answer", "data_source")}
        texts["response"] = np.array(["1", "2", "a"], dtype=object)
        mask = torch.tensor([[True, True], [True, False], [True, True]])
        return DataProto.from_dict(tensors={"rm_scores": rm_scores, "response_mask": mask}, non_tensors=texts)

    @pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
    def test_stand_and_the_others_are_verified(self, load: Load, settings: Settings) -> None:
        config = load(settings | {"verifier": "tests.trainer.verifiers.raises_on_some"})
        scored = score(None, config, self.rows(torch.tensor([7.5, NAN, 0.0])))  # type: ignore[arg-type]
        assert scored["scores"].tolist() == [7.5, 1.0, 0.0]  # the last would raise
        assert scored["failure"].tolist() == [None, None, None]
        scored = score(None, config, self.rows(torch.tensor([7.5, 1.0, NAN])))  # type: ignore[arg-type]
        assert scored["scores"].nan_to_num(-1).tolist() == [7.5, 1.0, -1.0]
        assert "raised RuntimeError" in scored["failure"][2]

    def test_of_each_token_are_summed(self, load: Load, settings: Settings) -> None:
        config = load(settings | {"verifier": "tests.trainer.verifiers.has_a_digit"})
        tokens = torch.tensor([[0.25, 1.0], [0.5, NAN], [0.0, NAN]])
        scored = score(None, config, self.rows(tokens))  # type: ignore[arg-type]
        assert scored["scores"].tolist() == [1.25, 0.5, 0.0]
        assert scored["acc"].nan_to_num(-1).tolist() == [-1, -1, 0]

    @pytest.mark.parametrize("shaping", [(), ("rlprims.rewards.overlong_penalty",)])
    def test_of_each_token_reach_the_estimators_as_they_are(self, shaping: tuple[str, ...]) -> None:
        """Their sum was put on the last token."""
        options = {"max_length": 3, "buffer_length": 2, "penalty_factor": 0.5}
        algorithm = algorithms.ppo().replace(kl_in_reward=None, score_shaping=[{"fn": fn, **options} for fn in shaping])
        mask = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
        given = torch.tensor([[0.1, 0.7, -0.3], [0.2, 0.4, NAN], [NAN, NAN, 5.0]])
        scores = torch.tensor([0.5, 0.6, 9.0])  # the last row's is the verifier's
        data = {"rm_scores": given, "scores": scores, "response_mask": mask, "values": torch.zeros(3, 3)}
        data |= {"ended": torch.zeros(3, dtype=torch.int8)}
        data |= algorithms.shape_scores(algorithm, data)
        rewards = algorithms.estimate_advantages(algorithm, data)["rewards"]
        late = torch.tensor([-0.5, -0.25, 0.0]) if shaping else torch.zeros(3)
        expected = torch.tensor([[0.1, 0.7, -0.3], [0.2, 0.4, 0.0], [9.0, 0.0, 0.0]])
        expected[range(3), mask.sum(1) - 1] += late
        torch.testing.assert_close(rewards, expected)

    def test_of_each_token_in_a_run(self, load: Load, settings: Settings, console: Console) -> None:
        config = load(settings | {"algorithm": {"preset": "ppo", "group_size": 2}, "steps": 1})
        parts = build(config, console)
        generate = parts.execution.generate

        def scored(*args: Any, **options: Any) -> DataProto:
            rows = generate(*args, **options)
            rows["rm_scores"] = rows["responses"].float().sin()
            return rows

        parts.execution.generate = scored  # type: ignore[method-assign]
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        batch = trainer.step().batch
        mask = batch["response_mask"]
        expected = torch.where(mask, batch["responses"].float().sin(), 0.0)
        torch.testing.assert_close(batch["scores"], expected.sum(1))
        torch.testing.assert_close(batch["rewards"], expected)

    def test_all_known_and_nothing_is_run(self, load: Load, settings: Settings) -> None:
        config = load(settings | {"verifier": "tests.trainer.verifiers.never_a_number"})
        scored = score(None, config, self.rows(torch.tensor([3.0, 2.0, 1.0])))  # type: ignore[arg-type]
        assert scored["scores"].tolist() == [3.0, 2.0, 1.0]

    @pytest.mark.slow
    def test_of_a_recording(self, load: Load, settings: Settings, console: Console, tmp_path: Path) -> None:
        plain = settings | {"algorithm": {"preset": "rloo", "group_size": 2}, "steps": 2, "evaluation": {"limit": 2}}
        assert start(load(plain), console) == 0
        for file in (tmp_path / "run" / "rollouts").glob("step_*.jsonl"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            for line in lines:
                line["score"] = line["sample_id"] / 8
            tiny.write_jsonl(file, lines)
        again = {"run_dir": str(tmp_path / "again"), "replay": str(tmp_path / "run"), "replay_scores": True}
        assert start(load(plain | again), console) == 0
        rows = [json.loads(line) for line in (tmp_path / "again/rollouts/step_000002.jsonl").read_text().splitlines()]
        assert rows
        assert all(row["score"] == row["sample_id"] / 8 for row in rows)
        accuracies = [[line["sampled/acc"] for line in metrics_of(tmp_path / name) if line["kind"] == "eval"][:1]
                      for name in ("run", "again")]  # fmt: skip
        assert accuracies[0] == accuracies[1], "evaluation verifies"


class TestARowWithoutAScore:
    def groups(self, scores: list[float], **columns: torch.Tensor) -> DataProto:
        tensors = {"scores": torch.tensor(scores), "group": torch.arange(len(scores)) // 4, **columns}
        return DataProto.from_dict(tensors=tensors)

    def test_costs_its_group_or_itself(self) -> None:
        rows = self.groups([1, NAN, 0, 1, 1, 1, NAN, 1, NAN, NAN, NAN, NAN])
        algorithm = algorithms.dapo(max_length=8, buffer_length=4).replace(
            group_size=4, score_shaping=(), filter={"metric": "scores"}
        )
        assert split_groups(algorithm, rows)[1] == ["a score is not finite"] * 3
        kept, reasons = split_groups(algorithm, rows, leave_out=True)
        assert reasons == [None, "scores is 1 throughout", "a score is not finite"]
        assert kept[0]["valid_rows"].tolist() == [True, False, True, True]
        assert kept[0]["scores"].isnan().tolist() == [False, True, False, False], "the record stays true"

    def test_the_filters_own_column_is_looked_at_alike(self) -> None:
        rows = self.groups([1, NAN, 0.5, 1], acc=torch.tensor([1, NAN, 0.0, 1]))
        algorithm = algorithms.dapo(max_length=8, buffer_length=4).replace(group_size=4, score_shaping=())
        assert split_groups(algorithm, rows, leave_out=True)[1] == [None]
        rows = self.groups([1, NAN, 0.5, 1], acc=torch.tensor([1, NAN, 1.0, 1]))
        assert split_groups(algorithm, rows, leave_out=True)[1] == ["acc is 1 throughout"]

    @pytest.mark.filterwarnings("ignore:tests.trainer.verifiers")
    def test_in_a_run(self, load: Load, settings: Settings, console: Console) -> None:
        changes = {"verifier": "tests.trainer.verifiers.raises_on_some", "unscored": "leave_out", "steps": 4}
        _, steps = run(load(settings | changes | {"algorithm": {"preset": "grpo", "group_size": 3}}), console)
        left_out = 0
        for step in steps:
            assert all(np.isfinite(value) for value in step.metrics.values())
            for group in step.batch.split(3):
                valid, lengths = group["scores"].isfinite(), group["response_mask"].sum(-1)
                assert torch.equal(valid, group["valid_rows"])
                scores = group["scores"][valid]
                centred = scores - scores.mean()
                expected = torch.zeros(3)
                if len(scores) > 1 and centred.abs().max() > 0:
                    expected[valid] = centred / (scores.std() + 1e-6)
                torch.testing.assert_close(group["advantages"].sum(-1), expected * lengths, rtol=1e-4, atol=1e-5)
                left_out += int((~valid).sum())
        assert left_out > 0

    @pytest.mark.parametrize(
        "algorithm", [{"preset": "ppo"}, {"preset": "grpo", "normalization": "rlprims.advantage.whiten"}]
    )
    def test_an_estimator_that_cannot_leave_rows_out(self, load: Load, settings: Settings, algorithm: Any) -> None:
        with pytest.raises(ValueError, match="leave_out needs an estimator that takes valid_rows, and rlprims"):
            load(settings | {"unscored": "leave_out", "algorithm": algorithm})

    def test_a_greedy_response_without_a_score_costs_the_group(self) -> None:
        rows = self.groups([1, 0, 0, 1, 1, 0, 0, 1], baseline_scores=torch.tensor([NAN] * 4 + [0.5] * 4))
        assert split_groups(algorithms.remax().replace(group_size=4), rows)[1] == ["a score is not finite", None]


def test_columns_that_only_some_rows_have() -> None:
    """Sources of different verifiers, in batches that have not all of them."""
    a = DataProto.from_dict(tensors={"scores": torch.ones(2), "em": torch.ones(2)})
    b = DataProto.from_dict(tensors={"scores": torch.zeros(1), "acc": torch.zeros(1)})
    joined = join_groups([a, b])
    assert joined["em"].nan_to_num(-1).tolist() == [1, 1, -1]
    assert joined["acc"].nan_to_num(-1).tolist() == [-1, -1, 0]
    assert join_groups([a, a])["em"].tolist() == [1] * 4


class TestExamine:
    def test_so_many_of_each_source(self) -> None:
        def texts(*values: str | None) -> Any:
            return np.array(values, dtype=object)

        rows = DataProto.from_dict(
            tensors={"scores": torch.tensor([0.5, 1.0, NAN, 1.0]), "acc": torch.tensor([0.0, 1.0, NAN, 1.0])},
            non_tensors={
                "prompt": texts("1+2=", "3+4=", "5+6=", "who?"),
                "response": texts("[red]3[/red]", "7", "\x1b[2J", "me"),
                "answer": texts("3", "7", "11", "you"),
                "data_source": texts("sums", "sums", "sums", "names"),
                "failure": texts(None, None, "timeout: 3 s", None),
            },
        )
        console = Console(file=io.StringIO(), width=80)
        print_samples(console, "step 3", [rows[:1], rows[1:]], 2)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert shown.count("step 3 · sums") == 2
        assert shown.count("step 3 · names") == 1
        assert "[red]3[/red]" in shown
        assert "scores 0.5  acc 0" in shown
        assert "5+6=" not in shown
        print_samples(console, "step 4", [rows[2:]], 1)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "⟨U+001B⟩[2J" in shown
        assert "timeout: 3 s" in shown

    @pytest.mark.slow
    def test_in_a_run(self, load: Load, settings: Settings, console: Console) -> None:
        changes = {
            "steps": 2,
            "print_samples": 1,
            "evaluation": {"print_samples": 2, "every": 2, "samples": 1, "limit": 3},
        }
        assert start(load(settings | changes), console) == 0
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert [shown.count(f"{what} · sums") for what in ("step 1", "step 2", "evaluation")] == [1, 1, 4]
