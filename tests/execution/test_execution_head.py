"""``model.fused_head``: the numbers of whole logits, and which models are refused before training begins."""

from functools import partial

import pytest
import torch

from rlprims import algorithms, losses
from rlprims.algorithms import LossTerm, ObjectiveTerm, policy_objective, use
from rlprims.execution.hf._families import FUSED_HEAD_MODELS, PACKED_MODELS
from rlprims.execution.hf._forward import (
    aggregation_weights,
    check_fused_head,
    fused_objective,
    head_of,
    is_sum_of_token_losses,
    token_scores,
)
from rlprims.execution.hf._packed import use_packing
from rlprims.types import Totals, token_wise
from tests.execution.execution_contract import local, training_batch
from tests.execution.execution_families import FAMILIES, assert_same_gradients, build, gradients, ragged_batch

GRPO = algorithms.grpo()
ALGORITHMS = {
    "grpo": GRPO,
    "the KL of solved responses": GRPO.replace(
        loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.kl), tokens=use(algorithms.is_correct))]
    ),
    "a mean per prompt": algorithms.dapo(max_length=24, buffer_length=4).replace(
        aggregation=losses.prompt_token_mean, score_shaping=[]
    ),
    "a KL with a mean of its own": GRPO.replace(
        loss_terms=[
            LossTerm(coefficient=0.1, loss=use(losses.kl), tokens=use(algorithms.is_correct), over="term"),
            LossTerm(coefficient=0.1, loss=use(losses.nll), aggregation=use(losses.token_mean)),
        ]
    ),
    "a KL to the old policy": GRPO.replace(
        loss_terms=[LossTerm(coefficient=0.1, loss=use("rlprims.algorithms.kl_to_old"))]
    ),
}


def batch_of(execution, algorithm):
    batch = training_batch(execution)
    batch["ref_log_probs"] = batch["old_log_probs"] - 0.1
    batch["scores"] = torch.arange(len(batch)) % 2.0
    weighed = algorithms.token_weights(algorithm, {**batch.batch, "log_probs": batch["old_log_probs"]})
    for name, tensor in weighed.items():
        batch[name] = tensor
    return batch


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_those_of_whole_logits(model_path, name, packing):
    algorithm = ALGORITHMS[name]
    assert algorithm.token_wise
    fused, whole = (local(model_path, algorithm, fused_head=fused, packing=packing) for fused in (True, False))
    batch = batch_of(whole, algorithm)
    for verb in ("log_probs", "entropies"):
        one, other = (getattr(execution, verb)(batch) for execution in (fused, whole))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for _ in range(3):
        one, other = (execution.update(batch, algorithm) for execution in (fused, whole))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        values = [{name: float(metric.value()) for name, metric in r.metrics.items()} for r in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


def test_with_adapters(model_path):
    fused, whole = (local(model_path, GRPO, lora={"rank": 4}, fused_head=fused) for fused in (True, False))
    batch = batch_of(whole, GRPO)
    for _ in range(2):
        one, other = (execution.update(batch, GRPO) for execution in (fused, whole))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def training_columns(batch):
    """Random columns for GRPO, one token outside the mask, and the totals of the batch."""
    random = torch.Generator().manual_seed(0)
    mask = batch["attention_mask"][:, 3:].clone()
    mask[0, 1] = False
    rows, shape = mask.shape[0], mask.shape
    columns = {"advantages": 1.0, "old_log_probs": 0.1, "ref_log_probs": 0.1}
    noise = {name: torch.randn(shape, generator=random).double() * scale for name, scale in columns.items()}
    return {
        **batch,
        **{name: x - 3.0 * (name != "advantages") for name, x in noise.items()},
        "response_mask": mask,
        "group_ids": torch.arange(rows) // 2,
        "totals": Totals(int(mask.sum()), rows, 3),
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in FUSED_HEAD_MODELS])
def test_loss_and_gradients_are_those_of_whole_logits(kind, tied):
    model, batch = build(kind, tie_word_embeddings=tied), training_columns(ragged_batch())
    check_fused_head(model)
    packing = kind in PACKED_MODELS
    if packing:
        use_packing(model)
    fused, scores = fused_objective(model, batch, GRPO, temperature=0.7, packing=packing)
    forward = partial(token_scores, model, batch, temperature=0.7, wanted=["log_probs", "entropies"])
    whole_scores = forward(packing=False, fused_head=False)
    whole = policy_objective(GRPO, {**batch, **whole_scores})
    torch.testing.assert_close(fused, whole, rtol=1e-6, atol=1e-8)
    assert_same_gradients(gradients(fused, model), gradients(whole, model))
    in_mask = batch["response_mask"]
    for name, expected in whole_scores.items():
        torch.testing.assert_close(scores[name][in_mask], expected[in_mask], rtol=0, atol=1e-6)
        assert (scores[name][~in_mask] == 0).all()
        torch.testing.assert_close(forward(packing=packing, fused_head=True)[name], expected, rtol=0, atol=1e-6)


