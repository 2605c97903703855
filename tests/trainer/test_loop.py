"""What every step keeps: whole groups, no sample lost, the same run from the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.filters import SamplingExhausted
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Step, Trainer, train
from rlprims.trainer.session import build


def trainer_of(config: Config, console: Console) -> Trainer:
    parts = build(config, console)
    return Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)


def run(config: Config, console: Console) -> tuple[Trainer, list[Step]]:
    trainer, steps = trainer_of(config, console), list[Step]()
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
    trainer, steps = run(load(settings), console)
    trained = [i for step in steps for i in step.batch["sample_id"].tolist()]
    dropped = [i for step in steps for rows, _ in step.dropped for i in rows["sample_id"].tolist()]
    surplus = [i for rows in trainer.sampling.surplus for i in rows["sample_id"].tolist()]
    assert sorted(trained + dropped + surplus) == list(range(trainer.samples))
    assert surplus, "six prompts a generation and four a step leave a surplus in some step of this run"
    assert sum(step.metrics["groups_sampled"] for step in steps) * 3 == trainer.samples


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
    parts = list(trainer._mini_batches(step.batch, 0))
    assert sorted(torch.cat([part["sample_id"] for part in parts]).tolist()) == sorted(step.batch["sample_id"].tolist())
    for part in parts:
        _, counts = part["group"].unique(return_counts=True)
        assert counts.tolist() == [3, 3]
    assert trainer.execution.training.policy.update == 6  # type: ignore[attr-defined]
    assert step.metrics["ratio_max"] > 1


def test_mini_batches_are_dealt_anew_at_each_pass(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    trainer = trainer_of(load(settings, "algorithm.mini_batches=4", "algorithm.epochs=3"), console)
    batch = trainer.step().batch
    orders = set()
    for step in range(1, 5):
        trainer.step_number = step
        for epoch in range(3):
            orders.add(tuple(int(part["group"][0]) for part in trainer._mini_batches(batch, epoch)))
    assert len(orders) > 6, "of 12 passes over 4 groups"


def test_critic_warmup_leaves_the_policy_alone(
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
    [("always_right", "dropped: acc is 1 throughout"), ("never_a_number", "dropped: a score is not finite")],
)
def test_the_limit_ends_with_what_was_seen(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, verifier: str, seen: str
) -> None:
    config = load(
        settings | {"verifier": f"tests.trainer.verifiers.{verifier}"}, "algorithm.filter.max_generation_batches=3"
    )
    with pytest.raises(SamplingExhausted, match=f"0 of 4 groups after 3 generation batches.*18 {seen}"):
        trainer_of(config, console).step()


def test_a_prompt_that_fills_the_window(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    with pytest.raises(ValueError, match="leaves no room for a prompt in the model's window of 128 tokens"):
        build(load(settings, "sampling.max_new_tokens=128"), console)
    with pytest.raises(ValueError, match="all 20 prompts are longer than 2 tokens"):
        build(load(settings, "sampling.max_new_tokens=126"), console)
