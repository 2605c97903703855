"""The contract of ``update``: one optimizer step on the whole batch, however it is computed."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, use
from rlprims.execution import OptimizerConfig
from tests.execution.execution_contract import (
    OPTIMIZER,
    identical,
    plain_logits,
    responses,
    training_batch,
    weights,
    with_columns,
)

ENTROPY = LossTerm(coefficient=0.05, loss=use(losses.negative_entropy))
ALGORITHMS = {
    "dapo": algorithms.dapo().replace(score_shaping=()),
    "grpo with KL and entropy": algorithms.grpo().replace(loss_terms=[*algorithms.grpo().loss_terms, ENTROPY]),
    "a mean per prompt": algorithms.dapo().replace(score_shaping=(), aggregation=losses.prompt_token_mean),
    "dr_grpo": algorithms.dr_grpo(max_length=24),
}
REINFORCE = algorithms.reinforce()
SMALL = {"max_tokens_per_micro_batch": 100}
SLOW = OptimizerConfig(lr=1e-4, weight_decay=0)


@pytest.fixture(scope="module")
def batch(execution):
    return training_batch(execution)


@pytest.fixture(scope="module")
def whole(fresh, batch, tmp_path_factory):
    """Report and weights of one update in one micro-batch, for each algorithm."""
    done = {}
    for name, algorithm in ALGORITHMS.items():
        execution = fresh(algorithm)
        report = execution.update(batch, algorithm)
        done[name] = report, weights(execution, tmp_path_factory.mktemp("whole") / "save")
    return done


@pytest.mark.parametrize("tokens", [40, 100])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_micro_batches_do_not_change_the_step(fresh, batch, whole, tmp_path, name, tokens):
    report, expected = whole[name]
    # With the reference, which only one of them asks for: the others are the same beside it.
    execution = fresh(ALGORITHMS["grpo with KL and entropy"], max_tokens_per_micro_batch=tokens)
    split = execution.update(batch, ALGORITHMS[name])
    assert split.loss == pytest.approx(report.loss, rel=1e-5, abs=1e-6)
    assert split.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
    assert split.metrics.keys() == report.metrics.keys()
    for metric, value in report.metrics.items():
        assert float(split.metrics[metric].value()) == pytest.approx(float(value.value()), rel=1e-5, abs=1e-6), metric
    after = weights(execution, tmp_path / "save")
    for parameter, value in expected.items():
        torch.testing.assert_close(after[parameter], value, rtol=1e-5, atol=1e-5 * OPTIMIZER.lr * 10)


def test_a_loss_that_compares_the_responses_of_a_group_gets_them_together(fresh, batch):
    """Rows of a group are not neighbours, and a micro-batch has room for two groups."""
    algorithm, rows = algorithms.real(), batch.select_idxs([0, 2, 4, 6, 1, 3, 5, 7])
    report, split = (fresh(algorithm, **options).update(rows, algorithm) for options in ({}, SMALL))
    assert split.loss == pytest.approx(report.loss, rel=1e-5)
    assert split.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
    assert report.grad_norm > 0


def test_update_is_the_step_that_torch_makes(fresh, batch, model_path, tmp_path):
    """REINFORCE with A = 1 is cross-entropy; row by row, without padding, in one graph."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    targets = [torch.tensor(row) for row in responses(batch)]
    rows = [cross_entropy(plain_logits(model, batch, i), t, reduction="sum") for i, t in enumerate(targets)]
    loss = torch.stack(rows).sum() / sum(map(len, targets))
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert norm > OPTIMIZER.max_grad_norm  # so the clip counts
    for p in model.parameters():
        p.grad *= OPTIMIZER.max_grad_norm / norm
    torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
    ).step()

    execution = fresh(REINFORCE)
    report = execution.update(with_columns(batch, advantages=torch.ones(batch["responses"].shape)), REINFORCE)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert (report.lr, report.skipped) == (OPTIMIZER.lr, False)
    after = weights(execution, tmp_path / "save")
    for name, p in model.named_parameters():
        moved, expected = after[name] - before[name], p.detach() - before[name]
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-3 * OPTIMIZER.lr)
        assert expected.abs().max() > 0.1 * OPTIMIZER.lr


def test_the_temperature_divides_the_logits(fresh, batch, plain):
    report = fresh(REINFORCE, temperature=0.7).update(
        with_columns(batch, advantages=torch.ones(batch["responses"].shape)), REINFORCE
    )
    targets = [torch.tensor(row) for row in responses(batch)]
    rows = [cross_entropy(plain_logits(plain, batch, i) / 0.7, t, reduction="sum") for i, t in enumerate(targets)]
    assert report.loss == pytest.approx(float(sum(rows).detach()) / sum(map(len, targets)), rel=1e-5)


