"""A process with an engine on vLLM's V2 runner.

``python v2_process.py routes MODEL OUT`` samples and saves batches with experts, also with cached prompts and over an
update. ``python v2_process.py teacher MODEL OUT TEACHER`` scores the batch in OUT. ``python v2_process.py sets MODEL
OUT`` samples with each filter, with sampling masks and with log-probs.
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
FILTERS = {
    "top_k": Sampling(max_new_tokens=4, top_k=5),
    "top_p": Sampling(max_new_tokens=4, top_p=0.8),
    "wide": Sampling(max_new_tokens=4, top_p=0.99),
    "min_p": Sampling(max_new_tokens=4, min_p=0.1),
    "stopped": Sampling(max_new_tokens=10, top_p=0.9, stop=("a", "1")),
    "all three": Sampling(max_new_tokens=4, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
    "nothing left out": Sampling(max_new_tokens=4, min_p=1e-9),
    "greedy": Sampling(max_new_tokens=4, top_p=0.9).greedy(),
    "plain": Sampling(max_new_tokens=6),
}

LONG = tuple(question * 8 for question in QUESTIONS[:2] for _ in range(2))  # two samples of each, of several blocks
LONG_SAMPLING = Sampling(max_new_tokens=10)


def sample(execution, name):
    return execution.generate(prompts(QUESTIONS), SAMPLINGS[name], seed=5, prompt_width=12)


def sample_long(execution, count=4):
    return execution.generate(prompts(LONG[:count]), LONG_SAMPLING, seed=5, prompt_width=64)


def sample_in(engine, name):
    engine.begin(0, prompts(QUESTIONS), SAMPLINGS[name], seed=5, prompt_width=12)
    return ended(engine)


def ended(engine):
    while True:
        if complete := engine.step():
            return complete[0]


def score(scorer, batch):
    """The log-probs of the sampled tokens, of the likeliest tokens, and of those that the batch names."""
    columns = {"log_probs": scorer.log_probs(batch)}
    for name, rows in (("likeliest", batch.select(batch_keys=COLUMNS)), ("given", batch)):
        columns[name] = scorer.top(rows, 3)["teacher_topk_log_probs"]
    return DataProto.from_dict(tensors=columns)


def score_as_teacher(model, out, teacher):
    from rlprims.execution.ray._vllm_scorer import VllmScorer

    pools = {"pools": {"teacher": {}}, "roles": {"teacher": "teacher"}, "teacher_engine": "vllm"}
    cluster = RayConfig(kv_cache_bytes=64 << 20, **pools)
    scorer = VllmScorer(teacher, ModelConfig(path=model, device="cpu"), cluster)
    assert scorer.takes_ids, "vLLM took its V1 runner"
    score(scorer, DataProto.load(out / "batch")).save(out / "scores")


def turn_around(model):
    """In the place of an update of the weights: routers and MLPs get the opposite inputs, so that routes change."""
    for name, parameter in model.named_parameters():
        if name.endswith("post_attention_layernorm.weight"):
            parameter.data.neg_()


def save_with_routes(engine, out):
    for name in ("new", "cached"):
        engine.begin(0, prompts(LONG), LONG_SAMPLING, seed=5, prompt_width=64)
        ended(engine).save(out / name)
    engine.begin(0, prompts(LONG[:2]), LONG_SAMPLING, seed=5, prompt_width=64)
    for _ in range(4):
        engine.step()
    engine.llm.sleep(level=0, mode="keep")  # as VllmEngine.start_update and finish_update pause and go on
    engine.step()
    engine.llm.apply_model(turn_around)
    engine.version += 1
    engine.llm.reset_prefix_cache()
    engine.llm.wake_up(tags=["scheduling"])
    ended(engine).save(out / "over an update")
    engine.begin(0, prompts(LONG[:2]), LONG_SAMPLING, seed=5, prompt_width=64)
    ended(engine).save(out / "after an update")


def record_routes(model, out):
    from rlprims.execution.ray._vllm import VllmEngine

    options = {"block_size": 32}  # so that a prompt of more than 32 tokens is cached
    config, cluster = ModelConfig(path=model, device="cpu", replay_routes=True), RayConfig(kv_cache_bytes=64 << 20)
    cluster = cluster.model_copy(update={"engine_options": options})
    engine = VllmEngine(config, tiny.tokenizer(), cluster, context_window=128)
    for name in SAMPLINGS:
        sample_in(engine, name).save(out / name)
    save_with_routes(engine, out)


def save_sets(model, out):
    from rlprims.execution.ray._vllm import VllmEngine

    config = ModelConfig(path=model, device="cpu")
    engine = VllmEngine(config, tiny.tokenizer(), RayConfig(kv_cache_bytes=64 << 20), context_window=64)
    assert engine.has_masks, "vLLM took its V1 runner"
    for number, sampling in enumerate(FILTERS.values()):  # all calls together
        engine.begin(number, prompts(QUESTIONS), sampling, seed=5, prompt_width=12)
    complete = {}
    while len(complete) < len(FILTERS):
        complete |= engine.step()
    for number, name in enumerate(FILTERS):
        complete[number].save(out / f"{name} masks")
    engine.has_masks = False
    for name, sampling in FILTERS.items():
        engine.begin(0, prompts(QUESTIONS), sampling, seed=5, prompt_width=12)
        ended(engine).save(out / f"{name} log-probs")


def main(what, model, out, *teacher):
    {"routes": record_routes, "sets": save_sets, "teacher": score_as_teacher}[what](model, Path(out), *teacher)


if __name__ == "__main__":
    main(*sys.argv[1:])
