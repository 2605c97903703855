"""What a step moves, holds and computes, measured on a CPU beside the formulas of ``rlprims.trainer``.

Those that need two ranks are in ``tests/execution/scale_ranks.py``, which prints its measures in the same form.
"""

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.hf._train_state import TrainState
from rlprims.plan.memory import activations
from rlprims.plan.scale import checkpoint_bytes, forward_flops, kv_bytes, recorded_bytes, update_flops
from rlprims.plan.sizes import Shape, shape_of
from rlprims.trainer.config import Config
from rlprims.trainer.session import start
from tests import tiny
from tests.trainer.runs import small_run

TOKENS = 96


class Measure(NamedTuple):
    what: str
    formula: str
    by_formula: float
    measured: float
    unit: str = "B"

    @property
    def ratio(self) -> float:
        return self.by_formula / self.measured


def model_and_shape(folder: Path, **changes: Any) -> tuple[nn.Module, Shape]:
    """A Llama of three layers, with grouped heads that are wider together than the model, as in Qwen3."""
    settings: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    config = LlamaConfig(**settings | heads | {"attn_implementation": "eager"} | changes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    return model, shape_of(ModelConfig(path=str(folder)))


def measures() -> Iterator[Measure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, shape = model_and_shape(folder)
        yield cache(model, shape)
        yield from operations(model, shape)
        yield training_state(model, shape)
        yield saved_by_autograd(*model_and_shape(folder, attn_implementation="sdpa"))
        yield checkpoint(model, shape, folder)
        yield recording(folder)


def cache(model: Any, shape: Shape) -> Measure:
    with torch.no_grad():
        held = model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=True).past_key_values
    measured = sum(x.nbytes for layer in held.layers for x in (layer.keys, layer.values)) / TOKENS
    return Measure("KV cache of a token", "2 L d_kv w", kv_bytes(shape, 4), measured)


def operations(model: Any, shape: Shape) -> Iterator[Measure]:
    """Of a row; half of its tokens are a response, on which alone the head is used."""
    answers, squares = TOKENS // 2, TOKENS**2
    ids = torch.ones(1, TOKENS, dtype=torch.int64)

    def counted(*, backward: bool) -> float:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            total = model(ids, use_cache=False, logits_to_keep=answers).logits.sum()
            if backward:
                total.backward()
        model.zero_grad()
        return float(counter.get_total_flops())

    forward = forward_flops(shape, TOKENS, answers, squares)
    yield Measure("scoring", "2 N n + 2 V h r + 4 L d Σn²", forward, counted(backward=False), "FLOP")
    model.train()
    yield Measure(
        "update", "3 x scoring", update_flops(shape, TOKENS, answers, squares), counted(backward=True), "FLOP"
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = update_flops(shape, TOKENS, answers, squares, recomputed=True)
    yield Measure("update, layers recomputed", "and the layers once more", again, counted(backward=True), "FLOP")
    model.gradient_checkpointing_disable()


def training_state(model: Any, shape: Shape) -> Measure:
    state = TrainState(model, OptimizerConfig(), updates=1)
    model(torch.ones(1, TOKENS, dtype=torch.int64)).logits.sum().backward()
    measured = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    state.step()
    slots = [x for each in state.optimizer.state.values() for x in each.values() if x.dim()]
    return Measure("weights, gradients, Adam", "(4 + 4 + 8) N", 16 * shape.parameters, measured + bytes_of(slots))


def saved_by_autograd(model: Any, shape: Shape) -> Measure:
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            held[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kept = model.model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False)
    measured = sum(x.untyped_storage().nbytes() for x in held.values())
    del kept
    planned = sum(line.bytes for line in activations(shape, TOKENS, TOKENS, 4, False))
    return Measure("activations of the layers", "L (2 h (4 + 2 w) + (d + 4 m) w + 2 (d + d_kv) w) n", planned, measured)


def checkpoint(model: Any, shape: Shape, folder: Path) -> Measure:
    """Of one process, with the moments that an update made."""
    state = TrainState(model, OptimizerConfig(), updates=1)
    model(torch.ones(1, TOKENS, dtype=torch.int64)).logits.sum().backward()
    state.step()
    target = folder / "checkpoint"
    target.mkdir()
    state.save(target, "policy")
    return Measure("checkpoint of one process", "(4 + 8) N", checkpoint_bytes(shape), on_disk(target))


def recording(folder: Path) -> Measure:
    """Of the tests' run: a token is a character, of a vocabulary of 32."""
    model, questions = tiny.save_model(folder / "model"), tiny.write_jsonl(folder / "sums.jsonl", tiny.sums(20))
    settings = small_run(model, questions, folder / "run")
    algorithm = {"preset": "grpo", "kl_coef": 0.0, "group_size": 4}
    settings |= {"steps": 1, "algorithm": algorithm, "prompts_per_generation": None, "sampling": {"max_new_tokens": 64}}
    start(Config.model_validate(settings), Console(file=io.StringIO()))
    (path,) = (folder / "run" / "rollouts").glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    prompt, response = (sum(len(row[f"{x}_ids"]) for row in rows) / len(rows) for x in ("prompt", "response"))
    planned = recorded_bytes(32, len(rows), prompt, response, characters=1)
    what = "400 a row, and for a token its id, its text, and three numbers of 23"
    return Measure("rollouts of a step", what, planned, path.stat().st_size)


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
