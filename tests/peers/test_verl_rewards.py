"""verl's reward loop scores with our verifiers."""

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager

from rlprims.interop.verl import install
from tests import tiny

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # the warnings of verl, Ray and tensordict


def test_the_reward_manager():
    install()
    config = OmegaConf.create(
        {"reward": {"reward_manager": {"source": "register", "name": "rlprims"}, "sandbox_fusion": {"url": None}}}
    )
    tokenizer = tiny.tokenizer()

    async def scored(rows):
        manager = load_reward_manager(config, tokenizer)
        return [await manager.run_single(row) for row in rows]

    texts = ["7", "7", "8", "7"]
    tokens = torch.tensor([[*tokenizer.encode(text), tiny.EOS_ID, tiny.PAD_ID] for text in texts])
    data = DataProto.from_dict(
        {"responses": tokens, "attention_mask": torch.tensor([[1, 1, 1, 0]] * 4)},
        non_tensors={
            "data_source": np.array(["gsm8k", "mine", "gsm8k", "gsm8k"], dtype=object),
            "reward_model": np.array([{"ground_truth": truth} for truth in ("7", "7", "7", None)], dtype=object),
            "extra_info": np.array([{} for _ in texts], dtype=object),
        },
    )
    results = asyncio.run(scored([data[i : i + 1] for i in range(4)]))
    assert [result["reward_score"] for result in results] == [1.0, 0.0, 0.0, 0.0]
    # No verifier for the source, and no answer: these two failed, and say so.
    assert [result["reward_extra_info"]["failed"] for result in results] == [0.0, 1.0, 0.0, 1.0]
    assert {frozenset(result["reward_extra_info"]) for result in results} == {frozenset({"score", "acc", "failed"})}
