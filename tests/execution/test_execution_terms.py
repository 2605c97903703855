"""The contract of ``update`` for rollouts of several rows, and for loss terms with tokens of their own."""

import pytest
import torch

from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, use
from rlprims.execution import OptimizerConfig
from tests.execution.execution_contract import local, training_batch, weights, with_columns
from tests.execution.execution_families import norms_in_float64

SEEN = LossTerm(coefficient=0.1, loss=use(losses.nll), mask="observation_mask", over="term")
ALGORITHMS = {
    "tool output": algorithms.echo(),
    "means by rollout": algorithms.grpo(kl_coef=0).replace(loss_terms=[SEEN]),
    "a mean of its own": algorithms.dapo().replace(
        score_shaping=(),
        loss_terms=[
            SEEN.model_copy(update={"aggregation": use(losses.prompt_token_mean)}),
            SEEN.model_copy(update={"over": "policy", "aggregation": use(losses.seq_mean_token_mean)}),
        ],
    ),
    "an expert in the group": algorithms.luffy(max_length=24),
    "demonstrations": algorithms.chord(mu=0.3),
    "a loss of whole rollouts": algorithms.gspo(),
}
KINDS = list(ALGORITHMS)
SMALL = {"max_tokens_per_micro_batch": 40}


@pytest.fixture(scope="module")
def batch(execution):
    """Eight rows, five rollouts, two groups; tokens 2 and 3 of each response are a tool's, and row 6 is an expert's."""
    whole = training_batch(execution)
    tool = torch.isin(torch.arange(whole["responses"].shape[1]), torch.tensor([2, 3])) & whole["response_mask"]
    return with_columns(
        whole,
        response_mask=whole["response_mask"] & ~tool,
        observation_mask=tool,
        expert_mask=whole["response_mask"] & (torch.arange(8)[:, None] == 6) & ~tool,
        trajectory_ids=torch.tensor([0, 1, 0, 2, 3, 0, 4, 3]),
        group_ids=torch.tensor([0, 0, 0, 0, 1, 0, 1, 1]),
    )


@pytest.fixture(scope="module")
def whole(fresh, batch, tmp_path_factory):
    done = {}
    for name, algorithm in ALGORITHMS.items():
        execution = fresh(algorithm)
        report = execution.update(batch, algorithm)
        done[name] = report, weights(execution, tmp_path_factory.mktemp("whole") / "save")
    return done


@pytest.mark.parametrize("tokens", [40, 130])
@pytest.mark.parametrize("name", KINDS)
def test_micro_batches_do_not_change_the_step(fresh, batch, whole, tmp_path, name, tokens):
    if name == "a loss of whole rollouts" and tokens == 40:
        with pytest.raises(
            ValueError, match=r"the (group or rollout|group) of row \d+ has \d+ tokens, more than max_tokens=40"
        ):
            fresh(ALGORITHMS[name], max_tokens_per_micro_batch=tokens).update(batch, ALGORITHMS[name])
        return
    report, expected = whole[name]
    execution = fresh(ALGORITHMS[name], max_tokens_per_micro_batch=tokens)
    split = execution.update(batch, ALGORITHMS[name])
    assert split.loss == pytest.approx(report.loss, rel=1e-5, abs=1e-6)
    assert split.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)
    after = weights(execution, tmp_path / "save")
    for parameter, value in expected.items():
        torch.testing.assert_close(after[parameter], value, rtol=1e-5, atol=1e-6)


def test_the_rows_of_a_rollout_may_come_in_any_order(fresh, batch, whole):
    name = "means by rollout"
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    shuffled = fresh(ALGORITHMS[name]).update(batch.select_idxs(order), ALGORITHMS[name])
    assert shuffled.loss == pytest.approx(whole[name][0].loss, rel=1e-5, abs=1e-6)
    assert shuffled.grad_norm == pytest.approx(whole[name][0].grad_norm, rel=1e-5)


