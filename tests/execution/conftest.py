"""A tiny model on disk, and each implementation of the contract."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlprims import algorithms
from rlprims.ended import Ended
from tests import tiny
from tests.execution.execution_contract import ADAPTED, BACKENDS, CLUSTERS, LIMIT, SAMPLING, WIDTH, Restarted, prompts

# Processes of their own, where Ray and vLLM are installed.
collect_ignore = [
    "cpu_devices.py",
    "fsdp_ranks.py",
    "tensor_ranks.py",
    "v2_process.py",
    "interpreted_triton",
]

# The files of the contract that say nothing of a sampler, those that say nothing of training, and what adapters change.
OF_TRAINING = {"update", "critic", "checkpoint", "terms", "measures", "reward", "teacher"}
OF_SAMPLING = {"generate", "kept"}
OF_ADAPTERS = {"update", "critic", "checkpoint"}
IN_ONE_PROCESS = {
    ("measures", "test_a_row_beyond_the_budget_is_named"),
    ("measures", "test_entropies_are_those_of_the_plain_model_at_the_samplers_temperature"),
    ("measures", "test_micro_batches_do_not_change_entropies"),
    ("measures", "test_values_begin_at_zero"),
    ("measures", "test_micro_batches_do_not_change_log_probs"),
    ("reward", "test_micro_batches_do_not_change_it"),
    ("critic", "test_micro_batches_do_not_change_the_step"),
    ("terms", "test_a_critic_of_rollouts"),
    ("terms", "test_a_loss_term_on_tool_output_makes_it_likelier"),
    ("update", "test_an_entropy_bonus_raises_the_entropy"),
    ("update", "test_a_kl_term_draws_to_the_reference"),
    ("update", "test_the_learning_rate_follows_its_schedule"),
    ("update", "test_update_makes_praised_responses_likelier"),
}
"""Not on Ray, where each would start ranks of its own and show nothing of ranks.

Two ranks without Ray are in test_execution_ranks; that Ray's numbers are those of one process, in test_execution_ray. A
schedule and its number of updates reach the ranks in the checkpoint's tests, terms of the loss and rollouts in those of
micro-batches.
"""
ON_V2 = {
    "test_whatever_batch_it_is_in",
    "test_each_part_is_as_in_a_batch",
    "test_what_is_not_taken_is_abandoned",
    "test_a_part_that_cannot_be_sampled_ends_the_stream_alone",
    "test_a_stop_text_ends_a_response_with_the_token_that_completes_it",
    "test_a_stop_text_may_be_a_special_token",
    "test_the_sets_are_those_that_the_filters_leave",
}
"""Of the sampler's, because Triton's interpreter is slow."""
FOR_A_RELEASE = {
    "ray": {
        ("checkpoint", "mixture"),
        ("checkpoint", "test_another_models_checkpoint_is_refused"),
        ("reward", None),  # TestPools has it on Ray
        ("teacher", None),  # tests/trainer/test_cluster_pairs.py
        ("terms", "test_micro_batches_do_not_change_the_step"),  # ranks with micro-batches: test_execution_ranks
        ("update", "test_micro_batches_do_not_change_the_step"),
        ("update", "test_the_temperature_divides_the_logits"),
    },
    "ray-vllm": {
        ("generate", "test_however_many_are_sampled_at_once"),
        ("generate", "test_learned_positions_are_counted_from_the_prompts_first_token"),
        ("generate", "test_the_log_probs_are_those_of_the_sampled_tokens[ray-vllm-0.7]"),
        ("reports", None),
    },
}
"""Not in CI: on Ray they start ranks or engines of their own, and show what others show there or one process does.

A test, a parameter of the checkpoint's, or a whole file.
"""
MARKS = {"ray-vllm-v2": [pytest.mark.ray, pytest.mark.release]}
"""CI runs V2 in test_execution_v2: the tokens of one process, truncated sets and stop texts; and in flight."""
LOCAL = {("terms", "test_in_float64_to_twelve_digits"), ("terms", "test_without_whole_logits")}
"""They build local executions alone."""
ONE_SIZE = {"terms": 130, "update": 40}
"""Tokens of a micro-batch on Ray, where a test has several: Ray's ranks start anew for each."""


