"""``to_batch``: rows to columns, padded and packed, and what the primitives make of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rlprims import advantage, algorithms, corrections
from rlprims.data_proto import DataProto
from rlprims.ended import Ended
from rlprims.execution import ModelConfig, OptimizerConfig
from rlprims.execution.local import LocalExecution
from rlprims.turns import Row, Turn, merge, to_batch
from tests import tiny
from tests.turns.turn_trees import rollouts

COLUMNS = ("response_mask", "rollout_log_probs", "rewards", "turn_ids", "versions")


def response(row: Row, column: Sequence[Any]) -> list[Any]:
    return list(column[row.prompt_length :])


@settings(max_examples=25)
@given(rollouts().filter(len))
def test_columns_are_those_of_the_rows(turns: list[Turn]) -> None:
    """Tokens, masks and extras move alike: to the same place of the batch."""
    rows = merge(turns)
    data = to_batch([rows], ["a"], pad_id=7, fill={"at": -1})
    width = data["prompts"].shape[1]
    for i, row in enumerate(rows):
        attended = data["attention_mask"][i]
        assert torch.cat([data["prompts"][i], data["responses"][i]])[attended].tolist() == list(row.token_ids)
        assert attended[: width - row.prompt_length].sum() == 0  # on the left
        tokens = attended[width:]
        count = len(row.token_ids) - row.prompt_length
        assert tokens.tolist() == [True] * count + [False] * (len(tokens) - count)  # on the right
        for name in COLUMNS:
            assert data[name][i, :count].tolist() == response(row, getattr(row, name))
            assert data[name][i, count:].sum() == 0
        expected = [[-1, -1] if entry is None else list(entry) for entry in response(row, row.extras["at"])]
        if (data["at"] != -1).any():
            assert data["at"][i, :count].tolist() == expected
            assert (data["at"][i, count:] == -1).all()
        if "prompt_at" in data:
            expected = [[-1, -1] if entry is None else list(entry) for entry in row.extras["at"][: row.prompt_length]]
            assert data["prompt_at"][i][attended[:width]].tolist() == expected
        assert Ended(int(data["ended"][i])).label == row.finish
        assert data["agent"][i] == row.agent


@settings(max_examples=25)
@given(rollouts().filter(len))
def test_packed_is_padded_without_the_padding(turns: list[Turn]) -> None:
    rows = merge(turns)
    padded = to_batch([rows], ["a"], pad_id=7, fill={"at": -1})
    packed = to_batch([rows], ["a"], pad_id=7, fill={"at": -1}, packed=True)
    assert set(packed.batch.keys()) == set(padded.batch.keys()) - {"attention_mask"}
    width = padded["prompts"].shape[1]
    for name in packed.batch.keys():  # noqa: SIM118 - a TensorDict has no other iteration of names
        if not packed[name].is_nested:
            assert torch.equal(packed[name], padded[name])
            continue
        of_prompts = name.startswith("prompt")
        mask = padded["attention_mask"][:, :width] if of_prompts else padded["attention_mask"][:, width:]
        assert torch.equal(packed[name].values(), padded[name][mask])
        assert packed[name].values().dtype == padded[name].dtype
        assert torch.equal(packed[name].offsets(), torch.cat([torch.tensor([0]), mask.sum(-1).cumsum(0)]))


def test_trajectories_and_groups_are_dense_and_need_no_order_skyrl() -> None:
    """SkyRL's step-wise rows must be contiguous; here each row knows its rollout, so rows may be permuted."""
    cut = merge([Turn([1], [2], [-0.5]), Turn([9], [3], [-0.5])])
    whole = merge([Turn([1], [4], [-0.5])])
    data = to_batch([cut, whole, cut, whole], ["question b", ("a", 1), "question b", 0], pad_id=0)
    assert data["trajectory_ids"].tolist() == [0, 0, 1, 2, 2, 3]
    assert data["group_ids"].tolist() == [0, 0, 1, 0, 0, 2]
    assert data["trajectory_ids"].dtype == data["group_ids"].dtype == torch.int64
    mixed = data.select_idxs([4, 2, 0, 3, 1])
    assert mixed["trajectory_ids"].tolist() == [2, 1, 0, 2, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_observations_are_what_later_prompts_brought(packed: bool) -> None:
    """Tokens 8 and 9 are a tool's; 6 is sampled and not trained; the first prompt and the rewritten one are prompts."""
    turns = [
        Turn([1, 2], [3], [-0.5]),
        Turn([1, 2, 3, 8, 9], [6], [-0.5], trainable=False),
        Turn([1, 2, 3, 8, 9, 6, 7], [4], [-0.5]),
        Turn([1, 3], [5], [-0.5]),
    ]
    data = to_batch([merge(turns)], [0], pad_id=0, packed=packed)
    masks = [data[name] for name in ("response_mask", "observation_mask")]
    rows = [[row.tolist() for row in (mask.unbind() if packed else mask)] for mask in masks]
    padding = [] if packed else [False] * 5
    assert rows[0] == [[True, False, False, False, False, True], [True, *padding]]
    assert rows[1] == [[False, True, True, False, True, False], [False, *padding]]


def test_dtypes() -> None:
    data = to_batch([merge([Turn([1], [2], [-0.5])])], [0], pad_id=0)
    assert {name: str(data[name].dtype) for name in sorted(data.batch.keys())} == {
        "attention_mask": "torch.bool",
        "group_ids": "torch.int64",
        "observation_mask": "torch.bool",
        "prompts": "torch.int64",
        "response_mask": "torch.bool",
        "responses": "torch.int64",
        "rewards": "torch.float32",
        "rollout_log_probs": "torch.float32",
        "trajectory_ids": "torch.int64",
        "ended": "torch.int8",
        "turn_ids": "torch.int64",
        "versions": "torch.int64",
    }


def test_the_global_dtype_changes_nothing() -> None:
    rows = merge([Turn([1], [2, 3], [-0.1, -0.2], extras={"temperature": [0.7, 0.9]})])
    before = to_batch([rows], [0], pad_id=0)
    torch.set_default_dtype(torch.float64)
    try:
        after = to_batch([rows], [0], pad_id=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: t.dtype for name, t in before.batch.items()} == {name: t.dtype for name, t in after.batch.items()}
    assert torch.equal(before["temperature"], after["temperature"])


def test_a_sampled_padding_token_is_a_token() -> None:
    data = to_batch([merge([Turn([0], [0, 0], [-1.0, -1.0])]), merge([Turn([0, 0], [5], [-1.0])])], [0, 1], pad_id=0)
    assert data["response_mask"].tolist() == [[True, True], [True, False]]
    assert data["attention_mask"].tolist() == [[False, True, True, True], [True, True, True, False]]


@pytest.mark.parametrize("packed", [False, True])
def test_routed_experts(packed: bool) -> None:
    """uint16 (L, k) for each token of prompt and samples; a route that is valid where the sampler gave none."""
    experts = np.arange(4 * 3 * 2, dtype=np.uint16).reshape(4, 3, 2)
    turns = [Turn([1, 2], [3, 4], [-0.5, -0.5], extras={"experts": experts}), Turn([1, 2, 3, 4, 8], [5], [-0.5])]
    rows = [merge(turns), merge([Turn([1], [2], [-0.5])])]
    data = to_batch(rows, [0, 1], pad_id=0, packed=packed, fill={"experts": range(2)})
    dummy = [[0, 1]] * 3
    values = data["experts"].values() if packed else data["experts"][0]
    assert values.dtype is torch.uint16
    assert values[:4].tolist() == [*experts[2:].tolist(), dummy, dummy]
    of_prompt = data["prompt_experts"].values()[:2] if packed else data["prompt_experts"][0]
    assert of_prompt.tolist() == experts[:2].tolist()
    if not packed:
        assert data["experts"][1].tolist() == [dummy] * 4


def test_extras_may_be_tensors_numbers_and_flags() -> None:
    extras = {
        "hidden": torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16),
        "temperature": [0.5, 1.0],
        "forced": [True, False],
    }
    data = to_batch([merge([Turn([1], [2, 3], [-0.5, -0.5], extras=extras)])], [0], pad_id=0)
    assert data["hidden"].dtype is torch.bfloat16
    assert data["temperature"].dtype is torch.float32
    assert data["forced"].tolist() == [[True, False]]
    assert "prompt_forced" not in data


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"rewards": [1.0]}, r"extras \['rewards'\] have the names of columns, expected other names"),
        ({"words": ["text"]}, r"extras\['words'\]: expected entries of one shape that are numbers"),
    ],
)
def test_extras_that_make_no_column(extras: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_batch([merge([Turn([1], [2], [0.0], extras=extras)])], [0], pad_id=0)


def test_extras_of_several_shapes() -> None:
    turn = Turn([1], [2, 3], [0.0, 0.0], extras={"experts": [[1], [2, 3]]})
    with pytest.raises(ValueError, match=r"extras\['experts'\]: expected entries of one shape"):
        to_batch([merge([turn])], [0], pad_id=0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_extra_with_n_minus_1_entries_is_refused_verl_7075(count: int) -> None:
    """Engines give n - 1 routes for n tokens: the last sampled one was never routed. A guess would shift them all."""
    with pytest.raises(ValueError, match=rf"has {count} entries, expected 3, .* or 6, .*: add an entry"):
        Turn([1, 2, 3], [4, 5, 6], [0.0] * 3, extras={"experts": [0] * count})


def test_bad_input() -> None:
    rows = merge([Turn([1], [2], [0.0])])
    with pytest.raises(ValueError, match="group_labels has 1 entries, expected 2: one per rollout"):
        to_batch([rows, rows], ["a"], pad_id=0)
    with pytest.raises(ValueError, match="rollout 1 has no rows, expected at least one row in each rollout"):
        to_batch([rows, []], ["a", "b"], pad_id=0)
    with pytest.raises(ValueError, match="rollouts is empty, expected at least one row in each rollout"):
        to_batch([], [], pad_id=0)


@pytest.fixture
def two_turns() -> DataProto:
    """One rollout of two turns with a tool's answer between them, and one of a single turn."""
    first = Turn([1], [2, 3], [-1.0, -1.0], reward=1.0)
    second = Turn([1, 2, 3, 8, 8], [4], [-1.0], reward=2.0)
    return to_batch([merge([first, second]), merge([Turn([1], [2], [-1.0])])], ["q", "q"], pad_id=0)


def test_returns_by_turn(two_turns: DataProto) -> None:
    mask, turn_ids = two_turns["response_mask"], two_turns["turn_ids"]
    returns = advantage.discounted_returns(two_turns["rewards"], mask, turn_ids=turn_ids, gamma=0.5)
    assert returns.tolist() == [[2.0, 2.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]


def test_gigpo_by_turn(two_turns: DataProto) -> None:
    """Both rollouts began in state 5: returns 1 + γ 2 = 2 and 0, so ±1/√2 of the step; ±1/√2 of the episode."""
    states = torch.tensor([[5, 5, 0, 0, 6], [5, 0, 0, 0, 0]])
    a = advantage.gigpo(
        two_turns["rewards"],
        two_turns["group_ids"],
        two_turns["turn_ids"],
        states,
        two_turns["response_mask"],
        gamma=0.5,
        eps=0.0,
    )
    root = 2**0.5
    expected = torch.tensor([[root, root, 0.0, 0.0, root / 2], [-root, 0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(a, expected)


def test_importance_weights_by_turn(two_turns: DataProto) -> None:
    """Each turn has the ratio of its own tokens: e^(0.1 + 0.2), and e^0.4; the tool's tokens are in neither."""
    rollout = two_turns["rollout_log_probs"]
    old = rollout + torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.4], [0.5, 9.0, 9.0, 9.0, 9.0]])
    weights = corrections.importance_weights(
        old, rollout, two_turns["response_mask"], turn_ids=two_turns["turn_ids"], level="segment", high=100.0
    ).values
    expected = torch.tensor([[0.3, 0.3, 0.0, 0.0, 0.4], [0.5, 0.0, 0.0, 0.0, 0.0]]).exp()
    torch.testing.assert_close(weights[two_turns["response_mask"]], expected[two_turns["response_mask"]])


def test_the_columns_are_those_that_execution_reads(tmp_path: Path) -> None:
    """The local backend scores the batch as it is: the log-probs of the model on each row's plain ids."""
    turns = [Turn([5, 6], [8, 9], [-1.0, -1.0]), Turn([5, 6, 8, 9, 10], [12], [-1.0]), Turn([5, 20, 21], [22], [-1.0])]
    rows = merge(turns)
    data = to_batch([rows], ["a"], pad_id=tiny.PAD_ID)
    execution = LocalExecution(
        ModelConfig(path=str(tiny.save_model(tmp_path))),
        OptimizerConfig(),
        algorithm=algorithms.grpo(),
        tokenizer=tiny.tokenizer(),
        temperature=1.0,
        updates=1,
    )
    found = execution.log_probs(data)
    assert found.shape == data["responses"].shape
    model = tiny.causal_lm().eval()
    for i, row in enumerate(rows):
        log_probs = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        for t, valid in enumerate(row.response_mask[row.prompt_length :], start=row.prompt_length):
            expected = log_probs[t - 1, row.token_ids[t]] if valid else torch.tensor(0.0)
            torch.testing.assert_close(found[i, t - row.prompt_length], expected, rtol=1e-4, atol=1e-5)


def test_kept_sets_of_two_turns() -> None:
    """Of three sampled tokens the first was drawn from two ids, the second from all, the third from one."""
    first = Turn([1], [2, 3], [-0.5, -0.5], extras={"kept": [[2, 7], None]})
    second = Turn([1, 2, 3, 4], [5], [-0.1], extras={"kept": [[5]]})
    for packed in (False, True):
        data = to_batch([merge([first, second])], ["q"], pad_id=0, packed=packed)
        counts = data["kept_counts"].values() if packed else data["kept_counts"][0]
        assert counts.tolist() == [2, 0, 0, 1]  # the third is the prompt of the second turn
        assert data["kept_ids"].values().tolist() == [2, 7, 5]


def test_a_sampled_token_outside_its_kept_set_prime_rl_2601() -> None:
    with pytest.raises(ValueError, match=r"sampled_ids\[1\] is 3, which is not in its kept set of 2 ids"):
        Turn([1], [2, 3], [-0.5, -0.5], extras={"kept": [[2], [4, 5]]})
