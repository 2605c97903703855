"""The contract of truncated sampling: the set that a token was drawn from comes along, and it is scored within it."""

import math
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlprims import algorithms, corrections
from rlprims.data_proto import DataProto
from rlprims.execution import Sampling
from tests.execution.execution_contract import (
    LIMIT,
    QUESTIONS,
    WIDTH,
    local,
    plain_logits,
    prompts,
    responses,
    widened,
    with_columns,
)

REINFORCE = algorithms.reinforce()
GRPO = algorithms.grpo()
TRUNCATED = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "nothing left out": {"top_k": 32, "top_p": 0.999999, "min_p": 1e-9},
}
ROWS = range(len(QUESTIONS))


def generate(execution, *, temperature=1.0, **options):
    sampling = Sampling(max_new_tokens=LIMIT, temperature=temperature, **options)
    return execution.generate(prompts(), sampling, seed=0, prompt_width=WIDTH)


def sets(batch):
    """For each response the sets of its tokens, from the columns; None where it is the whole vocabulary."""
    found = []
    for ids, counts, mask in zip(batch["kept_ids"].unbind(), batch["kept_counts"], batch["response_mask"], strict=True):
        parts = ids.split(counts.tolist())
        assert (counts[~mask] == 0).all()
        found.append([written(part.tolist()) for part in parts[: int(mask.sum())]])
    return found


def written(ids):
    """A set of the 32 tokens, which may be written as what it leaves out; None: all."""
    return {*range(32)} - {~v for v in ids} if ids and ids[0] < 0 else set(ids) or None


def by_hand(p, top_k=0, top_p=1.0, min_p=0.0):
    """The filters one after another, each over what the one before it left: min-p, top-k, top-p, as in vLLM."""
    left = [token for token in p.argsort(descending=True).tolist() if p[token] >= min_p * p.max()]
    left = left[: top_k or None]
    kept, mass = [], 0.0
    for token in left:
        if mass >= top_p * float(p[left].sum()):
            break
        kept.append(token)
        mass += float(p[token])
    return set(kept)


def without_sets(batch):
    return batch.select(batch_keys=[name for name in dict(batch.batch.items()) if not name.startswith("kept")])


def within(logits, ids):
    """Log-probs of the policy that is truncated to these ids."""
    banned = torch.ones(logits.shape[-1], dtype=torch.bool)
    banned[sorted(ids) if ids else slice(None)] = False
    return logits.masked_fill(banned, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("name", TRUNCATED)
def test_the_sets_are_those_that_the_filters_leave(execution, plain, name):
    batch = generate(execution, **TRUNCATED[name])
    for row, found in enumerate(sets(batch)):
        probabilities = plain_logits(plain, batch, row).detach().double().softmax(-1)
        for token, ids, p in zip(responses(batch)[row], found, probabilities, strict=True):
            left = by_hand(p, **TRUNCATED[name])
            assert ids == (left if len(left) < len(p) else None)  # nothing is recorded of the whole vocabulary
            assert token in left


def test_without_truncation_there_are_no_sets(execution, sampled):
    assert "kept_ids" not in sampled
    greedy = execution.generate(prompts(), Sampling(top_p=0.5).greedy(), seed=0, prompt_width=WIDTH)
    assert "kept_ids" not in greedy


@pytest.mark.parametrize("name", TRUNCATED)
def test_the_trainer_scores_what_the_sampler_drew(execution, plain, name):
    """On the same weights every importance weight is 1. Over the whole vocabulary each is S, the kept mass."""
    batch = generate(execution, **TRUNCATED[name])
    mask, sampler = batch["response_mask"], batch["rollout_log_probs"]
    trainer = execution.log_probs(batch)
    torch.testing.assert_close(trainer, sampler, rtol=1e-5, atol=1e-5)
    weights = corrections.tis(trainer, sampler, mask).values[mask]
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-5, atol=1e-5)
    whole = execution.log_probs(without_sets(batch))
    mass = []
    for row, found in enumerate(sets(batch)):
        probabilities = plain_logits(plain, batch, row).detach().softmax(-1)
        mass += [float(p[sorted(ids)].sum()) if ids else 1.0 for ids, p in zip(found, probabilities, strict=True)]
    biased = corrections.tis(whole, sampler, mask).values[mask]
    torch.testing.assert_close(biased, torch.tensor(mass), rtol=1e-4, atol=1e-4)
    assert (biased.mean() < 0.95) == (name != "nothing left out")


