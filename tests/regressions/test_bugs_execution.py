"""Sampling, critic and mask on a tiny model."""

from pathlib import Path

import torch

from rlprims import algorithms
from tests import tiny
from tests.execution.execution_contract import BACKENDS, SAMPLING, WIDTH, prompts, responses, training_batch


def test_t3_the_temperature_divides_logits_and_no_values(tmp_path: Path) -> None:
    """slime d9d149dce: the critic's output was divided too."""
    path = tiny.save_model(tmp_path)
    hot, cold = (BACKENDS["local"](path, algorithms.ppo(), temperature=temperature) for temperature in (1.0, 0.5))
    batch = training_batch(hot)
    for execution in (hot, cold):
        execution.update_critic(batch, algorithms.ppo())  # before it, all values are 0
    assert hot.values(batch).abs().max() > 0
    assert torch.equal(hot.values(batch), cold.values(batch))


def test_m12_a_sampled_padding_token_is_a_token(tmp_path: Path) -> None:
    """trl#5303: a mask made of ids (every id but the padding's) loses what was sampled, or the end if both are one."""
    batch = BACKENDS["local"](tiny.save_model(tmp_path), algorithms.reinforce()).generate(
        prompts(), SAMPLING, seed=0, prompt_width=WIDTH
    )
    assert sum(row.count(tiny.PAD_ID) for row in responses(batch)) > 0
    by_length = torch.arange(SAMPLING.max_new_tokens) < batch["response_mask"].sum(-1, keepdim=True)
    assert torch.equal(batch["response_mask"], by_length)
