"""A real transformer samples; a forward pass with one mistake scores. No logits are made up."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from rlprims import audit

ROWS, PROMPT, WIDTH, VOCAB, TEMPERATURE = 48, 8, 16, 40, 0.7


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    """Random weights, large enough that its distributions are peaked."""
    torch.manual_seed(0)
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB}
    config = GPT2Config(**sizes, initializer_range=0.25, tie_word_embeddings=False, attn_pdrop=0, embd_pdrop=0)
    return GPT2LMHeadModel(config).eval()


def logits_of(model: GPT2LMHeadModel, ids: Tensor, attention: Tensor | None, positions: Tensor | None) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, PROMPT - 1 : -1]


@pytest.fixture(scope="module")
def step(model: GPT2LMHeadModel) -> dict[str, Tensor]:
    """Prompts of 2 to 8 tokens, padded on the left; responses at a temperature, token by token."""
    generator = torch.Generator().manual_seed(1)
    padding = torch.randint(0, 7, (ROWS // 4, 1), generator=generator).repeat_interleave(4, 0)
    ids = torch.randint(1, VOCAB, (ROWS // 4, PROMPT), generator=generator).repeat_interleave(4, 0)
    attention = torch.arange(PROMPT) >= padding
    ids, sampled = torch.where(attention, ids, 0), []
    for _ in range(WIDTH):
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, -1] / TEMPERATURE
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        sampled.append(logits.log_softmax(-1).gather(1, token))
        ids, attention = torch.cat([ids, token], 1), torch.cat([attention, attention.new_ones(ROWS, 1)], 1)
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones(ROWS, WIDTH, dtype=torch.bool),
        "rollout_log_probs": torch.cat(sampled, 1),
        "pack_position": torch.arange(ROWS) % 3,
    }


Forward = Callable[[GPT2LMHeadModel, dict[str, Tensor]], Tensor]


def picked(logits: Tensor, step: dict[str, Tensor], temperature: float = TEMPERATURE) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(2, step["responses"][..., None])[..., 0]


def right(model: GPT2LMHeadModel, step: dict[str, Tensor], temperature: float = TEMPERATURE) -> Tensor:
    attention = step["attention_mask"]
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    return picked(logits_of(model, step["input_ids"], attention, positions), step, temperature)


def without_temperature(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    return right(model, step, 1.0)


def counting_padding(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    """position_ids are not given, and the model counts columns."""
    positions = torch.arange(PROMPT + WIDTH).expand(ROWS, -1)
    return picked(logits_of(model, step["input_ids"], step["attention_mask"], positions), step)


def reading_padding(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    positions = (step["attention_mask"].long().cumsum(1) - 1).clamp(min=0)
    return picked(logits_of(model, step["input_ids"], torch.ones_like(step["attention_mask"]), positions), step)


def in_packs(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    """Three rows one after the other, with positions of their own, and attention over all of them."""
    found = []
    for rows in torch.arange(ROWS).view(-1, 3):
        ids, attention = step["input_ids"][rows], step["attention_mask"][rows]
        positions = (attention.long().cumsum(1) - 1).clamp(min=0)
        flat = (x.reshape(1, -1) for x in (ids, attention, positions))
        with torch.no_grad():
            names = ("input_ids", "attention_mask", "position_ids")
            logits = model(**dict(zip(names, flat, strict=True))).logits.view(3, PROMPT + WIDTH, VOCAB)
        found.append(logits[:, PROMPT - 1 : -1])
    return picked(torch.cat(found), step)


def a_token_late(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    return right(model, step).roll(1, 1)


def other_rows(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    return right(model, step)[torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))]


def eight_bits(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> Tensor:
    """Weights rounded as float8."""
    weights = {name: x.to(torch.float8_e4m3fn).float() for name, x in model.state_dict().items()}
    other = GPT2LMHeadModel(model.config).eval()
    other.load_state_dict(weights)
    return right(other, step)


@pytest.mark.parametrize(
    ("forward", "codes"),
    [
        (right, ()),
        (without_temperature, ("L1",)),
        (counting_padding, ("L7",)),
        (reading_padding, ("L7",)),
        (in_packs, ("L8",)),
        (a_token_late, ("L5",)),
        (other_rows, ("L13",)),
        (eight_bits, ("L4",)),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_mistake_in_the_forward_pass(
    model: GPT2LMHeadModel, step: dict[str, Tensor], forward: Forward, codes: tuple[str, ...]
) -> None:
    assert audit.check({**step, "old_log_probs": forward(model, step)}).codes == codes


def test_a_nucleus_that_the_trainer_does_not_know(model: GPT2LMHeadModel, step: dict[str, Tensor]) -> None:
    """The sampler renormalizes over the four likeliest; rows with another token are no sample of it, and left out."""
    attention = step["attention_mask"]
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)
    x = logits_of(model, step["input_ids"], attention, positions) / TEMPERATURE
    kept = x >= x.topk(4, dim=-1).values[..., -1:]
    drawn = torch.where(kept, x, -torch.inf).log_softmax(-1).gather(2, step["responses"][..., None])[..., 0]
    batch = {**step, "rollout_log_probs": drawn.nan_to_num(neginf=0.0), "old_log_probs": right(model, step)}
    batch["response_mask"] = drawn.isfinite()
    assert "L2" in audit.check(batch).codes