def test_the_entropy_that_is_reported_is_the_distributions(fresh, batch, plain):
    report = fresh(REINFORCE).update(batch, REINFORCE)
    rows = [torch.distributions.Categorical(logits=plain_logits(plain, batch, i)).entropy() for i in range(len(batch))]
    assert float(report.metrics["entropy"].value()) == pytest.approx(float(torch.cat(rows).mean().detach()), rel=1e-5)


def test_update_makes_praised_responses_likelier(fresh, batch):
    execution = fresh(REINFORCE, optimizer=SLOW)
    praise = torch.where(torch.arange(len(batch)) == 2, 1.0, -1.0)[:, None].expand(batch["responses"].shape)
    before = execution.log_probs(batch).sum(-1)
    execution.update(with_columns(batch, advantages=praise.clone()), REINFORCE)
    assert torch.equal(execution.log_probs(batch).sum(-1) > before, torch.arange(len(batch)) == 2)


class TestTermsOfTheLoss:
    """With advantages of 0 the added terms are all that moves."""

    def update_twice(self, fresh, batch, algorithm):
        execution = fresh(algorithm, optimizer=SLOW)
        still = with_columns(batch, advantages=torch.zeros(batch["responses"].shape))
        return [execution.update(still, algorithm) for _ in range(2)]

    def test_an_entropy_bonus_raises_the_entropy(self, fresh, batch):
        reports = self.update_twice(fresh, batch, REINFORCE.replace(loss_terms=[ENTROPY]))
        before, after = (float(report.metrics["entropy"].value()) for report in reports)
        assert after > before
        assert reports[0].loss == pytest.approx(-0.05 * before, rel=1e-5)

    def test_a_kl_term_draws_to_the_reference(self, fresh, batch):
        kl = LossTerm(coefficient=1.0, loss=use(losses.kl, value="k2"))
        reports = self.update_twice(fresh, batch, REINFORCE.replace(loss_terms=[kl]))
        assert reports[1].loss < reports[0].loss


def test_the_sampler_follows_the_policy(fresh, batch):
    execution = fresh(REINFORCE)
    execution.update(batch, REINFORCE)
    execution.sync_weights()
    again = training_batch(execution)
    assert responses(again) != responses(batch)
    torch.testing.assert_close(again["rollout_log_probs"], execution.log_probs(again), rtol=1e-5, atol=1e-5)


class TestGuard:
    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    def test_a_gradient_that_is_not_finite_leaves_the_weights(self, fresh, batch, tmp_path, poison):
        execution = fresh(REINFORCE)
        before = weights(execution, tmp_path / "before")
        report = execution.update(poisoned(batch, poison), REINFORCE)
        assert report.skipped
        assert not math.isfinite(report.grad_norm)
        assert identical(weights(execution, tmp_path / "after"), before)

    def test_and_the_moments(self, fresh, batch, tmp_path):
        """good, bad, good is good, good."""
        execution = fresh(REINFORCE)
        reports = [execution.update(each, REINFORCE) for each in (batch, poisoned(batch, math.nan), batch)]
        assert [report.skipped for report in reports] == [False, True, False]
        through = weights(execution, tmp_path / "through")
        straight = fresh(REINFORCE)
        for _ in range(2):
            straight.update(batch, REINFORCE)
        assert identical(through, weights(straight, tmp_path / "straight"))

    def test_what_stands_outside_the_mask_is_not_read(self, fresh, batch, tmp_path):
        outside = ~batch["response_mask"]
        names = ("advantages", "old_log_probs", "ref_log_probs")
        junk = with_columns(batch, **{name: batch[name].masked_fill(outside, math.nan) for name in names})
        algorithm, saved = ALGORITHMS["grpo with KL and entropy"], []
        for i, each in enumerate((batch, junk)):
            execution = fresh(algorithm)
            assert not execution.update(each, algorithm).skipped
            saved.append(weights(execution, tmp_path / str(i)))
        assert identical(*saved)


def poisoned(batch, value):
    advantages = batch["advantages"].clone()
    advantages[3, 0] = value
    return with_columns(batch, advantages=advantages)


def test_the_reference_stays_where_it_was(fresh, batch):
    algorithm = algorithms.grpo()
    execution = fresh(algorithm)
    before = execution.log_probs(batch, reference=True)
    for _ in range(2):
        execution.update(batch, algorithm)
    assert torch.equal(execution.log_probs(batch, reference=True), before)
    assert (execution.log_probs(batch) - before).abs().max() > 0.1


def test_the_learning_rate_follows_its_schedule(fresh, batch):
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2, schedule="linear", final_lr_ratio=0.1)
    execution = fresh(REINFORCE, optimizer=optimizer, updates=5)
    one = batch.select_idxs([0, 1])
    rates = [execution.update(one, REINFORCE).lr for _ in range(6)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.55e-3, 0.1e-3, 0.1e-3])
