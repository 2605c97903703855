"""Which rows, and which of their columns, go to which rank."""

import numpy as np
import pytest
import torch

from rlprims.data_proto import DataProto

pytestmark = pytest.mark.ray


def batch_of(prompts, responses, **columns):
    """Rows with prompts of equal tokens, as many as their number, and responses of these lengths."""
    width, longest = max(prompts), max(responses)
    in_prompt = torch.tensor(prompts)[:, None] > torch.arange(width - 1, -1, -1)
    in_response = torch.tensor(responses)[:, None] > torch.arange(longest)
    texts = np.array([f"text {i}" for i in range(len(prompts))], dtype=object)
    return DataProto.from_dict(
        tensors={
            "prompts": torch.where(in_prompt, torch.tensor(prompts)[:, None], 0),
            "responses": in_response.long(),
            "attention_mask": torch.cat([in_prompt, in_response], 1),
            "response_mask": in_response,
            **columns,
        },
        non_tensors={"question": texts},
    )


def read(batch, rows):
    """Tokens of a packed forward pass: of a prompt once, and of each response."""
    prompts = {int(length): int(length) for length in batch["prompts"][rows].amax(-1)}
    return sum(prompts.values()) + int(batch["response_mask"][rows].sum())


def test_a_prompt_is_read_on_one_rank_where_that_is_less_to_read():
    from rlprims.execution.ray._worker_group import divided

    batch = batch_of([50, 51] * 4, [3, 1, 4, 1, 5, 9, 2, 6])
    apart, together = (divided(batch, 2, share_prompts=share) for share in (False, True))
    assert sorted(row for part in together for row in part) == sorted(row for part in apart for row in part)
    assert {tuple(part) for part in together} == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert max(read(batch, part) for part in together) == 51 + 17
    assert max(read(batch, part) for part in apart) > 100  # both prompts


def test_rows_of_a_prompt_go_anywhere_if_their_responses_are_long():
    from rlprims.execution.ray._worker_group import divided

    batch = batch_of([2, 2, 2, 3], [90, 90, 90, 1])
    parts = divided(batch, 2, share_prompts=True)
    assert parts == divided(batch, 2, share_prompts=False)
    assert max(read(batch, part) for part in parts) <= 185


def test_rollouts_stay_whole():
    from rlprims.execution.ray._worker_group import divided

    batch = batch_of([5, 5, 5, 5], [1, 1, 1, 9], trajectory_ids=torch.tensor([0, 1, 0, 2]))
    parts = divided(batch, 2, share_prompts=True)
    assert any({0, 2} <= set(part) for part in parts)


def test_groups_stay_whole_where_a_loss_compares_their_responses():
    from rlprims.execution.ray._worker_group import divided, padded

    ids = torch.tensor([0, 1, 0, 1])
    batch = batch_of([5, 5, 5, 5], [1, 1, 1, 9], group_ids=ids, trajectory_ids=torch.arange(4))
    assert divided(batch, 2, share_prompts=False) != [[0, 2], [1, 3]]
    for parts in (divided(batch, 2, share_prompts=share, together="group_ids") for share in (False, True)):
        assert sorted(parts) == [[0, 2], [1, 3]]
    spare = padded(batch, 3, together="group_ids")
    assert spare["group_ids"].tolist() == [0, 1, 0, 1, 2]
    assert not spare["response_mask"][-1].any()
    assert sorted(divided(spare, 3, share_prompts=False, together="group_ids")) == [[0, 2], [1, 3], [4]]


def test_a_rank_is_sent_what_it_reads():
    from rlprims.execution.ray._worker_group import SCORED, columns_of

    batch = batch_of([2, 3], [4, 5], advantages=torch.ones(2, 5))
    assert set(dict(columns_of(batch, SCORED).batch.items())) == SCORED - {"kept_ids", "kept_counts"}
    everything = columns_of(batch, "tensors")
    assert "advantages" in everything
    assert "question" not in everything
