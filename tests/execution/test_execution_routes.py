"""Rollout routing replay: the policy is trained with the experts that the sampler used for each token."""

import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlprims import algorithms, corrections, routing
from rlprims.data_proto import DataProto
from rlprims.execution import Sampling
from rlprims.execution.hf._families import ROUTED_MODELS
from rlprims.execution.hf._routes import routed_layers
from tests import tiny
from tests.execution.execution_contract import LIMIT, QUESTIONS, WIDTH, cluster, local, prompts, with_columns

REINFORCE = algorithms.reinforce()
EXPERTS = 8


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """A folder with a model of each type; a Qwen3 also with ``norm_topk_prob``, as Qwen3-30B-A3B has it."""
    paths = {kind: tiny.save_mixture(tmp_path_factory.mktemp(kind), kind) for kind in ROUTED_MODELS}
    renormalized = tiny.save_mixture(tmp_path_factory.mktemp("renormalized"), norm_topk_prob=True)
    return {**paths, "qwen3_moe renormalized": renormalized}


KINDS = (*ROUTED_MODELS, "qwen3_moe renormalized")


def options(kind):
    return {"replay_routes": True, "packing": True}


def generate(execution, *, twice=False, **sampling):
    texts = [text for text in QUESTIONS for _ in range(1 + twice)]
    how = Sampling(**{"max_new_tokens": LIMIT, **sampling})
    return execution.generate(prompts(texts), how, seed=0, prompt_width=WIDTH)


def to_train(batch):
    noise = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    return with_columns(batch, group_ids=torch.arange(len(batch)) // 2, advantages=noise)


def without(batch):
    return batch.select(batch_keys=[name for name in dict(batch.batch.items()) if name != "routed_experts"])


def shifted(batch, by=1):
    """The batch with other experts than those of the router: each known number plus ``by``, modulo their count."""
    routes = batch["routed_experts"]
    return with_columns(without(batch), routed_experts=torch.where(routes < 0, routes, (routes + by) % EXPERTS))


def are_known(batch):
    """bool (B, P+T): all tokens of a row but its last one."""
    found = torch.zeros(batch["attention_mask"].shape, dtype=torch.bool)
    for row, mask in enumerate(batch["attention_mask"]):
        found[row, mask.nonzero()[:-1, 0]] = True
    return found


def seen_by(module):
    """A list to which each router of the module adds its input and its output."""
    seen = []
    for router in (m for m in module.modules() if type(m).__name__.endswith("TopKRouter")):
        router.register_forward_hook(lambda module, inputs, output: seen.append((module, *output)))
    return seen


@pytest.mark.parametrize("kind", KINDS)
class TestEachType:
    def test_the_sampler_records_the_experts_that_transformers_chooses(self, mixtures, kind):
        """Against the router logits that transformers returns for whole rows without padding."""
        batch = generate(local(mixtures[kind], REINFORCE, **options(kind)))
        routes = batch["routed_experts"]
        assert routes.dtype is torch.int16
        assert routes.shape == (*batch["attention_mask"].shape, 3, 2)
        known = are_known(batch)
        assert (routes[~known] == -1).all()
        plain = AutoModelForCausalLM.from_pretrained(mixtures[kind], dtype=torch.float32).eval()
        tokens = torch.cat([batch["prompts"], batch["responses"]], 1)
        for row, mask in enumerate(known):
            logits = plain(tokens[row, mask][None], output_router_logits=True).router_logits
            expected = torch.stack([layer.topk(2).indices for layer in logits], 1)
            assert torch.equal(routes[row, mask].long(), expected)

    def test_the_trainer_scores_what_the_sampler_drew(self, mixtures, kind):
        execution = local(mixtures[kind], REINFORCE, **options(kind))
        batch = generate(execution, top_k=20)
        trainer, sampler, mask = execution.log_probs(batch), batch["rollout_log_probs"], batch["response_mask"]
        torch.testing.assert_close(trainer, sampler, rtol=1e-5, atol=2e-5)
        weights = corrections.tis(trainer, sampler, mask).values[mask]
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=2e-5)

    def test_the_gates_are_those_of_routing_replay(self, mixtures, kind):
        """Of experts that the router would not choose. The paper's formula by hand, and the function's, bit by bit."""
        execution = local(mixtures[kind], REINFORCE, **{**options(kind), "packing": False})
        batch = shifted(generate(execution))
        seen = seen_by(execution.training.policy.module)
        replayed, own = execution.log_probs(batch), execution.log_probs(without(batch))
        assert float((replayed - own).abs().max()) > 0.1
        known = are_known(batch)
        # The micro-batch of all rows has the columns that are not padding in all of them.
        used = batch["attention_mask"].any(0)
        for layer, (router, logits, gates, chosen) in enumerate(seen[:3]):
            of_sum = getattr(router, "norm_topk_prob", True)
            routes = batch["routed_experts"][:, used, layer].flatten(0, 1).long()
            read = known[:, used].flatten()
            assert torch.equal(chosen[read], routes[read])
            assert torch.equal(gates, routing.replay(logits, chosen, renormalize=of_sum).gather(-1, chosen))
            exps = logits[read].double().exp()
            sums = exps.gather(-1, routes[read]) if of_sum else exps
            expected = exps.gather(-1, routes[read]) / sums.sum(-1, keepdim=True)
            torch.testing.assert_close(gates[read].double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(chosen[~read], logits[~read].topk(2).indices)  # where none is known, its own

    def test_only_the_recorded_experts_and_the_router_learn(self, mixtures, kind):
        """Experts 0 to 5 for every token, so 6 and 7 get no gradient; the router gets one in every layer."""
        execution = local(mixtures[kind], REINFORCE, **options(kind))
        batch = generate(execution)
        known, routes = are_known(batch), batch["routed_experts"].clone()
        routes[known] = torch.stack([routes[known][..., 0] % 3, 3 + routes[known][..., 1] % 3], -1)
        read_only = with_columns(without(batch), routed_experts=routes)
        module, gradients = execution.training.policy.module, {}
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda g, name=name: gradients.__setitem__(name, gradients.get(name, 0) + g))
        execution.update(to_train(read_only), REINFORCE)
        experts = [g for name, g in gradients.items() if ".experts." in name]
        routers = [g for name, g in gradients.items() if name.endswith(".gate.weight")]
        assert len(routers) == 3
        assert all(float(g.abs().max()) > 1e-5 for g in routers)
        if not options(kind)["packing"]:
            return  # padding and the last token of a row are read there as well, by experts of the router's choice
        assert len(experts) == 6
        for g in experts:
            assert float(g[:6].flatten(1).abs().amax(1).min()) > 0
            assert (g[6:] == 0).all()


