"""The contract of a teacher: what another model says of the same tokens, whatever is beside a row.

What follows the policy lives in one process, and is tried locally.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlprims import algorithms, losses
from rlprims.algorithms import use
from tests import tiny
from tests.execution.execution_contract import local, plain_logits, responses, saved, training_batch, weights

K = 4
OPD = algorithms.opd()
TOP = algorithms.opsd(size=K)


@pytest.fixture(scope="session")
def teacher(teacher_path):
    return AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def taught(build, teacher_path, without_engines):
    """With one loss of the sampled token and one of several."""
    both = OPD.replace(loss_terms=[{"coefficient": 1.0, "loss": TOP.policy_loss}], support=TOP.support)
    execution = build(both, teacher=str(teacher_path), **without_engines)
    yield execution
    execution.close()


def test_the_teacher_scores_the_policys_tokens(taught, sampled, teacher):
    scores = taught.teacher_log_probs(sampled)
    top = taught.teacher_top(sampled, K)
    assert top["topk_ids"].shape == (*scores.shape, K)
    for row, response in enumerate(responses(sampled)):
        expected = plain_logits(teacher, sampled, row).log_softmax(-1)
        mask = sampled["response_mask"][row]
        chosen = expected[range(len(response)), response]
        torch.testing.assert_close(scores[row][mask], chosen, rtol=0, atol=1e-4)
        ids, log_probs = top["topk_ids"][row][mask], top["teacher_topk_log_probs"][row][mask]
        torch.testing.assert_close(log_probs, expected.topk(K).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected.gather(-1, ids), log_probs, rtol=0, atol=1e-4)
    assert not scores[~sampled["response_mask"]].any()


def test_the_teacher_scores_the_students_likeliest_tokens(taught, sampled, teacher, plain):
    batch = sampled[:]
    batch["topk_ids"] = taught.top_tokens(sampled, K)
    top = taught.teacher_top(batch, K)
    assert torch.equal(top["topk_ids"], batch["topk_ids"])
    mask = sampled["response_mask"][0]
    ids = top["topk_ids"][0][mask]
    assert torch.equal(ids, plain_logits(plain, sampled, 0).topk(K).indices)
    expected = plain_logits(teacher, sampled, 0).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(top["teacher_topk_log_probs"][0][mask], expected, rtol=0, atol=1e-4)


def test_each_row_has_the_teacher_that_it_names(build, taught, sampled, model_path, teacher_path, without_engines):
    teachers = {"same": str(model_path), "other": str(teacher_path)}
    execution = build(OPD, teacher=teachers, **without_engines)
    batch = sampled[:]
    names = ["same", "other"] * (len(batch) // 2)
    batch.non_tensor_batch["teacher"] = np.array(names, dtype=object)
    same, other = sampled["rollout_log_probs"], taught.teacher_log_probs(sampled)
    expected = torch.where((torch.tensor([name == "same" for name in names]))[:, None], same, other)
    torch.testing.assert_close(execution.teacher_log_probs(batch), expected, rtol=0, atol=1e-4)
    batch.non_tensor_batch["teacher"] = np.array(["nobody"] * len(batch), dtype=object)
    with pytest.raises(ValueError, match=r"nobody.*model.teacher has \['other', 'same'\]"):
        execution.teacher_log_probs(batch)
    execution.close()


def test_the_loss_is_the_divergence_of_the_two_models(taught, sampled, teacher, plain, tmp_path):
    """A step on K = V tokens and no rest: the mean of the whole divergence, by the two models alone."""
    batch = sampled.union(taught.teacher_top(sampled, 1000))
    assert batch["topk_ids"].shape[-1] == len(tiny.VOCABULARY), "no more than there are"
    batch["advantages"] = torch.zeros_like(batch["rollout_log_probs"])
    total, count = 0.0, 0
    for row in range(len(sampled)):
        p, q = (plain_logits(model, sampled, row).double().softmax(-1) for model in (plain, teacher))
        m = (p + q) / 2
        total += float((p * (p / m).log() + q * (q / m).log()).sum()) / 2
        count += len(p)
    taught.save(tmp_path)
    report = taught.update(batch, algorithms.opsd(size=1000))
    taught.load(tmp_path)  # as other tests expect it
    assert report.loss == pytest.approx(total / count, rel=1e-4)
    assert report.grad_norm > 0


def test_a_teacher_that_follows_moves_a_share_of_the_way(model_path, tmp_path):
    follows = {"rate": 0.25, "every": 2}
    algorithm = algorithms.grpo().replace(advantage=use("advantage.teacher_gap"))
    assert {"ref_log_probs", "teacher_log_probs"} <= algorithm.needs
    execution = local(model_path, algorithm, teacher_follows=follows, reference_follows={"rate": 1.0, "every": 2})
    start = {name: x.clone() for name, x in execution.training.teachers[""].state_dict().items()}
    for seed in range(2):
        batch = training_batch(execution, seed=seed)
        moved = {name: x.clone() for name, x in execution.training.teachers[""].state_dict().items()}
        assert all(torch.equal(start[name], x) for name, x in moved.items()), "not before the second update"
        execution.update(batch, algorithm)
    policy = execution.training.policy.module.state_dict()
    for name, x in execution.training.teachers[""].state_dict().items():
        torch.testing.assert_close(x, start[name] + 0.25 * (policy[name] - start[name]))
    batch = training_batch(execution, seed=2)
    assert torch.equal(execution.log_probs(batch, reference=True), execution.log_probs(batch))

    directory = tmp_path / "saved"
    weights(execution, directory)
    assert saved(directory, "teacher").keys() >= {"model.norm.weight"}
    again = local(model_path, algorithm, teacher_follows=follows, reference_follows={"rate": 1.0, "every": 2})
    again.load(directory)
    assert torch.equal(again.teacher_log_probs(batch), execution.teacher_log_probs(batch))
    for each in (execution, again):
        each.update(batch, algorithm)
        each.update(batch, algorithm)
    assert torch.equal(again.teacher_log_probs(batch), execution.teacher_log_probs(batch))


def test_a_teacher_of_other_tokens_is_refused(model_path, teacher_path, tmp_path):
    other = tmp_path / "other"
    tiny.causal_lm().save_pretrained(other)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match="another vocabulary"):
        local(model_path, OPD, teacher=str(other))
    execution = local(model_path, algorithms.reinforce(), teacher=str(teacher_path))
    with pytest.raises(ValueError, match="no teacher was loaded"):
        execution.teacher_log_probs(training_batch(execution))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher_follows": {}, "lora": {}}, "teacher_follows needs whole weights"),
        ({"reference_follows": {}, "lora": {}}, "reference_follows needs whole weights"),
        ({"teacher_follows": {}, "teacher": {"a": "x"}}, "expected a single teacher, got several"),
        ({"teacher": {}}, "expected null, a model, or"),
    ],
)
def test_settings_that_cannot_be(model_path, options, message):
    with pytest.raises(ValueError, match=message):
        local(model_path, OPD, **options)


def test_a_fused_head_changes_no_number_of_several_tokens(model_path, teacher_path):
    reports = []
    for fused in (True, False):
        execution = local(model_path, TOP, teacher=str(teacher_path), fused_head=fused)
        batch = training_batch(execution)
        for name, column in execution.teacher_top(batch, K).batch.items():
            batch[name] = column
        batch["teacher_mask"] = batch["response_mask"].any(-1)
        reports.append(execution.update(batch, TOP))
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-6)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-5)


FUSED = OPD.replace(policy_loss={"fn": "logprobs.fused_full_kl", "divergence": "forward"})


def by_whole_logits(models, batch, temperature, caps=(None, None)):
    """The mean of KL(teacher ‖ policy) and twice that of their JSD at temperature 2, and the norm of its gradient."""
    total = torch.zeros(())
    for row in range(len(batch)):
        logits = [plain_logits(model, batch, row) for model in models]
        z, y = (x[None] if cap is None else cap * (x[None] / cap).tanh() for x, cap in zip(logits, caps, strict=True))
        mask = torch.ones(z.shape[:2], dtype=torch.bool)
        forward = losses.full_kl(z, y, mask, direction="forward", temperature=temperature)
        total = total + (forward + 2 * losses.jsd(z, y, mask, temperature=2.0)).sum() / batch["response_mask"].sum()
    total.backward()
    return float(total), float(torch.stack([x.grad.norm() for x in models[0].parameters()]).norm())


@pytest.mark.parametrize("padded", [(), ("policy",), ("teacher",), ("policy", "teacher")])
@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_micro_batch": 40}])
def test_the_whole_vocabulary_from_hidden_states(model_path, tmp_path, settings, padded):
    """Of a wider teacher, at the sampler's temperature unless the loss has its own; both, one or none is packed."""
    wide = tiny.save_model(tmp_path / "wide", seed=3, hidden_size=96, num_attention_heads=3)
    own = {"coefficient": 2.0, "loss": use("logprobs.fused_full_kl", divergence="jsd", temperature=2.0)}
    algorithm = FUSED.replace(loss_terms=[own])
    options = {"teacher": str(wide), "fused_head": True, "temperature": 0.7, **settings}
    execution = local(model_path, algorithm, **options)
    batch = training_batch(execution)
    modules = {"policy": execution.training.policy.module, "teacher": execution.training.teachers[""]}
    for name in padded:
        modules[name].set_attn_implementation("sdpa")
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (model_path, wide)]
    loss, norm = by_whole_logits(models, batch, 0.7)
    report = execution.update(batch, algorithm)
    assert report.loss == pytest.approx(loss, rel=1e-4)
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert all(x.grad is None for x in execution.training.teachers[""].parameters())