def test_rollouts_are_not_rows(fresh, batch, whole):
    by_row = {name: x for name, x in batch.batch.items() if name != "trajectory_ids"}
    rows = type(batch).from_dict(tensors=by_row, non_tensors=batch.non_tensor_batch)
    name = "means by rollout"
    assert fresh(ALGORITHMS[name]).update(rows, ALGORITHMS[name]).loss != pytest.approx(whole[name][0].loss, rel=1e-3)


def test_the_tools_tokens_are_learnt_and_weigh_nothing_in_the_policy(fresh, batch, tmp_path):
    """With no term it is the step of the policy alone, as with a term that no token is in."""
    echo, alone = ALGORITHMS["tool output"], ALGORITHMS["tool output"].replace(loss_terms=())
    blind = with_columns(batch, observation_mask=torch.zeros_like(batch["observation_mask"]))
    losses_of = [fresh(a).update(b, a).loss for a, b in ((echo, batch), (echo, blind), (alone, batch))]
    assert losses_of[1] == pytest.approx(losses_of[2], rel=1e-6)
    nll = -fresh(echo).log_probs(with_columns(batch, response_mask=batch["observation_mask"]))
    seen = float(nll[batch["observation_mask"]].mean())
    assert losses_of[0] - losses_of[1] == pytest.approx(0.1 * seen, rel=1e-4)


def test_a_loss_term_on_tool_output_makes_it_likelier(fresh, batch):
    """With advantages of 0 the term is all that moves."""
    echo = ALGORITHMS["tool output"]
    execution = fresh(echo, optimizer=OptimizerConfig(lr=1e-3, weight_decay=0))
    still = with_columns(batch, advantages=torch.zeros_like(batch["advantages"]))
    reports = [execution.update(still, echo) for _ in range(4)]
    assert reports[-1].loss < reports[0].loss


def test_an_update_without_any_token_has_a_gradient_of_0(fresh, batch):
    """Every rank still gives a gradient, of 0."""
    nothing = {
        f"{name}_mask": torch.zeros_like(batch["response_mask"]) for name in ("response", "observation", "expert")
    }
    for name in ("tool output", "demonstrations"):
        report = fresh(ALGORITHMS[name]).update(with_columns(batch, **nothing), ALGORITHMS[name])
        assert (report.loss, report.grad_norm, report.skipped) == (0.0, 0.0, False)


def test_a_critic_of_rollouts(fresh, batch):
    """Its mean is over rollouts too, and their rows may be apart."""
    critic = algorithms.ppo().replace(aggregation=losses.seq_mean_token_mean, value_loss=use(losses.value_loss))
    reports = [fresh(critic, **options).update_critic(batch, critic) for options in ({}, SMALL)]
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
    mask, error = batch["response_mask"], batch["returns"].square() / 2  # a new critic says 0
    expected = losses.trajectory_mean(error, batch["trajectory_ids"], mask)
    assert reports[0].loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_in_float64_to_twelve_digits(model_path, batch, name, packing):
    reports = []
    for tokens in (None, 130, 130 if name == "a loss of whole rollouts" else 40):
        execution = local(model_path, ALGORITHMS[name], max_tokens_per_micro_batch=tokens, packing=packing)
        execution.training.policy.module.double()
        norms_in_float64(execution.training.policy.module)
        reports.append(execution.update(batch, ALGORITHMS[name]))
    for report in reports[1:]:
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-12, abs=1e-12)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-12)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", [name for name in KINDS if ALGORITHMS[name].token_wise])
def test_without_whole_logits(model_path, batch, name, packing):
    """Each part of the objective has its own tokens and weights within a tile."""
    settings = {"max_tokens_per_micro_batch": 100, "packing": packing}
    fused, whole = (local(model_path, ALGORITHMS[name], fused_head=fused, **settings) for fused in (True, False))
    weighed = with_columns(batch, row_weights=torch.arange(8.0))
    weighed = with_columns(weighed, **algorithms.token_weights(ALGORITHMS[name], dict(weighed.batch.items())))
    for _ in range(2):
        one, other = (execution.update(weighed, ALGORITHMS[name]) for execution in (fused, whole))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert one.loss != pytest.approx(local(model_path, ALGORITHMS[name]).update(batch, ALGORITHMS[name]).loss, rel=1e-3)
