"""The memory that a plan computes beside what a CPU holds, what model cards say, and what others published."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf._train_state import TrainState
from rlprims.plan.memory import activations
from rlprims.plan.sizes import Shape, shape_of
from tools import scale_page
from tools.scale_page import QWEN3, shape_with

TOKENS = 96


def small_model(folder: Path) -> tuple[LlamaForCausalLM, Shape]:
    """A Llama of three layers, with grouped heads that are wider together than the model, as in Qwen3."""
    layers = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 24}
    config = LlamaConfig(**layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=320)  # type: ignore[arg-type]
    torch.manual_seed(0)
    config.save_pretrained(folder)
    return LlamaForCausalLM(config), shape_of(ModelConfig(path=str(folder)))


def test_weights_gradients_and_adam(tmp_path: Path) -> None:
    model, shape = small_model(tmp_path)
    state = TrainState(model, OptimizerConfig(), updates=1)
    model(torch.ones(1, TOKENS, dtype=torch.int64)).logits.sum().backward()
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters() if p.grad is not None)
    state.step()
    slots = sum(x.nbytes for each in state.optimizer.state.values() for x in each.values() if x.dim())
    assert held + slots == pytest.approx((4 + 4 + 8) * shape.parameters, rel=0.01)


def test_activations_are_within_a_quarter_of_what_autograd_keeps(tmp_path: Path) -> None:
    model, shape = small_model(tmp_path)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _kept = model.model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False)
    measured = sum(x.untyped_storage().nbytes() for x in held.values())
    assert sum(line.bytes for line in activations(shape, TOKENS, TOKENS, 4, False)) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("name", "billions", "without_embeddings"), [("8B", 8.2, 6.95), ("32B", 32.8, 31.2)]
)  # of the model cards
def test_parameters_are_those_of_the_model_cards(name: str, billions: float, without_embeddings: float) -> None:
    shape = shape_with(QWEN3[name])
    assert round(shape.parameters / 1e9, 1) == billions
    assert shape.body / 1e9 == pytest.approx(without_embeddings, rel=0.005)


def test_activations_grow_with_tokens_as_in_prime_rl_s_runs() -> None:
    """Its trainer of Qwen3-4B on 8 H100, layers recomputed: 17.1 GiB at 16,384 tokens, 36.1 at 65,536."""
    qwen3_4b = QWEN3["8B"] | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
    planned = [activations(shape_with(qwen3_4b), n, n, 2, True)[0].bytes for n in (16384, 65536)]
    assert planned[1] - planned[0] == pytest.approx((36.1 - 17.1) * 2**30, rel=0.25)


def test_the_page_is_of_today() -> None:
    assert scale_page.PAGE.read_text() == scale_page.page(), "run python -m tools.scale_page"