WITH_EVERY_MODEL = algorithms.ppo().replace(loss_terms=algorithms.grpo().loss_terms)
restarted: list[Restarted] = []


def pytest_runtest_setup(item):
    """Ends what only the contract uses before other tests begin: idle engines of vLLM take a third of a core."""
    if "build" not in item.fixturenames:
        for each in restarted:
            each.close()


def pytest_collection_modifyitems(items):
    """Ray's ranks train and its vLLM engines sample: a start of either takes half a minute. Adapters are trained.

    So engines are started for one row at once, and not again for three.
    """

    def wanted(item):
        file, test = item.path.stem.removeprefix("test_execution_"), item.name.partition("[")[0]
        backend = item.callspec.params.get("build") if hasattr(item, "callspec") else None
        if backend is ADAPTED["local-lora"]:
            if item.callspec.params.get("interrupted") == "mixture":
                return False  # adapters on all linear layers, and its experts are not layers
            return file in OF_ADAPTERS and test != "test_update_is_the_step_that_torch_makes"
        if backend is CLUSTERS["ray-vllm"]:
            return file not in OF_TRAINING and item.callspec.params.get("at_once") != 3
        if backend is CLUSTERS["ray-vllm-v2"]:
            return test in ON_V2
        if backend is CLUSTERS["ray"]:
            size, tied = (item.callspec.params.get(name) for name in ("tokens", "interrupted"))
            if size not in (None, ONE_SIZE.get(file, size)) or tied == "untied":
                return False
            return file not in OF_SAMPLING and (file, test) not in IN_ONE_PROCESS | LOCAL
        return True

    def for_a_release(item):
        file, params = item.path.stem.removeprefix("test_execution_"), getattr(item, "callspec", None)
        for name, tests in FOR_A_RELEASE.items():
            if params and params.params.get("build") is CLUSTERS[name]:
                whole = {(file, None), ("checkpoint", params.params.get("interrupted"))}
                return bool({(file, item.name), (file, item.originalname), *whole} & tests)
        return False

    items[:] = [item for item in items if wanted(item)]
    for item in filter(for_a_release, items):
        item.add_marker(pytest.mark.release)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def teacher_path(tmp_path_factory):
    """Other weights, for who is distilled from them."""
    return tiny.save_model(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.fixture(scope="session")
def plain(model_path):
    """The same weights, without the library."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(
    scope="session",
    params=[
        *(pytest.param(backend, id=name) for name, backend in BACKENDS.items()),
        *(pytest.param(backend, id=name, marks=pytest.mark.slow) for name, backend in ADAPTED.items()),
        *(pytest.param(backend, id=name, marks=MARKS.get(name, pytest.mark.ray)) for name, backend in CLUSTERS.items()),
    ],
)
def build(request, model_path):
    torch.set_num_threads(1)
    return partial(request.param, model_path)


@pytest.fixture(scope="session")
def without_engines(build):
    """Options where nobody samples with what is built: vLLM takes longest to start."""
    return {"engine": "hf", "rollout_workers": 1} if build.func is CLUSTERS["ray-vllm"] else {}


@pytest.fixture(scope="session")
def one_engine(build):
    """Options where one engine shows what two would: each takes a quarter of a minute to start."""
    return {"rollout_workers": 1} if build.func is CLUSTERS["ray-vllm"] else {}


@pytest.fixture(scope="session")
def fresh(build, tmp_path_factory):
    """``build`` for who is done with what was asked for before: it may be given again, as it was at its start.

    On Ray it has a reference and a critic for every algorithm, so that ranks need not start for each set of models.
    """
    if build.func not in CLUSTERS.values():
        return build
    restarted.append(kept := Restarted(build, tmp_path_factory))
    return lambda algorithm, **options: kept(WITH_EVERY_MODEL, **options)


@pytest.fixture(scope="session")
def execution(build):
    """A policy that nobody trains."""
    execution = build(algorithms.reinforce())
    yield execution
    execution.close()


@pytest.fixture(scope="session")
def sampled(execution):
    batch = execution.generate(prompts(), SAMPLING, seed=0, prompt_width=WIDTH)
    lengths = batch["response_mask"].sum(-1)
    assert lengths.min() < LIMIT // 2, "the fixture needs a response that ends early"
    assert (batch["ended"] == Ended.LENGTH).any(), "and one that does not end"
    return batch
