"""What only vLLM's GPU runner (V2) gives: log-probs of given tokens, experts, and sampling masks.

The engines are in processes of their own, which ``v2_process.py`` starts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlprims import algorithms
from rlprims.data_proto import DataProto
from rlprims.types import SamplingSupport
from tests import tiny
from tests.execution.execution_contract import local, prompts, v2_environment
from tests.execution.v2_process import FILTERS, QUESTIONS, SAMPLINGS, sample, sample_long, turn_around

pytestmark = pytest.mark.ray


def run_v2(*arguments):
    """Run ``v2_process.py`` with vLLM's V2 runner, its kernels in Triton's interpreter."""
    environment = v2_environment()
    from rlprims.execution.ray._cluster import CPU_ENVIRONMENT, WORKER_ENVIRONMENT

    command = [sys.executable, str(Path(__file__).with_name("v2_process.py")), *map(str, arguments)]
    subprocess.run(
        command, env=os.environ | WORKER_ENVIRONMENT | CPU_ENVIRONMENT | environment, check=True, timeout=900
    )


def sets_of(batch):
    """bool (T, V) of each row: a large set may be written as what it leaves out."""
    for ids, counts, mask in zip(batch["kept_ids"], batch["kept_counts"], batch["response_mask"], strict=True):
        yield SamplingSupport.from_counts(ids, counts[mask]).allowed(3000)


def test_v2_returns_the_sets_of_its_log_probs_and_of_one_process(tmp_path):
    """Calls run together: some with a filter, greedy and plain ones. A set of more than 2,048 ids comes as bits."""
    model = tiny.save_model(tmp_path / "model", vocab_size=3000)
    run_v2("sets", model, tmp_path)
    one, sizes = local(model, algorithms.reinforce()), {}
    for name, sampling in FILTERS.items():
        masks, scores = (DataProto.load(tmp_path / f"{name} {way}") for way in ("masks", "log-probs"))
        expected = one.generate(prompts(QUESTIONS), sampling, seed=5, prompt_width=12)
        assert ("kept_ids" in masks) == sampling.truncates
        for column in ["responses", "response_mask", "ended"]:
            assert torch.equal(masks[column], scores[column]), (name, column, "log-probs")
            assert torch.equal(masks[column], expected[column]), (name, column, "one process")
        if sampling.truncates:
            for a, b, c in zip(*map(sets_of, (masks, scores, expected)), strict=True):
                assert torch.equal(a, b), (name, "log-probs")
                assert torch.equal(a, c), (name, "one process")
        assert torch.equal(masks["rollout_log_probs"], scores["rollout_log_probs"])
        torch.testing.assert_close(masks["rollout_log_probs"], expected["rollout_log_probs"], rtol=0, atol=2e-5)
        sizes |= {name: int(masks["kept_counts"].max())} if sampling.truncates else {}
    assert sizes["nothing left out"] == 0
    assert sizes["wide"] > 2048
    assert sizes["top_k"] == 5


def test_v2_records_the_experts_of_one_process(tmp_path):
    """Tokens and experts, also of prompts in vLLM's cache, which it does not read again."""
    model = tiny.save_mixture(tmp_path / "model", mlp_only_layers=[1])  # vLLM's record has the dense layer too
    run_v2("routes", model, tmp_path)
    one = local(model, algorithms.reinforce(), replay_routes=True)
    mine = {name: sample(one, name) for name in SAMPLINGS} | dict.fromkeys(("new", "cached"), sample_long(one))
    for name, expected in mine.items():
        theirs = DataProto.load(tmp_path / name)
        for column in ("responses", "response_mask", "ended", "routed_experts"):
            assert torch.equal(expected[column], theirs[column]), (name, column)
        torch.testing.assert_close(expected["rollout_log_probs"], theirs["rollout_log_probs"], rtol=0, atol=2e-5)
        if name != "truncated":  # which has another temperature
            torch.testing.assert_close(one.log_probs(theirs), theirs["rollout_log_probs"], rtol=0, atol=2e-5)

    # A request that goes on over an update keeps the experts of the tokens that it read before it.
    over, after = (DataProto.load(tmp_path / f"{when} an update") for when in ("over", "after"))
    turn_around(one.training.policy.module)
    new = sample_long(one, 2)
    for column in ("responses", "routed_experts"):
        assert torch.equal(after[column], new[column]), column
    assert torch.equal(over["responses"][:, :4], mine["new"]["responses"][:2, :4])
    for row, length in enumerate(over["attention_mask"].sum(-1).tolist()):
        read = over["routed_experts"][row][over["attention_mask"][row]]
        assert (read[: length - 1] >= 0).all()
        assert (read[length - 1] == -1).all()
    prompts = slice(0, 64)
    assert torch.equal(over["routed_experts"][:, prompts], mine["new"]["routed_experts"][:2, prompts])
    assert not torch.equal(new["routed_experts"][:, prompts], mine["new"]["routed_experts"][:2, prompts])
