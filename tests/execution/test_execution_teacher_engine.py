"""A teacher in vLLM engines says of a batch what the same model of transformers says."""

import numpy as np
import pytest
import torch

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import ExecutionError
from tests import tiny
from tests.execution.execution_contract import QUESTIONS, SAMPLING, WIDTH, cluster, local, prompts

pytestmark = pytest.mark.ray
K = 4
TOP = algorithms.opsd(size=K)
BOTH = algorithms.opd().replace(loss_terms=[{"coefficient": 1.0, "loss": TOP.policy_loss}], support=TOP.support)
"""It reads the teacher's log-probs of the sampled token, and of several."""
CLUSTER = {"pools": {"teacher": {"workers": 2}}, "roles": {"teacher": "teacher"}, "teacher_engine": "vllm"}


@pytest.fixture(scope="module")
def one(model_path, teacher_path):
    return local(model_path, BOTH, teacher=str(teacher_path))


@pytest.fixture(scope="module")
def engines(model_path, teacher_path):
    execution = cluster(model_path, BOTH, cluster=CLUSTER, teacher=str(teacher_path))
    yield execution
    execution.close()


@pytest.fixture(scope="module")
def batch(one):
    """Prompts of several lengths, one of them twice; a response without tokens, and one with a tool's answer."""
    sampled = one.generate(prompts((*QUESTIONS, QUESTIONS[1])), SAMPLING, seed=0, prompt_width=WIDTH)
    mask, attention = sampled["response_mask"].clone(), sampled["attention_mask"].clone()
    mask[1], attention[1, WIDTH:] = False, False
    longest = int(mask.sum(-1).argmax())
    mask[longest, 2:5] = False
    sampled["response_mask"], sampled["attention_mask"] = mask, attention
    return sampled


def test_the_log_probs_of_the_sampled_tokens(one, engines, batch):
    ours = engines.teacher_log_probs(batch)
    torch.testing.assert_close(ours, one.teacher_log_probs(batch), rtol=0, atol=2e-5)
    assert not ours[~batch["response_mask"]].any()
    assert torch.equal(engines.teacher_log_probs(batch[:1]), ours[:1]), "of fewer rows than engines"


@pytest.mark.parametrize("size", [K, 1000])
def test_the_likeliest_tokens(one, engines, batch, size):
    ours, theirs = engines.teacher_top(batch, size), one.teacher_top(batch, size)
    mask = batch["response_mask"]
    assert ours["topk_ids"].shape == (*mask.shape, min(size, len(tiny.VOCABULARY)))
    log_probs = ours["teacher_topk_log_probs"][mask]
    torch.testing.assert_close(log_probs, theirs["teacher_topk_log_probs"][mask], rtol=0, atol=2e-5)
    whole = one.teacher_top(batch, len(tiny.VOCABULARY))  # near ties may be in another order
    by_token = torch.zeros_like(whole["teacher_topk_log_probs"])
    by_token.scatter_(-1, whole["topk_ids"], whole["teacher_topk_log_probs"])
    torch.testing.assert_close(by_token[mask].gather(-1, ours["topk_ids"][mask]), log_probs, rtol=0, atol=2e-5)


def test_the_students_likeliest_tokens(one, engines, batch):
    given = batch.union(DataProto.from_dict(tensors={"topk_ids": one.top_tokens(batch, K)}))
    ours, theirs = engines.teacher_top(given, K), one.teacher_top(given, K)
    mask = batch["response_mask"]
    assert torch.equal(ours["topk_ids"], given["topk_ids"])
    a, b = (found["teacher_topk_log_probs"][mask] for found in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def random_rows(lengths):
    """Rows of random tokens of these lengths, each with a prompt of five tokens."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, len(tiny.VOCABULARY), (len(lengths), max(lengths))))
    attention = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    columns = {"prompts": tokens[:, :5], "responses": tokens[:, 5:], "attention_mask": attention}
    return DataProto.from_dict(tensors={**columns, "response_mask": attention[:, 5:]})


def test_a_row_may_fill_the_window(one, engines, batch):
    full = random_rows([one.context_window])
    torch.testing.assert_close(engines.teacher_log_probs(full), one.teacher_log_probs(full), rtol=0, atol=5e-5)
    with pytest.raises(ValueError, match="expected rows of at most 128 tokens, its context window, got 129"):
        engines.teacher_log_probs(random_rows([one.context_window + 1]))
    assert engines.teacher_log_probs(batch).any(), "the engine still works"


def test_rows_that_an_engine_reads_in_parts(one, engines):
    """vLLM reads 4096 tokens in a step on a CPU, so it cuts some rows."""
    many = random_rows([128 - i % 7 for i in range(100)])
    torch.testing.assert_close(engines.teacher_log_probs(many), one.teacher_log_probs(many), rtol=0, atol=5e-5)
    ours, theirs = (each.teacher_top(many, K)["teacher_topk_log_probs"] for each in (engines, one))
    mask = many["response_mask"]
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=5e-5)


def test_truncated_sampling_is_refused(engines, batch):
    kept = batch.union(DataProto.from_dict(tensors={"kept_counts": torch.ones_like(batch["responses"])}))
    with pytest.raises(ValueError, match="expected a batch of untruncated sampling"):
        engines.teacher_log_probs(kept)


def test_settings_are_refused_before_a_cluster_is_asked(model_path):
    with pytest.raises(ValueError, match=r"sampling\.temperature: with ray\.teacher_engine: vllm expected 1, got 0\.7"):
        cluster(model_path, BOTH, cluster=CLUSTER, temperature=0.7)


@pytest.mark.release
def test_a_teacher_of_other_tokens_is_refused(model_path, tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)teacher rank . of 2: .*another vocabulary"):
        cluster(model_path, BOTH, cluster=CLUSTER, teacher=str(tmp_path))


@pytest.mark.release
def test_no_engine_is_loaded_for_an_algorithm_without_a_teacher(model_path, batch):
    """Its temperature does not matter then."""
    execution = cluster(model_path, algorithms.reinforce(), cluster=CLUSTER, temperature=0.7)
    with pytest.raises(ValueError, match="no teacher was loaded"):
        execution.teacher_log_probs(batch)
    execution.close()


def test_reports_have_its_work_and_a_lost_engine_ends_the_run(engines, batch, tmp_path):
    """Last, as it ends the engines."""
    import ray

    engines.reports()
    engines.teacher_log_probs(batch)
    work = {report.worker: report.work for report in engines.reports()}
    tokens = [work[name]["teacher_log_probs"].tokens for name in ("teacher_0", "teacher_1")]
    assert sum(tokens) == int(batch["attention_mask"].sum())
    assert max(tokens) < 0.7 * sum(tokens), "divided by tokens"
    engines.save(tmp_path)()
    ray.kill(engines.teachers.workers[1])
    with pytest.raises(ExecutionError, match="teacher rank 1 of 2 died"):
        engines.teacher_log_probs(batch)
