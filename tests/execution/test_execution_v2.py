"""The model runner that vLLM takes on a GPU (V2) draws by itself what one process draws, and over new weights too.

The contract of ``generate``, adapters, and weights that arrive while an engine samples are tested with V2 where they
are tested with V1.
"""

import pytest
import torch

from rlprims import algorithms
from rlprims.execution import ExecutionError, OptimizerConfig, Sampling
from tests import tiny
from tests.execution.execution_contract import LIMIT, WIDTH, local, on_v2, prompts

pytest.importorskip("ray")

from tests.execution.test_execution_ray import assert_same_steps
from tests.execution.test_execution_sync import halve_a_row, in_worker

GRPO = algorithms.grpo()
SLOW = OptimizerConfig(lr=1e-3, eps=1e-4)


@pytest.mark.ray
def test_v2_draws_the_tokens_of_one_process(tmp_path):
    """Two processes of an engine, over two verified updates; truncated and with stop strings.

    An embedding halved in the engine is found.
    """
    path = tiny.save_model(tmp_path / "model", tie_word_embeddings=True)
    one = local(path, GRPO, optimizer=SLOW)
    many = on_v2(path, GRPO, optimizer=SLOW, cluster={"max_replacements": 0, "tensor_parallel_size": 2})
    drawn_by_v2, in_flight = in_worker(
        many,
        lambda worker: (
            worker.engine.llm.collective_rpc("draw_as_a_gpu"),
            worker.engine.llm.llm_engine.vllm_config.max_concurrent_batches,
        ),
    )
    assert drawn_by_v2 == [True, True], "vLLM took its V1 runner"
    assert in_flight == 2, "vLLM waits for the tokens of a batch before it schedules the next, unlike on a GPU"
    assert_same_steps(one, many, count=2)
    assert many.rollouts.sent
    for sampling in (
        Sampling(max_new_tokens=6, temperature=0.7, top_k=12, top_p=0.9, min_p=0.01),
        Sampling(max_new_tokens=LIMIT, stop=("a", "never said", "1")),
    ):
        mine, theirs = (
            execution.generate(prompts(), sampling, seed=5, prompt_width=WIDTH) for execution in (one, many)
        )
        for column in ("responses", "response_mask", "ended", *(["kept_ids"] if sampling.truncates else [])):
            for a, b in zip(mine[column].unbind(), theirs[column].unbind(), strict=True):
                assert torch.equal(a, b), column
        torch.testing.assert_close(mine["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
    in_worker(many, halve_a_row)
    with pytest.raises(ExecutionError, match=r"does not have the weights .* tensors differ, model.embed_tokens.weight"):
        many.rollouts._verify(0, *many.rollouts._ask(0))
    many.close()
