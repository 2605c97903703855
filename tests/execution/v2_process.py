"""A process with an engine on vLLM's V2 runner.

``python v2_process.py MODEL OUT`` samples and saves batches; ``python v2_process.py MODEL OUT TEACHER`` scores the
batch in OUT.
"""

import sys
from pathlib import Path

from rlprims.data_proto import DataProto
from rlprims.execution import ModelConfig, RayConfig, Sampling
from tests import tiny
from tests.execution.execution_contract import prompts

QUESTIONS = ("1+2=", "12+34=", "abc def 99?", "7")
COLUMNS = ["prompts", "responses", "attention_mask", "response_mask"]
SAMPLINGS = {
    "plain": Sampling(max_new_tokens=6),
    "truncated": Sampling(max_new_tokens=4, temperature=0.7, top_k=12, top_p=0.9, min_p=0.01),
}


def sample(execution, name):
    return execution.generate(prompts(QUESTIONS), SAMPLINGS[name], seed=5, prompt_width=12)


def sample_in(engine, name):
    engine.begin(0, prompts(QUESTIONS), SAMPLINGS[name], seed=5, prompt_width=12)
    while True:
        if complete := engine.step():
            return complete[0]


def score(scorer, batch):
    """The log-probs of the sampled tokens, of the likeliest tokens, and of those that the batch names."""
    columns = {"log_probs": scorer.log_probs(batch)}
    for name, rows in (("likeliest", batch.select(batch_keys=COLUMNS)), ("given", batch)):
        columns[name] = scorer.top(rows, 3)["teacher_topk_log_probs"]
    return DataProto.from_dict(tensors=columns)


def main(model, out, teacher=None):
    if teacher is not None:
        from rlprims.execution.ray._vllm_scorer import VllmScorer

        pools = {"pools": {"teacher": {}}, "roles": {"teacher": "teacher"}, "teacher_engine": "vllm"}
        cluster = RayConfig(kv_cache_bytes=64 << 20, **pools)
        scorer = VllmScorer(teacher, ModelConfig(path=model, device="cpu"), cluster)
        assert scorer.takes_ids, "vLLM took its V1 runner"
        score(scorer, DataProto.load(Path(out) / "batch")).save(Path(out) / "scores")
        return
    from rlprims.execution.ray._vllm import VllmEngine

    config = ModelConfig(path=model, device="cpu")
    cluster = RayConfig(kv_cache_bytes=64 << 20)
    engine = VllmEngine(config, tiny.tokenizer(), cluster, context_window=128)
    assert engine.llm.collective_rpc("draw_as_a_gpu") == [True], "vLLM took its V1 runner"
    for name in SAMPLINGS:
        sample_in(engine, name).save(Path(out) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
