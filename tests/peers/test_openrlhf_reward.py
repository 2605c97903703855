"""OpenRLHF calls the reward function of docs/interop.md, as its single-turn executor does after a generation."""

import asyncio
import types

import pytest
from openrlhf.utils.agent import SingleTurnAgentExecutor

from tests import tiny
from tests.interop.test_hooks import OTHERS

pytestmark = pytest.mark.peers


class Engine:
    """A vLLM that says what it is told to."""

    def __init__(self, token_ids):
        self.token_ids = token_ids

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        said = types.SimpleNamespace(token_ids=self.token_ids, finish_reason="stop", logprobs=None)
        return types.SimpleNamespace(outputs=[said])


@pytest.mark.parametrize(("said", "score"), [("2<eos>", 1.0), ("3<eos>", 0.0)])
def test_a_score_of_a_generation(said, score, tmp_path):
    (tmp_path / "score.py").write_text(dict(OTHERS)["OpenRLHF"], encoding="utf-8")
    tokenizer = tiny.tokenizer()
    executor = SingleTurnAgentExecutor(str(tmp_path / "score.py"))
    engine = Engine(tokenizer(text=said, add_special_tokens=False)["input_ids"])
    sampling = types.SimpleNamespace(max_tokens=8, logprobs=None)
    output = asyncio.run(executor.execute("1+1=", "2", sampling, 64, tokenizer, engine))
    assert output["reward"].tolist() == [score]
    assert output["scores"].tolist() == [score]
