"""Rows of agents, which share histories: forward and backward of a small Llama over the same eight rows, three ways.

All rows begin with one task, four each go on with one of two first turns, and the rest is a row's own: 70 % of
the tokens are shared. "packed" reads all tokens of every row, without padding, by the same attention; "padded" is what
transformers does.
Answers are the loss and the gradients of the embedding and of the first projection.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks._harness import Case, largest_error
from rlprims.execution.hf._packed import Layout, packed_inputs, packed_layout, use_packing

VOCABULARY, TASK = 512, 1
SIZES = ((160, 50, 46), (640, 200, 184))
"""Tokens of the task, of a first turn, and of a row alone, which are its response."""


def cases(quick: bool) -> Iterator[Case]:
    for size in SIZES[:1] if quick else SIZES:
        batch, tree = _rows(*size), packed_layout(_rows(*size))
        apart = {**batch, "prompts": batch["prompts"].clone()}
        apart["prompts"][:, 0] = torch.arange(8)  # so that no two rows begin alike
        plain = packed_layout(apart)
        plain = plain._replace(input_ids=torch.where(plain.position_ids == 0, TASK, plain.input_ids))
        padded, packed = _model(), _model()
        use_packing(packed)
        want = [x.double() for x in _padded(_model().double(), batch)]
        share = 1 - tree.input_ids.shape[1] / plain.input_ids.shape[1]
        yield Case(
            family="histories",
            name=f"8 rows of {sum(size)}, {share:.0%} shared",
            ours=partial(_packed, packed, tree, batch),
            peers={"packed": partial(_packed, packed, plain, batch), "padded": partial(_padded, padded, batch)},
            error=lambda got, want=want: largest_error(got, want),
        )


def _rows(task: int, turn: int, own: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(2, VOCABULARY, shape, generator=generator)

    first = torch.cat([torch.full((1,), TASK), tokens(task - 1)]).expand(8, task)
    prompts = torch.cat([first, tokens(2, turn).repeat_interleave(4, 0)], 1)
    responses = tokens(8, own)
    return {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.ones(8, task + turn + own, dtype=torch.bool),
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    return model


def _packed(model: nn.Module, where: Layout, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    hidden = model.model(**packed_inputs(where)).last_hidden_state[0, where.predicting]  # type: ignore[operator]
    return _loss_and_gradients(model, hidden, batch["responses"].flatten())


def _padded(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    ids = torch.cat([batch["prompts"], batch["responses"]], 1)
    hidden = model.model(ids[:, :-1]).last_hidden_state[:, batch["prompts"].shape[1] - 1 :]  # type: ignore[operator]
    return _loss_and_gradients(model, hidden.flatten(0, 1), batch["responses"].flatten())


def _loss_and_gradients(model: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = nn.functional.cross_entropy(model.lm_head(hidden), targets)  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight")
    gradients = torch.autograd.grad(loss, tuple(parameters.values()))
    return loss, *(gradients[[*parameters].index(name)] for name in names)
