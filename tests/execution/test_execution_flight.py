"""Weights that arrive while an engine samples: its responses go on, and each token has its version."""

import pytest
import torch

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.execution import Sampling
from tests import tiny
from tests.execution.execution_contract import WIDTH, cluster, local, prompts, training_batch

pytestmark = pytest.mark.ray
GRPO = algorithms.grpo()
LONG = Sampling(max_new_tokens=100)


def test_responses_go_on_under_new_weights(tmp_path):
    path = tiny.save_model(tmp_path / "model", tie_word_embeddings=True)
    one = local(path, GRPO)
    execution = cluster(path, GRPO, engine="vllm", max_rows_per_generation=2)
    batch = training_batch(one)
    questions = [f"{i}+{i}=" for i in range(64)]
    with execution.stream(LONG, seed=3, prompt_width=WIDTH, over_updates=True) as stream:
        numbers = [stream.submit(prompts([question], [i])) for i, question in enumerate(questions)]
        answers = stream.take()
        execution.update(batch, GRPO)
        execution.sync_weights()  # the probe is scored beside the requests
        while len(answers) < len(numbers):
            answers |= stream.take()
    assert execution.rollouts.replacements == 0
    rows = DataProto.concat([answers[number] for number in numbers])
    mask, versions = rows["response_mask"], rows["versions"]
    oldest = versions.where(mask, 2).amin(1)
    mixed = (versions == 2).logical_and(mask).any(1) & (oldest == 1)
    assert mixed.any(), "a response was being sampled when the weights arrived"
    assert (oldest == 2).any(), "and others began later"
    assert torch.equal(rows["weights_version"], oldest)
    assert (versions.where(mask, 2).diff(dim=1) >= 0).all()
    old = one.log_probs(rows)
    one.update(batch, GRPO)
    new = one.log_probs(rows)
    drawn, by_old = rows["rollout_log_probs"], mask & (versions == 1)
    torch.testing.assert_close(drawn[by_old], old[by_old], rtol=0, atol=1e-4)
    by_new = mask & (oldest == 2)[:, None]  # in the mixed ones keys and values of the old weights are read
    torch.testing.assert_close(drawn[by_new], new[by_new], rtol=0, atol=1e-4)
    assert (old - new)[by_new].abs().max() > 1e-2, "the update is seen"
    # No prompt that was read with the old weights is found again with the new ones.
    one.sync_weights()
    again = execution.generate(prompts(questions[:4]), LONG, seed=5, prompt_width=WIDTH)
    assert torch.equal(
        again["responses"], one.generate(prompts(questions[:4]), LONG, seed=5, prompt_width=WIDTH)["responses"]
    )
