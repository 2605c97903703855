"""What every step keeps: whole groups, no sample lost, the same run from the same seed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.algorithms import Algorithm
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import UpdateReport
from rlprims.filters import SamplingExhausted
from rlprims.grouping import dense_ids
from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, start
from rlprims.trainer.update import mini_batches


def trainer_of(config: Config, console: Console) -> Trainer:
    parts = build(config, console)
    return Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)


def run(config: Config, console: Console) -> tuple[Trainer, list[StepResult]]:
    trainer, steps = trainer_of(config, console), list[StepResult]()
    train(trainer, [lambda _, step: steps.append(step)])
    return trainer, steps


def test_every_training_batch_has_whole_groups_that_differ(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings)
    _, steps = run(config, console)
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        groups = step.batch["group"].reshape(4, 3)
        assert (groups == groups[:, :1]).all()
        assert len(set(groups[:, 0].tolist())) == 4
        accuracy = step.batch["acc"].reshape(4, 3)
        assert ((accuracy.amax(1) - accuracy.amin(1)) > 0).all()
        assert all(reason in ("acc is 0 throughout", "acc is 1 throughout") for _, reason in step.dropped)


def test_every_sample_is_trained_or_dropped_or_surplus_exactly_once(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    trainer, steps = run(load(settings, "seed=1"), console)
    trained = [i for step in steps for i in step.batch["sample_id"].tolist()]
    dropped = [i for step in steps for rows, _ in step.dropped for i in rows["sample_id"].tolist()]
    surplus = [i for rows in trainer.collector.surplus for i in rows["sample_id"].tolist()]
    assert sorted(trained + dropped + surplus) == list(range(trainer.collector.prompts.samples))
    assert surplus, "six prompts a generation and four a step leave a surplus in some step of this run"
    assert sum(step.metrics["groups_sampled"] for step in steps) * 3 == trainer.collector.prompts.samples


def test_the_surplus_of_older_weights_does_not_hide_what_the_sampler_does_now(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Fresh tokens differ by rounding alone, whatever the updates did to the surplus beside them."""
    _, steps = run(load(settings, "seed=1", "optimizer.lr=1e-2"), console)
    both = [step for step in steps if "mismatch_max_stale" in step.metrics]
    assert both
    assert all(step.metrics["mismatch_max"] < 1e-4 for step in steps)
    for step in both:
        versions, mask = step.batch["weights_version"], step.batch["response_mask"]
        apart = (step.batch["old_log_probs"] - step.batch["rollout_log_probs"]).abs()
        older = mask & (versions < step.number)[:, None]
        assert step.metrics["mismatch_max_stale"] == pytest.approx(float(apart[older].max()))
        assert step.metrics["mismatch_max_stale"] > 1e-3


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    def history(*overrides: str) -> list[dict[str, float]]:
        _, steps = run(load(settings, "steps=3", *overrides), console)
        return [{k: v for k, v in step.metrics.items() if not k.startswith("time/")} for step in steps]

    assert history() == history()
    assert history() != history("seed=1")


@pytest.mark.parametrize(
    ("algorithm", "present", "absent"),
    [
        ({"preset": "rloo"}, set(), {"old_log_probs", "ref_log_probs", "values", "baseline_scores"}),
        ({"preset": "grpo", "group_size": 2}, {"old_log_probs", "ref_log_probs"}, {"values", "baseline_scores"}),
        ({"preset": "ppo", "group_size": 2}, {"old_log_probs", "values", "returns"}, {"ref_log_probs"}),
        ({"preset": "remax", "group_size": 2}, {"baseline_scores"}, {"old_log_probs", "values"}),
        (
            {"preset": "ppo", "kl_in_reward": {"controller": "rlprims.controllers.AdaptiveKL"}},
            {"ref_log_probs", "values"},
            {"baseline_scores"},
        ),
    ],
)
def test_the_trainer_computes_what_some_signature_asks_for_and_no_more(
    load: Callable[..., Config],
    settings: dict[str, Any],
    console: Console,
    algorithm: dict[str, Any],
    present: set[str],
    absent: set[str],
) -> None:
    _, steps = run(load(settings | {"algorithm": algorithm, "steps": 2}), console)
    columns = set(steps[0].batch.batch.keys())
    assert present <= columns
    assert not absent & columns


