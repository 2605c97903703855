"""Mixtures of experts: the load-balancing loss in an update, configs that ask for router logits, and adapters."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlprims import algorithms
from rlprims.execution.hf._adapters import trained
from rlprims.execution.hf._families import ROUTED_MODELS
from tests import tiny
from tests.execution.execution_contract import cluster, local, training_batch, weights

REINFORCE = algorithms.reinforce()
ON = {"router_aux_loss_coef": 0.5}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """A model of each type, whose config.json asks for router logits, as some on the hub do."""
    return {
        kind: tiny.save_mixture(tmp_path_factory.mktemp(kind), kind, output_router_logits=True)
        for kind in ROUTED_MODELS
    }


@pytest.fixture(scope="module")
def path(mixtures):
    return mixtures["qwen3_moe"]


@pytest.fixture(scope="module")
def batch(path):
    """Eight rows; the last has no valid response token, and the seventh only some."""
    batch = training_batch(local(path, REINFORCE))
    batch["response_mask"][-1], batch["response_mask"][-2, ::2] = False, False
    return batch


def tokens_of(batch):
    """The tokens of the rows, and bool for those that count: in rows with a valid response token, all but the last."""
    attended = batch["attention_mask"].bool()
    position = attended.cumsum(-1)
    counts = attended & (position < position[:, -1:]) & batch["response_mask"].any(-1, keepdim=True)
    return torch.cat([batch["prompts"], batch["responses"]], 1), counts


def theirs(path, batch):
    """The loss that transformers computes of these tokens, with its gradient of the routers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids, counts = tokens_of(batch)
    mask = batch["attention_mask"].long()
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits = model(ids, **options, output_router_logits=True).router_logits
    return load_balancing_loss_func(logits, 8, 2, counts.long())


@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_it_is_that_of_transformers(mixtures, kind):
    path, packing = mixtures[kind], kind != "olmoe"
    batch = training_batch(local(path, REINFORCE, packing=packing))
    off = local(path, REINFORCE, packing=packing).update(batch, REINFORCE)
    on = local(path, REINFORCE, packing=packing, **ON).update(batch, REINFORCE)
    expected = float(theirs(path, batch).detach())
    assert expected > 2.01  # 2 if all experts were used alike
    assert float(on.metrics["router_aux_loss"].value()) == pytest.approx(expected, rel=1e-5)
    assert on.loss == pytest.approx(off.loss + 0.5 * expected, rel=1e-5)
    assert on.grad_norm != pytest.approx(off.grad_norm, rel=1e-3)
    assert "router_aux_loss" not in off.metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"max_tokens_per_micro_batch": 60},
        {"packing": False, "max_tokens_per_micro_batch": 60},
        {"fused_head": True, "max_tokens_per_micro_batch": 90},
    ],
    ids=["padded", "micro-batches", "padded micro-batches", "fused"],
)
def test_it_is_the_same_in_every_layout(path, batch, changes):
    """trl#7009: a fused head leaves it out, unsaid."""
    whole, parts = local(path, REINFORCE, **ON), local(path, REINFORCE, **ON, **changes)
    first, second = whole.update(batch, REINFORCE), parts.update(batch, REINFORCE)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    aux = [float(report.metrics["router_aux_loss"].value()) for report in (first, second)]
    assert aux[1] == pytest.approx(aux[0], rel=1e-5)


def test_a_prompt_that_rows_share_counts_for_each(path):
    """And with other experts than the router's own: those that the sampler recorded."""
    execution = local(path, REINFORCE, replay_routes=True)
    batch = training_batch(execution)
    twice = batch.select_idxs([0, 0, 0, 3])
    routes = twice["routed_experts"]
    routes[:] = torch.where(routes < 0, routes, (routes + 1) % 8)
    packed, padded = (
        local(path, REINFORCE, replay_routes=True, packing=packing, **ON).update(twice, REINFORCE)
        for packing in (True, False)
    )
    assert padded.loss == pytest.approx(packed.loss, rel=1e-5)
    assert padded.grad_norm == pytest.approx(packed.grad_norm, rel=1e-5)