def test_soft_caps_are_those_of_the_models(model_path, teacher_path, monkeypatch):
    own = {"coefficient": 2.0, "loss": use("logprobs.fused_full_kl", divergence="jsd", temperature=2.0)}
    algorithm = FUSED.replace(loss_terms=[own])
    execution = local(model_path, algorithm, teacher=str(teacher_path), fused_head=True)
    batch = training_batch(execution)
    for module, cap in ((execution.training.policy.module, 1.5), (execution.training.teachers[""], 3.0)):
        monkeypatch.setattr(module.config, "final_logit_softcapping", cap, raising=False)
    paths = (model_path, teacher_path)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths]
    loss, norm = by_whole_logits(models, batch, 1.0, (1.5, 3.0))
    report = execution.update(batch, algorithm)
    assert report.loss == pytest.approx(loss, rel=1e-4)
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


def test_a_head_of_another_size_is_refused_at_the_start(model_path, tmp_path):
    """The tokens are the same; some models pad their heads."""
    padded = tiny.save_model(tmp_path / "padded", vocab_size=len(tiny.VOCABULARY) + 8)
    with pytest.raises(ValueError, match=r"its head and the policy's have \{.*40.*\} rows, expected one size"):
        local(model_path, FUSED, teacher=str(padded), fused_head=True)
    local(model_path, OPD, teacher=str(padded))