def test_remax_compares_with_the_greedy_response_of_the_same_prompt(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    _, (step,) = run(load(settings | {"algorithm": {"preset": "remax", "group_size": 2}, "steps": 1}), console)
    baselines = [rows for rows, reason in step.dropped if reason == "greedy baseline"]
    greedy = {int(row["group"]): float(row["scores"]) for rows in baselines for row in rows.split(1)}
    for row in step.batch.split(1):
        mask = row["response_mask"][0]
        expected = float(row["scores"]) - greedy[int(row["group"])]
        torch.testing.assert_close(row["advantages"][0][mask], torch.full((int(mask.sum()),), expected))


def test_kl_in_reward_begins_at_zero_and_grows_as_the_policy_leaves(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    algorithm = {"preset": "ppo", "kl_in_reward": {"controller": {"fn": "rlprims.controllers.FixedKL", "kl_coef": 0.5}}}
    _, steps = run(load(settings | {"algorithm": algorithm, "steps": 4, "optimizer": {"lr": 0.01}}), console)
    first, last = steps[0].batch, steps[-1].batch
    torch.testing.assert_close(first["rewards"].sum(-1), first["shaped_scores"], atol=1e-5, rtol=0)
    drift = (last["old_log_probs"] - last["ref_log_probs"]).abs()
    assert float(drift.max()) > 0.01
    penalty = last["shaped_scores"] - last["rewards"].sum(-1)
    expected = 0.5 * (last["old_log_probs"] - last["ref_log_probs"]).sum(-1)
    torch.testing.assert_close(penalty, expected, atol=1e-5, rtol=1e-4)


def test_mini_batches_are_whole_groups_and_count_as_updates(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    trainer = trainer_of(load(settings, "algorithm.mini_batches=2", "algorithm.epochs=3", "steps=1"), console)
    step = trainer.step()
    parts = list(mini_batches(trainer.config, step.batch, step=1, epoch=0))
    assert sorted(torch.cat([part["sample_id"] for part in parts]).tolist()) == sorted(step.batch["sample_id"].tolist())
    for part in parts:
        _, counts = part["group"].unique(return_counts=True)
        assert counts.tolist() == [3, 3]
    assert trainer.execution.training.policy.update == 6  # type: ignore[attr-defined]
    assert step.metrics["ratio_max"] > 1


def test_mini_batches_of_rollouts_of_several_rows(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Groups of 3 and 5 rows and so on; ids are dense in each mini-batch, as every primitive asks."""
    trainer = trainer_of(load(settings, "algorithm.mini_batches=2", "steps=1"), console)
    batch = trainer.step().batch
    rows = [row for row in range(len(batch)) for _ in range(1 + row % 2)]
    cut = batch.select_idxs(rows)
    cut["trajectory_ids"] = torch.tensor(rows)
    parts = list(mini_batches(trainer.config, cut, step=1, epoch=0))
    assert sorted(torch.cat([part["sample_id"] for part in parts]).tolist()) == sorted(cut["sample_id"].tolist())
    for part in parts:
        assert part["trajectory_ids"].unique().tolist() == list(range(6))
        assert torch.equal(part["trajectory_ids"], dense_ids(part["sample_id"]))
        assert part["group_ids"].unique().tolist() == [0, 1]


def test_mini_batches_are_dealt_anew_at_each_pass(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    trainer = trainer_of(load(settings, "algorithm.mini_batches=4", "algorithm.epochs=3"), console)
    batch = trainer.step().batch
    orders = set()
    for step in range(1, 5):
        for epoch in range(3):
            parts = mini_batches(trainer.config, batch, step=step, epoch=epoch)
            orders.add(tuple(int(part["group"][0]) for part in parts))
    assert len(orders) > 6, "of 12 passes over 4 groups"


def test_critic_warmup_does_not_change_the_policy(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings | {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 2}, "steps": 3})
    trainer = trainer_of(config, console)
    policy = trainer.execution.training.policy.module  # type: ignore[attr-defined]
    before = [p.clone() for p in policy.parameters()]
    for number in (1, 2, 3):
        step = trainer.step()
        moved = any(not torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
        assert moved == (number == 3)
        assert "critic/loss" in step.metrics


def test_a_critic_of_several_updates_is_that_of_as_many_separate_ones(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two mini-batches: three times the first, then the policy, three times the second."""
    changes: dict[str, Any] = {"preset": "ppo", "mini_batches": 2}
    optimizer = {"lr": 1e-2, "schedule": "linear"}
    critic = {"updates_per_policy_update": 3, "optimizer": optimizer, "freeze": ["self_attn"]}
    config = load(settings | {"algorithm": changes, "critic": critic, "steps": 1})
    trainer, other = trainer_of(config, console), trainer_of(config, console)
    calls: list[tuple[str, DataProto]] = []

    def counted(name: str) -> Callable[..., UpdateReport]:
        verb = getattr(trainer.execution, name)
        return lambda mini, algorithm: (calls.append((name, mini)), verb(mini, algorithm))[1]  # type: ignore[func-returns-value]

    for name in ("update", "update_critic"):
        monkeypatch.setattr(trainer.execution, name, counted(name))
    step = trainer.step()
    assert [name for name, _ in calls] == [*["update_critic"] * 3, "update"] * 2
    reports = [other.execution.update_critic(mini, config.algorithm) for name, mini in calls if name == "update_critic"]
    mine, theirs = (each.execution.training.critic for each in (trainer, other))  # type: ignore[attr-defined]
    assert (mine.update, mine.updates) == (theirs.update, theirs.updates) == (6, 6)
    assert all(map(torch.equal, mine.module.parameters(), theirs.module.parameters()))
    assert step.metrics["critic/loss"] == pytest.approx(sum(report.loss for report in reports) / 6)
    assert [report.lr for report in reports] == pytest.approx([1e-2 * left / 5 for left in (5, 4, 3, 2, 1, 0)])


@pytest.mark.parametrize("critic", [{"freeze": ["self_attn"]}, {"updates_per_policy_update": 2}])
def test_settings_of_a_critic_that_is_not_there(
    load: Callable[..., Config], settings: dict[str, Any], critic: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"critic.freeze, updates_per_policy_update: dapo trains no critic"):
        load(settings | {"critic": critic})


def test_scores_that_are_no_numbers_cost_their_group_and_are_counted(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    config = load(settings | {"verifier": "tests.trainer.verifiers.raises_on_some", "steps": 3,
                              "algorithm": {"preset": "rloo", "group_size": 2}})  # fmt: skip
    _, steps = run(config, console)
    failed = [rows for step in steps for rows, reason in step.dropped if reason == "a score is not finite"]
    assert sum(step.metrics["groups_failed"] for step in steps) == len(failed) > 0
    assert all(any("raised RuntimeError: cannot read this" in str(f) for f in rows["failure"]) for rows in failed)
    for step in steps:
        assert step.batch["scores"].isfinite().all()
        assert len(step.batch) == 8


@pytest.mark.parametrize(
    ("verifier", "seen"),
    [
        ("always_right", "0 of 4 groups after 3 generation batches.*18 dropped: acc is 1 throughout"),
        ("never_a_number", "none of 54 responses could be scored by .*never_a_number: 54 returned nan"),
    ],
)
def test_the_limit_ends_with_what_was_seen(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, verifier: str, seen: str
) -> None:
    config = load(
        settings | {"verifier": f"tests.trainer.verifiers.{verifier}"}, "algorithm.filter.max_generation_batches=3"
    )
    with pytest.raises(SamplingExhausted, match=seen):
        trainer_of(config, console).step()


def test_a_prompt_that_fills_the_window(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    with pytest.raises(ValueError, match="expected fewer tokens than the model's window of 128"):
        build(load(settings, "sampling.max_new_tokens=128"), console)
    with pytest.raises(ValueError, match="all 20 prompts are longer than 2 tokens"):
        build(load(settings, "sampling.max_new_tokens=126"), console)


WEIGHED = {
    "preset": "dapo",
    "group_size": 3,
    "max_length": 8,
    "buffer_length": 4,
    "filter": {"max_generation_batches": 50},
    "corrections": ["rlprims.corrections.tis", "rlprims.corrections.token_veto"],
    "token_selection": {"fn": "rlprims.filters.clip_cov", "fraction": 0.2, "low": -9.0, "high": 9.0},
    "loss_terms": [
        {"coefficient": 0.01, "loss": "rlprims.losses.negative_entropy", "tokens": "rlprims.filters.high_entropy"},
    ],
}


def test_a_run_with_corrections_and_selections_trains_and_repeats(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    def history(*overrides: str) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
        trainer = trainer_of(load(settings | {"algorithm": WEIGHED}, "steps=2", *overrides), console)
        policy = trainer.execution.training.policy.module  # type: ignore[attr-defined]
        before = [p.clone() for p in policy.parameters()]
        metrics = [trainer.step().metrics for _ in range(2)]
        assert all(line["skipped_updates"] == 0 and line["grad_norm"] > 0 for line in metrics)
        assert any(not torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
        plain = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in metrics]
        return plain, [p.detach().clone() for p in policy.parameters()]

    first, again = history(), history()
    assert first[0] == again[0]
    assert all(torch.equal(p, q) for p, q in zip(first[1], again[1], strict=True))
    everything, _ = history("algorithm.token_selection=null")
    assert everything[0]["loss"] != first[0][0]["loss"]


def test_token_weights_are_of_the_policy_before_the_update(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Six updates of a batch: one pass for the old log-probs, and one before each update but the first."""
    config = load(
        settings | {"algorithm": WEIGHED}, "algorithm.mini_batches=2", "algorithm.epochs=3", "optimizer.lr=0.05"
    )
    trainer = trainer_of(config, console)
    execution, seen = trainer.execution, list[tuple[int, torch.Tensor, torch.Tensor]]()
    log_probs, asked = execution.log_probs, list[torch.Tensor]()

    def counted(batch: DataProto, *, reference: bool = False, plain: bool = False) -> torch.Tensor:
        if plain or len(batch) == 8:  # the comparison of a row alone, in the first step
            return log_probs(batch, plain=plain)
        asked.append(log_probs(batch, reference=reference))
        return asked[-1]

    def update(batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        seen.append((len(asked), log_probs(batch), batch["old_log_probs"]))
        assert {"loss_weights", "loss_terms.0.tokens"} <= set(batch.batch.keys())
        return original(batch, algorithm)

    original = execution.update
    execution.log_probs, execution.update = counted, update  # type: ignore[method-assign]
    trainer.step()
    assert [count for count, *_ in seen] == [1, 2, 3, 4, 5, 6]
    for number, now, old in seen:
        expected = old if number == 1 else asked[number - 1]
        torch.testing.assert_close(now, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(seen[-1][1], seen[-1][2], atol=1e-3), "the policy has moved by the last update"


def test_fipo_weighs_from_the_second_update_on_and_cost_shapes_the_score(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    """Before the first update no token has an influence; then they weigh up to 1.2."""
    algorithm = {
        "preset": "fipo",
        "group_size": 3,
        "max_length": 8,
        "buffer_length": 4,
        "filter": {"max_generation_batches": 50},
        "score_shaping": ["rlprims.rewards.cost_per_token"],
        "mini_batches": 2,
    }
    trainer = trainer_of(load(settings | {"algorithm": algorithm}, "optimizer.lr=0.05"), console)
    weights = list[torch.Tensor]()
    update = trainer.execution.update

    def seen(batch: DataProto, algorithm: Algorithm) -> UpdateReport:
        weights.append(batch["loss_weights"][batch["response_mask"]])
        return update(batch, algorithm)

    trainer.execution.update = seen  # type: ignore[method-assign]
    step = trainer.step()
    assert bool((weights[0] == 1).all())
    assert bool(((weights[1] >= 1) & (weights[1] <= 1.2)).all())
    assert bool((weights[1] > 1).any())
    assert bool((step.batch["cost_per_token"] < 0).any())
    torch.testing.assert_close(step.batch["shaped_scores"], step.batch["scores"] + step.batch["cost_per_token"])


def ended_by_length(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, policy: str
) -> tuple[DataProto, StepResult]:
    """The step, and the batch that the policy was updated on."""
    algorithm = settings["algorithm"] | {"ended": {"length": policy}}
    trainer = trainer_of(load(settings | {"algorithm": algorithm}, "steps=1"), console)
    updated = list[DataProto]()
    update = trainer.execution.update
    trainer.execution.update = lambda batch, a: updated.append(batch) or update(batch, a)  # type: ignore[method-assign, assignment, func-returns-value]
    step = trainer.step()
    return updated[0], step


def test_responses_at_their_limit_are_masked_and_count_in_their_group(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    updated, step = ended_by_length(load, settings, console, "mask_turn")
    _, scored = ended_by_length(load, settings, console, "score")
    cut = step.batch["ended"] == Ended.LENGTH
    assert 0 < int(cut.sum()) < len(cut)
    assert torch.equal(updated["response_mask"].any(-1), ~cut)
    assert torch.equal(step.batch["response_mask"], scored.batch["response_mask"])  # on record as it was sampled
    assert not step.batch["advantages"][cut].any()
    torch.testing.assert_close(step.batch["advantages"][~cut], scored.batch["advantages"][~cut])
    assert step.metrics["grad_norm"] > 0
    assert step.metrics["grad_norm"] != scored.metrics["grad_norm"]


def test_responses_at_their_limit_are_left_out(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    _, step = ended_by_length(load, settings, console, "leave_out")
    cut = step.batch["ended"] == Ended.LENGTH
    assert 0 < int(cut.sum()) < len(cut)
    assert torch.equal(step.batch["valid_rows"], ~cut)
    assert not step.batch["advantages"][cut].any()
    assert step.batch["shaped_scores"].isfinite().all()


@pytest.mark.slow
def test_groups_with_a_response_at_its_limit_are_dropped_and_recorded(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    algorithm = settings["algorithm"] | {"ended": {"length": "drop_group"}}
    sampling = {"max_new_tokens": 60}  # most random responses have ended by then
    config = load(settings | {"algorithm": algorithm, "sampling": sampling}, "steps=1")
    start(config, console)
    lines = [json.loads(line) for path in config.run_dir.glob("rollouts/*.jsonl") for line in path.open()]
    assert {line["ended"] for line in lines} == {"stop", "length"}
    assert {line["ended"] for line in lines if line["status"] == "trained"} == {"stop"}
    assert {line["status"] for line in lines if line["ended"] == "length"} == {"a response ended by length"}


def test_without_a_selection_by_log_probs_none_are_measured_before_an_update(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    trainer = trainer_of(load(settings, "algorithm.mini_batches=2"), console)
    calls = list[int]()
    log_probs = trainer.execution.log_probs

    def counted(batch: DataProto, **options: bool) -> torch.Tensor:
        calls.append(len(batch))
        return log_probs(batch, **options)

    trainer.execution.log_probs = counted  # type: ignore[method-assign]
    trainer.step()
    # The batch, and a row alone in the first step; eight more rows where the sampler's log-probs have the same bits.
    assert [count for count in calls if count != 8] == [12, 1]


def test_gdpo_learns_from_the_columns_of_the_verifier(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    algorithm = {
        "preset": "gdpo",
        "group_size": 3,
        "components": ["acc", "short"],
        "filter": {"keep": "rlprims.filters.varied_components"},
    }
    verifier = "tests.trainer.verifiers.a_digit_and_short"
    config = load(settings | {"algorithm": algorithm, "verifier": verifier, "steps": 1})
    assert config.warnings() == []
    _, (step,) = run(config, console)
    columns = torch.stack([step.batch["acc"], step.batch["short"]], 1)
    torch.testing.assert_close(step.batch["component_scores"], columns)
    assert all(reason == "does not pass filters.varied_components" for _, reason in step.dropped)
    spread = columns.reshape(4, 3, 2).amax(1) - columns.reshape(4, 3, 2).amin(1)
    assert (spread > 0).any(1).all()
