"""Merged rows have the loss and the gradient of one row per turn: every loss of tokens, tables and a model."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rlprims import losses
from rlprims.data_proto import DataProto
from rlprims.turns import Turn, merge, to_batch
from tests import tiny
from tests.turns.turn_trees import rollouts

WIDTH, TOP, PREFIXES = 3, 2, 512
LOGITS = ("logits", "ref_logits", "teacher_logits")
TOP_LOGITS = ("topk_log_probs", "teacher_topk_log_probs")
TOKENS = (
    *("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "advantages"),
    *("entropies", "values", "new_values", "returns", "importance_weights", "sum_pi_squared"),
)
WITH_GRADIENT = {"log_probs", "entropies", "new_values", "logits", "topk_log_probs"}
OPTIONS: dict[str, dict[str, Any]] = {"topr": {"level": "token"}, "opmd": {"level": "token"}}
OF_THE_SEQUENCE = {"gspo", "gspo_token", "gmpo", "vespo"}
"""A number of the whole row is in each token's loss: rows must not be cut, and are not equal if they are."""


def data_names(loss: Callable[..., Tensor]) -> set[str]:
    parameters = inspect.signature(loss).parameters.values()
    return {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD} - {"response_mask", "cu_seqlens"}


LOSSES = {
    name: getattr(losses, name)
    for name in losses.__all__
    if "response_mask" in inspect.signature(getattr(losses, name)).parameters
    and (names := data_names(getattr(losses, name)))
    and names <= {*LOGITS, *TOP_LOGITS, *TOKENS}
}


class Tables:
    """Every number of a token is a function of the tokens up to it: a policy, a reference, a critic as tables."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], int] = {}
        generator = torch.Generator().manual_seed(0)
        sizes = dict.fromkeys((*TOKENS, *LOGITS), WIDTH) | dict.fromkeys(TOP_LOGITS, TOP)
        self.leaves = {
            name: torch.randn(PREFIXES, size, generator=generator, dtype=torch.float64).requires_grad_(
                name in WITH_GRADIENT
            )
            for name, size in sizes.items()
        }

    def index(self, data: DataProto) -> Tensor:
        """The row of the tables for each token of the responses."""
        width, tokens = data["prompts"].shape[1], torch.cat([data["prompts"], data["responses"]], 1)
        index = torch.zeros(data["responses"].shape, dtype=torch.int64)
        for row, (ids, attended) in enumerate(zip(tokens, data["attention_mask"], strict=True)):
            for t in range(index.shape[1]):
                before = tuple(ids[: width + t][attended[: width + t]].tolist())
                index[row, t] = self.rows.setdefault(before, len(self.rows))
        assert len(self.rows) <= PREFIXES
        return index

    def column(self, name: str, index: Tensor, tokens: Tensor) -> Tensor:
        """Outside the mask it has numbers of other tokens, which must not matter."""
        table = self.leaves[name]
        if "log_probs" in name:
            table = table.log_softmax(-1) / 2
        elif name in ("entropies", "importance_weights", "sum_pi_squared"):
            table = table.sigmoid()
        return table[index] if name in (*LOGITS, *TOP_LOGITS) else table[index, tokens]


def loss_and_gradients(name: str, data: DataProto, tables: Tables, index: Tensor) -> list[Tensor]:
    names, mask = sorted(data_names(LOSSES[name])), data["response_mask"]
    columns = {argument: tables.column(argument, index, data["responses"]) for argument in names}
    per_token = LOSSES[name](**columns, response_mask=mask, **OPTIONS.get(name, {}))
    loss = losses.token_sum(per_token, mask)
    leaves = [tables.leaves[argument] for argument in names if argument in WITH_GRADIENT]
    return [loss, *torch.autograd.grad(loss, leaves)]


def batches(turns: list[Turn]) -> tuple[DataProto, DataProto]:
    merged = to_batch([merge(turns)], ["prompt"], pad_id=0)
    return merged, to_batch([[row] for turn in turns for row in merge([turn])], [0] * len(turns), pad_id=0)


def test_the_list_of_losses_is_not_short() -> None:
    assert len(LOSSES) >= 20
    assert {"clipped_surrogate", "kl", "value_loss", "negative_entropy", "full_kl", "cispo"} <= LOSSES.keys()
    assert OF_THE_SEQUENCE | OPTIONS.keys() <= LOSSES.keys()


@settings(max_examples=10)
@given(rollouts(max_turns=5).filter(len))
def test_merged_equals_unmerged(turns: list[Turn]) -> None:
    tables = Tables()
    pair = [(data, tables, tables.index(data)) for data in batches(turns)]
    for name in sorted(LOSSES.keys() - OF_THE_SEQUENCE):
        merged, unmerged = (loss_and_gradients(name, *arguments) for arguments in pair)
        for a, b in zip(merged, unmerged, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", sorted(OF_THE_SEQUENCE))
def test_a_loss_of_sequences_sees_how_rows_are_cut(name: str) -> None:
    tables = Tables()
    turns = [Turn([0], [1, 2], [-1.0, -1.0]), Turn([0, 1, 2, 0], [2, 0], [-1.0, -1.0])]
    merged, unmerged = (loss_and_gradients(name, data, tables, tables.index(data))[0] for data in batches(turns))
    assert not torch.isclose(merged, unmerged)


def test_a_model_sees_the_same_tokens() -> None:
    """Log-probs of a causal language model, padded: those of the merged row are those of its turns."""
    turns = [
        Turn([5, 6, 7], [8, 9], [-1.0, -1.0]),
        Turn([5, 6, 7, 8, 9, 10, 11], [12], [-1.0]),
        Turn([5, 6, 20], [21, 22, 23], [-1.0] * 3),
    ]
    model = tiny.causal_lm().double()
    found = []
    for data in batches(turns):
        attention = data["attention_mask"].long()
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        ids = torch.cat([data["prompts"], data["responses"]], 1)
        logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, :-1].log_softmax(-1)
        log_probs = logits.gather(-1, ids[:, 1:, None])[:, -data["responses"].shape[1] :, 0]
        loss = losses.token_sum(losses.nll(log_probs, data["response_mask"]), data["response_mask"])
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
