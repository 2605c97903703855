"""Operations of an update, beside torch's own counter of the operators that really ran."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlprims.data_proto import DataProto
from rlprims.execution.hf._flops import peak_flops, update_cost
from tests import tiny

PROMPT, RESPONSE, PADDING = 7, 12, 3


def batch() -> DataProto:
    """One row, with padding on both sides of its 19 tokens."""
    attention = torch.zeros(1, 2 * PADDING + PROMPT + RESPONSE, dtype=torch.bool)
    attention[:, PADDING:-PADDING] = True
    prompts = torch.ones(1, PADDING + PROMPT, dtype=torch.int64)
    return DataProto.from_dict(tensors={"prompts": prompts, "attention_mask": attention})


def counted(model: torch.nn.Module) -> float:
    """What torch counts: the products of matrices, in the forward and the backward of the row without its padding."""
    ids = torch.ones(1, PROMPT + RESPONSE, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False, logits_to_keep=RESPONSE).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
def test_as_torch_counts_them(tied: bool) -> None:
    model = tiny.causal_lm(tie_word_embeddings=tied, attn_implementation="eager")
    # Norms and biases are weights too, though no matrices: the formula has 6 for each of them.
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert update_cost(model)(batch()) == counted(model) + 6 * vectors * (PROMPT + RESPONSE)


def test_a_frozen_weight_has_no_gradient_of_its_own() -> None:
    model = tiny.causal_lm()
    whole = update_cost(model)(batch())
    frozen = model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    assert whole - update_cost(model)(batch()) == 2 * frozen.numel() * (PROMPT + RESPONSE)


def test_a_device_is_measured() -> None:
    assert 1e8 < peak_flops("cpu", torch.float32) < 1e14