def test_the_soft_cap_of_these_tests_matters():
    assert head_of(build("gemma2")).soft_cap == 2.0
    capped, free = (build("gemma2", final_logit_softcapping=cap) for cap in (2.0, None))
    one, other = (model(ragged_batch()["prompts"]).logits for model in (capped, free))
    assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("phi", {}, "its LM head has a bias"),
        ("cohere", {"logit_scale": 0.5}, "it scales its logits by logit_scale"),
        ("granite", {"logits_scaling": 2.0}, "it scales its logits by logits_scaling"),
        ("minicpm3", {"num_key_value_heads": 2}, "it scales its logits by logits_scaling"),
        ("ctrl", {}, "(its LM head has a bias|no test fuses the head of this type)"),
    ],
)
def test_fused_head_is_refused_for_untested_heads(kind, changes, reason):
    with pytest.raises(ValueError, match=rf"model.fused_head: .* {kind}: {reason}.*Set model.fused_head: false"):
        check_fused_head(build(kind, **changes))


def of_the_sum(log_probs, response_mask):
    """A loss of whole rows."""
    return torch.where(response_mask, log_probs, 0.0).sum(-1, keepdim=True).expand_as(log_probs)


def largest(losses, response_mask):
    """An aggregation that is not linear."""
    return torch.where(response_mask, losses, -torch.inf).max()


def half_of_the_sum(losses, response_mask):
    return torch.where(response_mask, losses, 0.0).sum() / 2


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithms.gspo(), id="gspo"),
        pytest.param(
            GRPO.replace(loss_terms=[LossTerm(coefficient=0.1, loss=use(losses.negative_entropy))]),
            id="an entropy bonus",
        ),
        pytest.param(GRPO.replace(policy_loss=of_the_sum), id="a loss of the user's"),
        pytest.param(GRPO.replace(aggregation=largest), id="an aggregation"),
    ],
)
def test_any_other_objective_is_of_the_log_probs(model_path, algorithm):
    """And of the entropies, with their gradient: not token by token, and as exact."""
    assert not is_sum_of_token_losses(algorithm)
    fused, whole = (local(model_path, algorithm, fused_head=fused) for fused in (True, False))
    batch = batch_of(whole, algorithm)
    for _ in range(2):
        one, other = (execution.update(batch, algorithm) for execution in (fused, whole))
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        values = [{name: float(metric.value()) for name, metric in r.metrics.items()} for r in (one, other)]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


def test_a_declared_objective_of_the_user(model_path, monkeypatch):
    monkeypatch.setattr(half_of_the_sum, "linear", True, raising=False)

    @token_wise
    def squared(log_probs, response_mask):
        return torch.where(response_mask, log_probs.square(), 0.0)

    algorithm = algorithms.reinforce().replace(policy_loss=squared, aggregation=half_of_the_sum)
    assert is_sum_of_token_losses(algorithm)
    fused, whole = (local(model_path, algorithm, fused_head=fused) for fused in (True, False))
    batch = training_batch(whole)
    one, other = (execution.update(batch, algorithm) for execution in (fused, whole))
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)


def test_aggregation_weights_are_the_aggregation():
    data = {"response_mask": torch.tensor([[True, True, False], [True, False, False]])}
    mean = algorithms.reinforce().replace(aggregation=losses.token_mean)
    expected = torch.tensor([[1, 1, 0], [1, 0, 0]]) / 3
    torch.testing.assert_close(aggregation_weights(ObjectiveTerm(mean, None), data), expected)
    per_sequence = mean.replace(aggregation=losses.seq_mean_token_mean)
    torch.testing.assert_close(
        aggregation_weights(ObjectiveTerm(per_sequence, None), data), torch.tensor([[1, 1, 0], [2, 0, 0]]) / 4
    )


@pytest.mark.parametrize("settings", [{"fused_head": True}, {}, {"packing": False}])
def test_no_model_is_patched(model_path, settings):
    """Sampling, scoring and an update leave every module's class, forward and attention as they were."""
    execution = local(model_path, GRPO, **settings)
    module = execution.training.policy.module
    attention = module.config._attn_implementation
    hooks = []
    seen = module.model.layers[0].register_forward_pre_hook(lambda *_: hooks.append(module.config._attn_implementation))
    batch = batch_of(execution, GRPO)
    execution.log_probs(batch)
    execution.update(batch, GRPO)
    seen.remove()
    assert set(hooks) == {attention}
    assert not any("forward" in vars(layer) for layer in module.modules())
    assert {type(layer).__module__.split(".")[0] for layer in module.modules()} == {"transformers", "torch"}