@pytest.fixture(scope="module")
def path(mixtures):
    return mixtures["qwen3_moe renormalized"]


@pytest.fixture(scope="module")
def foreign(path):
    """Two samples of each prompt, with experts that the router would not choose, ready for an update."""
    return to_train(shifted(generate(local(path, REINFORCE, replay_routes=True), twice=True)))


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"max_tokens_per_micro_batch": 60},
        {"packing": False, "max_tokens_per_micro_batch": 90},
        {"fused_head": True},
        {"fused_head": True, "packing": False, "max_tokens_per_micro_batch": 90},
    ],
    ids=["padded", "micro-batches", "padded micro-batches", "fused", "fused, padded micro-batches"],
)
def test_replayed_routes_are_the_same_in_every_layout(path, foreign, changes):
    one, other = local(path, REINFORCE, replay_routes=True), local(path, REINFORCE, replay_routes=True, **changes)
    torch.testing.assert_close(other.log_probs(foreign), one.log_probs(foreign), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other.entropies(foreign), one.entropies(foreign), rtol=1e-5, atol=1e-5)
    first, second = one.update(foreign, REINFORCE), other.update(foreign, REINFORCE)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    own = local(path, REINFORCE, **changes).update(foreign, REINFORCE)  # without the setting nothing is replayed
    assert abs(own.loss - first.loss) > 1e-3


def test_a_shared_prompt_with_other_experts_in_each_row_is_not_shared(path, foreign):
    """Two rows with the same prompt, which two engines read with other experts: packed rows equal padded ones."""
    routes = foreign["routed_experts"].clone()
    routes[1::2] = torch.where(routes[1::2] < 0, routes[1::2], (routes[1::2] + 3) % EXPERTS)
    apart = with_columns(without(foreign), routed_experts=routes)
    packed, padded = (local(path, REINFORCE, replay_routes=True, packing=packing) for packing in (True, False))
    torch.testing.assert_close(packed.log_probs(apart), padded.log_probs(apart), rtol=1e-5, atol=1e-5)
    shared = packed.log_probs(foreign)
    torch.testing.assert_close(packed.log_probs(apart)[::2], shared[::2], rtol=1e-5, atol=1e-5)
    assert float((packed.log_probs(apart)[1::2] - shared[1::2]).abs().max()) > 0.1


def test_in_bfloat16_other_experts_are_chosen_and_replay_keeps_the_samplers(path):
    """A padded and a cached forward pass round differently; replay removes the part of it that routing causes."""
    execution = local(path, REINFORCE, replay_routes=True, packing=False, dtype="bfloat16")
    batch = generate(execution, twice=True)
    seen = seen_by(execution.training.policy.module)
    execution.log_probs(without(batch))
    known, used = are_known(batch), batch["attention_mask"].any(0)
    own = torch.stack([chosen for _, _, _, chosen in seen], 1)
    recorded = batch["routed_experts"][:, used].flatten(0, 1)[known[:, used].flatten()].long()
    read = own[known[:, used].flatten()]
    assert (read.sort(-1).values != recorded.sort(-1).values).any(), "the test needs a token whose experts differ"
    seen.clear()
    execution.log_probs(batch)
    replayed = torch.stack([chosen for _, _, _, chosen in seen], 1)[known[:, used].flatten()]
    assert torch.equal(replayed, recorded)


