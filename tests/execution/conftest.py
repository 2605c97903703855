"""A tiny model on disk, and each implementation of the contract."""

from functools import partial

import pytest
import torch
from execution_contract import ADAPTED, BACKENDS, CLUSTERS, LIMIT, SAMPLING, WIDTH, Restarted, prompts
from transformers import AutoModelForCausalLM

from rlprims import algorithms
from rlprims.ended import Ended
from tests import tiny


def pytest_collection_modifyitems(items):
    """vLLM samples and does not train; adapters are about training, and are not the step of the whole weights."""
    about_training = ("test_execution_update", "test_execution_critic", "test_execution_checkpoint")

    def wanted(item):
        trains = item.path.stem in about_training
        if "local-lora" in item.name:
            return trains and "test_it_is_the_step_that_torch_makes" not in item.name
        return not ("ray-vllm" in item.name and trains)

    items[:] = [item for item in items if wanted(item)]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model_path):
    """The same weights, without the library."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(
    scope="session",
    params=[
        *(pytest.param(backend, id=name) for name, backend in BACKENDS.items()),
        *(pytest.param(backend, id=name, marks=pytest.mark.slow) for name, backend in ADAPTED.items()),
        *(pytest.param(backend, id=name, marks=pytest.mark.ray) for name, backend in CLUSTERS.items()),
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
def fresh(build, tmp_path_factory):
    """``build`` for who is done with what was asked for before: it may be given again, as it was at its start."""
    return Restarted(build, tmp_path_factory) if build.func in CLUSTERS.values() else build


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
