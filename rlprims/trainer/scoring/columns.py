"""Columns of rows that belong to samples and groups. A sample may have several rows, which are consecutive."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlprims.data_proto import DataProto
from rlprims.grouping import dense_ids


def first_rows(rows: DataProto) -> DataProto:
    """The first row of each sample."""
    _, counts = rows["sample_id"].unique_consecutive(return_counts=True)
    return rows.select_idxs(counts.cumsum(0) - counts)


def by_group(rows: DataProto) -> dict[int, DataProto]:
    """The rows of each group, as views, by the number of the group."""
    groups, counts = rows["group"].unique_consecutive(return_counts=True)
    pairs = zip(groups.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True)
    return {group: rows[end - count : end] for group, end, count in pairs}


def rollout_ids(rows: DataProto) -> dict[str, Tensor]:
    """``group_ids``; for rollouts of turns, which may have several rows, also ``trajectory_ids``."""
    ids = {"group_ids": dense_ids(rows["group"])}
    return {**ids, "trajectory_ids": dense_ids(rows["sample_id"])} if "turn_rewards" in rows else ids


def outcome_scores(shaped_scores: Tensor, turn_rewards: Tensor, trajectory_ids: Tensor) -> Tensor:
    """(B,): the scores minus the rewards of their turns. Shaping terms are still included."""
    earned = torch.zeros_like(shaped_scores).index_add(0, trajectory_ids, turn_rewards.sum(-1))
    return shaped_scores - earned[trajectory_ids]


def same_widths(groups: Sequence[DataProto], *, pad_token_id: int) -> list[DataProto]:
    """The groups, with prompts and responses padded to the widest."""
    prompts = max(group["prompts"].shape[1] for group in groups)
    responses = max(group["responses"].shape[1] for group in groups)
    wide = list[DataProto]()
    for group in groups:
        more = {"prompts": prompts - group["prompts"].shape[1], "responses": responses - group["responses"].shape[1]}
        if any(more.values()):
            columns = widened(dict(group.batch.items()), **more, pad_token_id=pad_token_id)
            group = DataProto.from_dict(tensors=columns, non_tensors=dict(group.non_tensor_batch))
        wide.append(group)
    return wide


def widened(columns: Mapping[str, Tensor], *, prompts: int, responses: int, pad_token_id: int) -> dict[str, Tensor]:
    """Pad prompts on the left, and responses and columns of their shape on the right."""
    width = columns["responses"].shape[1]

    def pad(name: str, x: Tensor) -> Tensor:
        if name == "kept_ids" or x.dim() < 2:
            return x
        left = prompts if name in ("prompts", "attention_mask") else 0
        right = responses if name == "attention_mask" or (name != "prompts" and x.shape[1] == width) else 0
        value = pad_token_id if name in ("prompts", "responses") else 0
        parts = [x.new_full((len(x), count, *x.shape[2:]), value) for count in (left, right)]
        return torch.cat([parts[0], x, parts[1]], 1)

    return {name: pad(name, x) for name, x in columns.items()}
