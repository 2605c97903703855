"""The contract of ``log_probs``, ``entropies`` and ``values``: they belong to the tokens, not to the batch."""

import pytest
import torch

from rlprims import algorithms
from tests.execution.execution_contract import LIMIT, plain_logits, responses, widened, with_columns


@pytest.fixture(scope="module")
def trained_critic(fresh, sampled, without_engines):
    """PPO with a reference and a critic that no longer answers 0."""
    execution = fresh(algorithms.ppo().replace(kl_in_reward={}), **without_engines)
    mask = sampled["response_mask"]
    ramp = torch.where(mask, torch.arange(LIMIT) / LIMIT, 0.0)
    batch = with_columns(
        sampled, values=torch.zeros(mask.shape), returns=ramp, group_ids=torch.zeros(len(sampled), dtype=torch.int64)
    )
    for _ in range(2):
        execution.update_critic(batch, algorithms.ppo())
    return execution


MEASURES = {
    "log_probs": lambda execution, batch: execution.log_probs(batch),
    "reference": lambda execution, batch: execution.log_probs(batch, reference=True),
    "entropies": lambda execution, batch: execution.entropies(batch),
    "values": lambda execution, batch: execution.values(batch),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
class TestATokensMeasure:
    def test_is_not_0_inside_the_mask_and_is_0_outside(self, trained_critic, sampled, measure):
        measured, mask = measure(trained_critic, sampled), sampled["response_mask"]
        assert measured.shape == mask.shape
        assert measured.dtype == torch.float32
        assert not measured.requires_grad
        assert (measured[mask] != 0).all()
        assert (measured[~mask] == 0).all()

    @pytest.mark.parametrize("token", [0, 9])
    def test_does_not_depend_on_the_padding(self, trained_critic, sampled, measure, token):
        wide = widened(sampled, left=5, right=3, token=token)
        measured = measure(trained_critic, wide)
        assert measured.shape[1] == LIMIT + 3
        assert_same(measured[:, :LIMIT], measure(trained_critic, sampled))

    def test_does_not_depend_on_the_rows_beside_it(self, trained_critic, sampled, measure):
        whole = measure(trained_critic, sampled)
        order = [5, 0, 3]
        assert_same(measure(trained_critic, sampled.select_idxs(order)), whole[order])


@pytest.mark.parametrize("tokens", [40, 100])
def test_micro_batches_do_not_change_log_probs(fresh, execution, sampled, tokens, without_engines):
    small = fresh(algorithms.reinforce(), max_tokens_per_micro_batch=tokens, **without_engines)
    assert_same(small.log_probs(sampled), execution.log_probs(sampled))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_are_those_of_the_plain_model_at_the_samplers_temperature(
    fresh, plain, sampled, temperature, without_engines
):
    measured = fresh(algorithms.reinforce(), temperature=temperature, **without_engines).entropies(sampled)
    for row, tokens in enumerate(responses(sampled)):
        expected = torch.distributions.Categorical(logits=plain_logits(plain, sampled, row) / temperature).entropy()
        assert_same(measured[row, : len(tokens)], expected.detach())
        assert (measured[row, len(tokens) :] == 0).all()


@pytest.mark.parametrize("tokens", [40, 100])
def test_micro_batches_do_not_change_entropies(fresh, execution, sampled, tokens, without_engines):
    small = fresh(algorithms.reinforce(), max_tokens_per_micro_batch=tokens, **without_engines)
    assert_same(small.entropies(sampled), execution.entropies(sampled))


def test_a_row_beyond_the_budget_is_named(fresh, sampled, without_engines):
    small = fresh(algorithms.reinforce(), max_tokens_per_micro_batch=20, **without_engines)
    with pytest.raises(ValueError, match=r"row \d+ has \d+ tokens, more than max_tokens=20"):
        small.log_probs(sampled)


def test_values_begin_at_zero(fresh, sampled, without_engines):
    assert (fresh(algorithms.ppo(), **without_engines).values(sampled) == 0).all()


def test_the_reference_begins_as_the_policy(trained_critic, sampled):
    assert torch.equal(trained_critic.log_probs(sampled, reference=True), trained_critic.log_probs(sampled))


def test_a_model_that_no_signature_asked_for_is_not_there(execution, sampled):
    with pytest.raises(ValueError, match="no reference model was loaded"):
        execution.log_probs(sampled, reference=True)
    with pytest.raises(ValueError, match="no critic was loaded"):
        execution.values(sampled)
    with pytest.raises(ValueError, match="no critic was loaded"):
        execution.update_critic(with_columns(sampled, group_ids=torch.arange(len(sampled))), algorithms.ppo())


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
