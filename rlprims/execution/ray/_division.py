"""Divide the rows of a batch over ranks, and select the columns that a rank needs."""

from collections.abc import Collection

import numpy as np
import torch

from rlprims.batching import balance
from rlprims.data_proto import DataProto
from rlprims.execution.hf import without_tokens

SCORED = frozenset({"prompts", "responses", "attention_mask", "response_mask", "kept_ids", "kept_counts"})
"""The columns that a forward pass reads."""
SCORED_BY_POLICY = SCORED | {"routed_experts"}


def columns_of(batch: DataProto, names: Collection[str] | None) -> DataProto:
    """Return the batch with only the tensors of these names (None: all tensors), and without columns of objects."""
    there = [name for name in dict(batch.batch.items()) if names is None or name in names]
    return batch.select(batch_keys=there, non_tensor_batch_keys=[], meta_info_keys=[])


def divided(batch: DataProto, ranks: int, *, share_prompts: bool, together: str = "trajectory_ids") -> list[list[int]]:
    """Return the rows of each rank, balanced by tokens. Rows with the same id in ``together`` get the same rank.

    With ``share_prompts`` a rank computes a prompt once for all its rows with this prompt. The function then compares
    two divisions: one keeps rows with the same prompt on one rank, the other does not. It returns the division in
    which the rank with the most tokens has fewer of them.
    """
    tokens = batch["attention_mask"].sum(-1)
    labels = batch[together].tolist() if together in batch else None
    anywhere = balance(tokens.tolist(), ranks, labels) if len(batch) else [[] for _ in range(ranks)]
    if not share_prompts or labels is not None or not len(batch):
        return anywhere
    width = batch["prompts"].shape[1]
    in_prompt = batch["attention_mask"][:, :width].bool()
    known = torch.where(in_prompt, batch["prompts"], -1)
    prompts = torch.unique(known, dim=0, return_inverse=True)[1].numpy()
    lengths = in_prompt.sum(-1).numpy()
    responses = tokens.numpy() - lengths
    first = np.zeros(len(batch), dtype=bool)
    first[np.unique(prompts, return_index=True)[1]] = True
    if first.sum() < ranks:
        return anywhere

    def most(parts: list[list[int]]) -> int:
        once = (lengths[part][np.unique(prompts[part], return_index=True)[1]].sum() for part in parts)
        return max(int(responses[part].sum() + shared) for part, shared in zip(parts, once, strict=True))

    by_prompt = balance((responses + first * lengths).tolist(), ranks, prompts.tolist())
    return min(anywhere, by_prompt, key=most)


def padded(batch: DataProto, ranks: int, *, together: str = "trajectory_ids") -> DataProto:
    """Add rows without valid tokens, until each rank can have a row (and an id of the column ``together``)."""
    missing = ranks - (len(batch[together].unique()) if together in batch else len(batch))
    if missing <= 0 or not len(batch):
        return batch
    spare = batch.select_idxs(np.zeros(missing, dtype=np.int64))
    for name, mask in without_tokens(dict(spare.batch.items())).items():
        spare[name] = mask
    for name in {"trajectory_ids", together} & set(batch.batch.keys()):
        spare[name] = batch[name].max() + 1 + torch.arange(missing)
    return DataProto.concat([batch, spare])