def test_only_the_policy_is_replayed(path):
    """The reference, which is the same model here, chooses its own experts; so does the critic."""
    algorithm = algorithms.ppo().replace(loss_terms=algorithms.grpo().loss_terms)
    execution = local(path, algorithm, replay_routes=True)
    batch = shifted(generate(execution))
    own = execution.log_probs(without(batch))
    assert torch.equal(execution.log_probs(batch, reference=True), own)
    assert float((execution.log_probs(batch) - own).abs().max()) > 0.1
    assert torch.equal(execution.values(batch), execution.values(without(batch)))


def test_the_policy_with_adapters_is_replayed_and_its_reference_is_not(path):
    execution = local(path, algorithms.grpo(), replay_routes=True, lora={"target_modules": ["q_proj"]})
    batch = shifted(generate(execution))
    own = execution.log_probs(without(batch))  # B is 0 at the start: the adapters change nothing
    assert torch.equal(execution.log_probs(batch, reference=True), own)
    assert float((execution.log_probs(batch) - own).abs().max()) > 0.1


def test_routes_follow_their_rows_through_a_batch(path, foreign, tmp_path):
    execution = local(path, REINFORCE, replay_routes=True)
    want = execution.log_probs(foreign)
    order = torch.tensor([5, 0, 3, 3, 7, 1])
    foreign.save(tmp_path / "batch")
    cases = {
        "select": (foreign.select_idxs(order.numpy()), want[order]),
        "concat": (DataProto.concat([foreign[5:], foreign[:5]]), torch.cat([want[5:], want[:5]])),
        "save": (DataProto.load(tmp_path / "batch"), want),
        "pickle": (pickle.loads(pickle.dumps(foreign)), want),  # noqa: S301
    }
    for name, (moved, expected) in cases.items():
        torch.testing.assert_close(execution.log_probs(moved), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_parts_of_a_generation_record_what_the_whole_records(path):
    whole = generate(local(path, REINFORCE, replay_routes=True), twice=True)
    parts = generate(local(path, REINFORCE, replay_routes=True, max_rows_per_generation=3), twice=True)
    assert torch.equal(parts["responses"], whole["responses"])
    assert torch.equal(parts["routed_experts"], whole["routed_experts"])


def test_an_empty_batch_has_the_column_too(path):
    execution = local(path, REINFORCE, replay_routes=True)
    batch = execution.generate(prompts([]), Sampling(max_new_tokens=3), seed=0, prompt_width=WIDTH)
    assert batch["routed_experts"].shape == (0, WIDTH + 3, 3, 2)
    assert execution.log_probs(batch).shape == (0, 3)


def test_a_layer_without_experts_has_no_routes(tmp_path):
    model = tiny.save_mixture(tmp_path, mlp_only_layers=[1])
    assert routed_layers(str(model)) == [0, 2]
    execution = local(model, REINFORCE, replay_routes=True)
    batch = generate(execution)
    assert batch["routed_experts"].shape[2:] == (2, 2)
    torch.testing.assert_close(execution.log_probs(batch), batch["rollout_log_probs"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen2", "without experts"])
def test_replay_routes_is_refused_for_other_models(kind, model_path, tmp_path):
    dense = model_path if kind == "qwen2" else tiny.save_mixture(tmp_path, mlp_only_layers=[0, 1, 2])
    with pytest.raises(ValueError, match=r"model\.replay_routes: expected a mixture of experts, got a qwen"):
        local(dense, REINFORCE, replay_routes=True)
    with pytest.raises(ValueError, match=r"Set model\.replay_routes: false"):
        routed_layers(str(dense))


@pytest.mark.ray
def test_engines_of_vllm_on_a_cpu_are_refused_before_ray_starts(path):
    with pytest.raises(ValueError, match=r"expected engines with a GPU .*, got engines on a CPU; use ray\.engine: hf"):
        cluster(path, REINFORCE, engine="vllm", replay_routes=True)


@pytest.mark.ray
def test_ranks_and_their_sampler_do_what_one_process_does(path):
    """Two FSDP2 ranks that compute layers again in the backward pass, and a sampler in a process of its own."""
    ray = cluster(path, REINFORCE, training_workers=2, replay_routes=True, cluster={"activation_checkpointing": True})
    try:
        one = local(path, REINFORCE, replay_routes=True)
        mine, theirs = generate(one, twice=True), generate(ray, twice=True)
        for column in ("responses", "routed_experts"):
            assert torch.equal(mine[column], theirs[column]), column
        batch = to_train(shifted(mine))
        torch.testing.assert_close(ray.log_probs(batch), one.log_probs(batch), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ray.entropies(batch), one.entropies(batch), rtol=1e-5, atol=1e-5)
        first, second = one.update(batch, REINFORCE), ray.update(batch, REINFORCE)
        assert second.loss == pytest.approx(first.loss, rel=1e-5)
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
        torch.testing.assert_close(ray.log_probs(batch), one.log_probs(batch), rtol=1e-4, atol=1e-4)
    finally:
        ray.close()