def test_the_gradient_reaches_every_router_and_evens_their_loads(path, batch):
    balance_only = REINFORCE.replace(policy_coefficient=0.0)
    execution = local(path, balance_only, router_aux_loss_coef=100.0)
    routers = {n: x for n, x in execution.training.policy.module.named_parameters() if n.endswith(".gate.weight")}
    before = {name: x.detach().clone() for name, x in routers.items()}
    losses = []
    for _ in range(6):
        report = execution.update(batch, balance_only)
        losses.append(float(report.metrics["router_aux_loss"].value()))
    assert len(routers) == 3
    assert not any(torch.equal(x, before[name]) for name, x in routers.items())
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("packing", [True, False])
def test_a_config_that_asks_for_router_logits_changes_nothing(path, batch, packing, tmp_path):
    plain = tiny.save_mixture(tmp_path)
    asked, unasked = (local(each, REINFORCE, packing=packing) for each in (path, plain))
    assert torch.equal(training_batch(asked)["responses"], training_batch(unasked)["responses"])
    assert torch.equal(asked.log_probs(batch), unasked.log_probs(batch))
    assert asked.training.policy.module.config.output_router_logits  # and is saved as it was


def test_other_models_are_refused(model_path):
    with pytest.raises(
        ValueError, match=r"^model\.router_aux_loss_coef: expected a mixture .*, got a qwen2; .*coef: 0$"
    ):
        local(model_path, REINFORCE, **ON)


@pytest.mark.parametrize("kind", ROUTED_MODELS)
def test_adapters_are_in_the_attention_and_in_shared_experts(mixtures, kind, tmp_path):
    options = {"packing": kind != "olmoe"}
    execution = local(mixtures[kind], REINFORCE, lora={}, **options)
    layers = {name.split(".lora_")[0].split(".", 3)[-1] for name in trained(execution.training.policy.module)}
    shared = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {"mlp.shared_expert_gate"}
    assert layers == {f"self_attn.{name}_proj" for name in "qkvo"} | (shared if kind == "qwen2_moe" else set())
    batch = training_batch(execution)
    before = execution.log_probs(batch)
    for _ in range(2):
        execution.update(batch, REINFORCE)
    weights(execution, tmp_path / "save")
    merged = local(tmp_path / "save" / "policy", REINFORCE, **options)
    torch.testing.assert_close(merged.log_probs(batch), execution.log_probs(batch), rtol=1e-5, atol=1e-5)
    assert float((execution.log_probs(batch) - before).abs().max()) > 0.05
    again = local(mixtures[kind], REINFORCE, lora={}, **options)
    again.load(tmp_path / "save")
    assert torch.equal(again.log_probs(batch), execution.log_probs(batch))


@pytest.mark.ray
def test_ranks_do_what_one_process_does(path, batch):
    """Two FSDP2 ranks that compute layers again in the backward pass, each with several micro-batches."""
    options = {"max_tokens_per_micro_batch": 60, **ON}
    ray = cluster(path, REINFORCE, training_workers=2, cluster={"activation_checkpointing": True}, **options)
    try:
        one = local(path, REINFORCE, **options)
        first, second = one.update(batch, REINFORCE), ray.update(batch, REINFORCE)
        assert second.loss == pytest.approx(first.loss, rel=1e-5)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
        torch.testing.assert_close(ray.log_probs(batch), one.log_probs(batch), rtol=1e-4, atol=1e-4)
    finally:
        ray.close()


@pytest.mark.ray
def test_ray_refuses_other_models_before_it_starts(model_path):
    with pytest.raises(ValueError, match=r"model\.router_aux_loss_coef: expected a mixture of experts, got a qwen2"):
        cluster(model_path, REINFORCE, **ON)


@pytest.mark.ray
@pytest.mark.release
def test_engines_get_adapted_mixtures(path):
    ray = cluster(path, REINFORCE, lora={})
    try:
        batch = training_batch(ray)
        for _ in range(2):
            ray.update(batch, REINFORCE)
        ray.sync_weights()
        sampled = training_batch(ray, seed=1)
        torch.testing.assert_close(sampled["rollout_log_probs"], ray.log_probs(sampled), rtol=0, atol=2e-5)
    finally:
        ray.close()