def test_entropies_are_of_the_sets(execution, plain):
    batch = generate(execution, top_p=0.8)
    got = execution.entropies(batch)
    for row, found in enumerate(sets(batch)):
        logits = plain_logits(plain, batch, row)
        scores = [within(z, ids) for z, ids in zip(logits, found, strict=True)]
        expected = torch.stack([torch.distributions.Categorical(logits=score).entropy() for score in scores])
        torch.testing.assert_close(got[row, : len(expected)], expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_reference_is_within_the_sets_too(fresh, without_engines):
    execution = fresh(GRPO, **without_engines)
    batch = generate(execution, top_k=5)
    ours, theirs = execution.log_probs(batch), execution.log_probs(batch, reference=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # its weights are the policy's


def test_the_update_is_the_one_of_masked_logits(fresh, model_path, without_engines):
    """REINFORCE with A = 1: loss and norm of the gradient of Σ −log π_K / N, row by row in one graph of torch."""
    execution = fresh(GRPO, **without_engines)  # with the reference, which was asked for above
    batch = generate(execution, top_k=6, min_p=0.02)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    terms, mass = [], []
    for row, found in enumerate(sets(batch)):
        for token, ids, z in zip(responses(batch)[row], found, plain_logits(model, batch, row), strict=True):
            terms.append(-within(z, ids)[token])
            mass.append(float(z.detach().softmax(-1)[sorted(ids)].sum()))
    loss = torch.stack(terms).mean()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    columns = {"group_ids": torch.arange(len(batch)) // 2, "advantages": torch.ones(batch["responses"].shape)}
    report = execution.update(with_columns(batch, **columns), REINFORCE)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    assert float(report.metrics["support_mass"].value()) == pytest.approx(sum(mass) / len(mass), rel=1e-5)
    assert float(report.metrics["outside_support"].value()) == 0


def test_the_sets_follow_their_rows_through_a_batch(execution, tmp_path):
    """Reordered, repeated, cut and joined, saved, sent to another process, and padded: the log-probs move as rows."""
    batch = generate(execution, top_p=0.8)
    want = execution.log_probs(batch)
    order = torch.tensor([5, 0, 3, 3, 7, 1])
    batch.save(tmp_path / "batch")
    twice = torch.arange(len(batch)).repeat_interleave(2)
    cases = {
        "select": (batch.select_idxs(order.numpy()), want[order]),
        "slice": (batch[2:5], want[2:5]),
        "repeat": (batch.repeat(2, interleave=True), want[twice]),
        "concat": (DataProto.concat([batch[5:], batch[:5]]), torch.cat([want[5:], want[:5]])),
        "save": (DataProto.load(tmp_path / "batch"), want),
        "pickle": (pickle.loads(pickle.dumps(batch)), want),  # noqa: S301
    }
    for name, (moved, expected) in cases.items():
        assert sets(moved) is not None
        torch.testing.assert_close(execution.log_probs(moved), expected, rtol=1e-5, atol=1e-5, msg=name)


def test_padding_is_not_read(execution):
    batch = generate(execution, top_p=0.8)
    columns = {name: batch[name] for name in ("kept_ids", "kept_counts")}
    wide = widened(without_sets(batch), 3, 0, 7)
    moved = with_columns(wide, **columns)
    torch.testing.assert_close(execution.log_probs(moved), execution.log_probs(batch), rtol=1e-5, atol=1e-5)


class TestLocal:
    """What no cluster needs to show again."""

    @pytest.mark.parametrize(
        "options",
        [{"max_tokens_per_micro_batch": 40}, {"packing": False}, {"packing": False, "max_tokens_per_micro_batch": 60}],
        ids=["micro-batches", "padded", "padded micro-batches"],
    )
    def test_the_sets_follow_their_rows_into_micro_batches(self, model_path, options):
        batch = generate(local(model_path, REINFORCE), top_p=0.8)
        noise = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
        batch = with_columns(batch, group_ids=torch.arange(len(batch)) // 2, advantages=noise)
        whole, parts = local(model_path, REINFORCE), local(model_path, REINFORCE, **options)
        torch.testing.assert_close(parts.log_probs(batch), whole.log_probs(batch), rtol=1e-5, atol=1e-5)
        one, several = whole.update(batch, REINFORCE), parts.update(batch, REINFORCE)
        assert several.loss == pytest.approx(one.loss, rel=1e-5)
        assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        for name, metric in one.metrics.items():
            assert float(several.metrics[name].value()) == pytest.approx(float(metric.value()), rel=1e-5), name

    @pytest.mark.parametrize("name", TRUNCATED)
    def test_the_sets_are_those_at_the_temperature(self, model_path, plain, name):
        execution = local(model_path, REINFORCE, temperature=0.7)
        batch = generate(execution, temperature=0.7, **TRUNCATED[name])
        torch.testing.assert_close(execution.log_probs(batch), batch["rollout_log_probs"], rtol=1e-5, atol=1e-5)
        for row, found in enumerate(sets(batch)):
            probabilities = (plain_logits(plain, batch, row).detach().double() / 0.7).softmax(-1)
            assert [ids or {*range(32)} for ids in found] == [by_hand(p, **TRUNCATED[name]) for p in probabilities]

    def test_the_fused_head_is_within_the_sets(self, model_path):
        whole, fused = local(model_path, REINFORCE), local(model_path, REINFORCE, fused_head=True)
        batch = generate(whole, top_k=7, top_p=0.9)
        noise = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(0))
        batch = with_columns(batch, group_ids=torch.arange(len(batch)) // 2, advantages=noise)
        torch.testing.assert_close(fused.log_probs(batch), whole.log_probs(batch), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fused.entropies(batch), whole.entropies(batch), rtol=1e-5, atol=1e-5)
        one, other = whole.update(batch, REINFORCE), fused.update(batch, REINFORCE)
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)

    @pytest.mark.parametrize("name", TRUNCATED)
    def test_the_ratio_is_one_to_a_millionth(self, model_path, name):
        """Weights in float64, so that what is left of the gap is not the rounding of two forward passes."""
        execution = local(model_path, REINFORCE)
        module = execution.training.policy.module.double()
        module.register_forward_hook(lambda _, __, output: type(output)(**{**output, "logits": output.logits.float()}))
        batch = generate(execution, **TRUNCATED[name])
        mask = batch["response_mask"]
        ratio = (execution.log_probs(batch) - batch["rollout_log_probs"]).exp()[mask]
        assert float((ratio - 1).abs().max()) < 1e-6

    def test_an_empty_batch_has_empty_sets(self, model_path):
        execution = local(model_path, REINFORCE)
        batch = execution.generate(prompts([]), Sampling(max_new_tokens=3, top_k=5), seed=0, prompt_width=WIDTH)
        assert batch["kept_counts"].shape == (0, 3)
        assert execution.log_probs(batch).shape == (0, 3)

    def test_sets_of_another_token_are_refused(self, model_path):
        execution = local(model_path, REINFORCE)
        batch = generate(execution, top_k=2)
        batch["responses"] = torch.where(batch["response_mask"], (batch["responses"] + 1) % 32, 0)
        with pytest.raises(ValueError, match="expected one of the 2 ids in its kept set"):
            execution.log_probs(batch)
