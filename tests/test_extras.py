"""Extras move like tokens: versions, routed experts, and whatever else a sampler reports for each token.

Every token of a batch has a number of its own, and each extra is a function of it. Whatever is done to the batch, the
extras of the tokens that are left are that function of their numbers.
"""

from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlprims import DataProto, layout, turns
from rlprims.batching import balance, micro_batches
from rlprims.execution import kept_of
from rlprims.trajectories import join_rows

LAYERS, EXPERTS = 2, 3


def routes(number: Tensor) -> Tensor:
    """(..., L, K) of a token's number."""
    steps = torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS)
    return (number[..., None, None] * 7 + steps) % 251


def kept_set(number: int) -> list[int] | None:
    """The ids that a token was drawn from: 0 to 4 of them and itself; of every seventh token all."""
    return None if number % 7 == 0 else [number, *range(1000, 1000 + number % 5)]


def rollout(rng: np.random.Generator, first: int) -> tuple[list[turns.Turn], int]:
    """A rollout of a few turns, some of which rewrite the history; the token ids are the numbers."""
    number, history, made = first, [], []
    for version in range(int(rng.integers(1, 5))):
        if history and rng.random() < 0.3:
            history = history[: int(rng.integers(1, len(history)))]
        asked = list(range(number, number + int(rng.integers(1, 4))))
        drawn = list(range(asked[-1] + 1, asked[-1] + 1 + int(rng.integers(1, 5))))
        number, prompt = drawn[-1] + 1, history + asked
        history = prompt + drawn
        experts = routes(torch.tensor(history)).to(torch.uint8).numpy()
        extras = {"routed_experts": experts, "kept": [kept_set(number) for number in drawn]}
        made.append(turns.Turn(prompt, drawn, [-x / 100 for x in drawn], version=version, extras=extras))
    return made, number


def batch_of(seed: int) -> DataProto:
    rng, number, rollouts = np.random.default_rng(seed), 1, []
    for _ in range(int(rng.integers(2, 6))):
        made, number = rollout(rng, number)
        rollouts.append(turns.merge(made))
    labels = [int(i) // 2 for i in range(len(rollouts))]
    return turns.to_batch(rollouts, labels, pad_id=0, fill={"routed_experts": 255})


def assert_extras_are_their_tokens(data: DataProto) -> None:
    numbers, mask = data["responses"], data["response_mask"]
    assert torch.equal(data["routed_experts"][mask].long(), routes(numbers)[mask])
    torch.testing.assert_close(data["rollout_log_probs"][mask], -numbers[mask] / 100)
    assert (data["routed_experts"][numbers == 0] == 255).all()  # padding has the filler, not experts
    kept = kept_of(data)
    assert kept is not None
    sets = kept.ids.split(kept.offsets.diff().tolist())
    found = dict(zip(numbers[mask].tolist(), [sets[i].tolist() for i in mask.flatten().nonzero()[:, 0]], strict=True))
    assert found == {number: kept_set(number) or [] for number in found}
    assert int(kept.offsets[-1]) == int(data["kept_counts"][mask].sum())  # nothing belongs to padding or tool output


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.sampled_from(["reorder", "repeat", "split", "pad", "union"]), max_size=5))
def test_through_operations_of_the_container(seed: int, operations: list[str]) -> None:
    data, generator = batch_of(seed), torch.Generator().manual_seed(seed)
    for operation in operations:
        if operation == "reorder":
            data.reorder(torch.randperm(len(data), generator=generator))
        elif operation == "repeat":
            data = data.repeat(2, interleave=bool(seed % 2))
        elif operation == "split":
            data = DataProto.concat(data.split(max(1, len(data) // 3)))
        elif operation == "pad":
            data = data[torch.arange(len(data) + 1) % len(data)]
        else:
            data = data.select(batch_keys=["responses"]).union(data)
    assert_extras_are_their_tokens(data)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_through_packing_balancing_micro_batches_and_joining(seed: int) -> None:
    data = batch_of(seed)
    numbers, mask = data["responses"], data["response_mask"]
    lengths = (numbers > 0).sum(-1)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    packed = {name: layout.pack(data[name], cu_seqlens) for name in ("responses", "routed_experts")}
    assert torch.equal(packed["routed_experts"].long(), routes(packed["responses"]))
    unpacked = layout.unpack(packed["routed_experts"], cu_seqlens, numbers.shape[1], fill=255)
    assert torch.equal(unpacked, data["routed_experts"])
    for rows in micro_batches(lengths.tolist(), max_tokens=int(lengths.max()) + 3):
        assert_extras_are_their_tokens(data[torch.as_tensor(rows)])
    for rows in balance(lengths.tolist(), 2):
        assert_extras_are_their_tokens(data[torch.as_tensor(rows)])
    joined = join_rows(data["trajectory_ids"], mask)
    whole = joined.tokens(mask)
    assert torch.equal(joined.tokens(data["routed_experts"])[whole].long(), routes(joined.tokens(numbers))[whole])


def test_through_a_file(tmp_path: Path) -> None:
    data = batch_of(3)
    data.save(tmp_path / "batch")
    again = DataProto.load(tmp_path / "batch")
    assert_extras_are_their_tokens(again)
    assert again["routed_experts"].dtype is data["routed_experts"].dtype
