"""Weights that arrive while an engine samples: what its responses do then, and the version of each token."""

import pytest
import torch

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import Sampling
from tests import tiny
from tests.execution.execution_contract import WIDTH, cluster, local, on_v2, prompts, training_batch

pytestmark = pytest.mark.ray
GRPO = algorithms.grpo()
LONG = Sampling(max_new_tokens=100)
CHUNKED = {"engine_options": {"max_num_batched_tokens": 8}}
"""The engine reads a prompt, or the tokens of a response that it computes again, in several batches."""


@pytest.mark.parametrize(
    ("mode", "make", "count", "options"),
    [
        ("keep", cluster, 64, {}),
        pytest.param("recompute", cluster, 64, {}, marks=pytest.mark.release),
        pytest.param("wait", cluster, 64, {}, marks=pytest.mark.release),
        pytest.param("keep", on_v2, 16, {}, marks=pytest.mark.release),
        ("recompute", on_v2, 16, CHUNKED),
    ],
)
def test_responses_over_new_weights(tmp_path, mode, make, count, options):
    path = tiny.save_model(tmp_path / "model", tie_word_embeddings=True)
    one = local(path, GRPO)
    execution = make(
        path, GRPO, engine="vllm", max_rows_per_generation=2, cluster={"running_requests": mode, **options}
    )
    batch = training_batch(one)
    questions = [f"{i}+{i}=" for i in range(count)]
    with execution.stream(LONG, seed=3, prompt_width=WIDTH, over_updates=True) as stream:
        numbers = [stream.submit(prompts([question], [i])) for i, question in enumerate(questions[:-4])]
        answers = stream.take()
        execution.update(batch, GRPO)
        execution.sync_weights()  # the probe is scored beside the requests
        numbers += [stream.submit(prompts([question], [count - 4 + i])) for i, question in enumerate(questions[-4:])]
        while len(answers) < len(numbers):
            answers |= stream.take()
    assert execution.rollouts.replacements == 0
    rows = DataProto.concat([answers[number] for number in numbers])
    mask, versions = rows["response_mask"], rows["versions"]
    oldest = versions.where(mask, 2).amin(1)
    mixed = (versions == 2).logical_and(mask).any(1) & (oldest == 1)
    assert mixed.any() == (mode != "wait"), "responses were being sampled when the weights arrived"
    assert (oldest == 2).any(), "others began later"
    assert torch.equal(rows["weights_version"], oldest)
    assert (versions.where(mask, 2).diff(dim=1) >= 0).all()
    old = one.log_probs(rows)
    one.update(batch, GRPO)
    new = one.log_probs(rows)
    drawn, by_old = rows["rollout_log_probs"], mask & (versions == 1)
    torch.testing.assert_close(drawn[by_old], old[by_old], rtol=0, atol=1e-4)
    by_new = mask & (versions == 2)
    in_mixed = by_new & mixed[:, None]
    if mode != "wait":
        first = in_mixed & (in_mixed.cumsum(1) == 1)
        assert (drawn - old)[first].abs().max() > 1e-3, "a token of the new version was drawn from the old"
    if mode == "keep":  # the mixed ones read keys and values of the old weights
        assert (drawn - new)[in_mixed].abs().max() > 1e-3
        by_new &= ~in_mixed
    torch.testing.assert_close(drawn[by_new], new[by_new], rtol=0, atol=1e-4)
    assert (old - new)[by_new].abs().max() > 1e-2, "the update is seen"
    # No prompt that was read with the old weights is found again with the new ones.
    one.sync_weights()
    again = execution.generate(prompts(questions[:4]), LONG, seed=5, prompt_width=WIDTH)
    assert torch.equal(
        again["responses"], one.generate(prompts(questions[:4]), LONG, seed=5, prompt_width=WIDTH)["responses"]
    )
