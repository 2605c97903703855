"""The stages before the loss, in the order of a trainer's step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlprims.algorithms import (
    Algorithm,
    component_scores,
    estimate_advantages,
    fill_invalid_scores,
    filter_groups,
    leave_out_rows,
    mask_turns,
    shape_scores,
    token_weights,
)
from rlprims.data_proto import DataProto
from rlprims.grouping import dense_ids

Batch = DataProto | Mapping[str, Any]


class Prepared(NamedTuple):
    """The data for the loss.

    Attributes:
        kept: bool (B,), the rows that are trained on.
        reasons: for each row the reason that it is not trained on, or None.
        data: the tensors of the kept rows, with advantages.
    """

    kept: Tensor
    reasons: list[str | None]
    data: dict[str, Tensor]


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The named tensors of a batch, which must be padded. Missing log-probs are filled in, so that ratios are 1.

    Missing ``old_log_probs`` are ``rollout_log_probs``, else ``log_probs``, else 0; the other two are then
    ``old_log_probs``.
    """
    columns = batch.batch.items() if isinstance(batch, DataProto) else batch.items()
    data = {str(name): column for name, column in columns if isinstance(column, Tensor)}
    labels = (batch.non_tensor_batch if isinstance(batch, DataProto) else batch).get("group_ids")
    if labels is not None and not isinstance(labels, Tensor):
        data["group_ids"] = dense_ids(labels)
    if "response_mask" not in data:
        raise ValueError(f"the batch has no response_mask, expected bool (B, T); it has {sorted(data)}")
    mask = data["response_mask"] = data["response_mask"].bool()
    if mask.dim() != 2 or "cu_seqlens" in data:
        raise ValueError(
            f"response_mask has shape {tuple(mask.shape)}, expected (B, T); use layout.unpack to pad packed tokens"
        )
    known = [data[n].detach() for n in ("old_log_probs", "rollout_log_probs", "log_probs") if n in data]
    old = known[0] if known else torch.zeros(mask.shape)
    return {"log_probs": old, "old_log_probs": old, "rollout_log_probs": old, **data}


def prepare(algorithm: Algorithm, data: Mapping[str, Tensor], *, kl_coef: float = 0.0) -> Prepared:
    """Compute advantages from scores, for the groups that the filter keeps. Without scores the batch's own are used."""
    rows = len(data["response_mask"])
    if "scores" not in data:
        if "advantages" not in data:
            raise ValueError(f"the batch has neither scores nor advantages, expected either; it has {sorted(data)}")
        return Prepared(torch.ones(rows, dtype=torch.bool), [None] * rows, dict(data))
    if "group_ids" not in data:
        raise ValueError(f"the batch has no group_ids; it has {sorted(data)}: give int (B,), the prompt of each row")
    data = {**data, "group_ids": dense_ids(data["group_ids"])}
    data |= leave_out_rows(algorithm, data)
    data |= fill_invalid_scores(algorithm, data)
    data |= component_scores(algorithm, data)
    data |= shape_scores(algorithm, data)
    reasons = filter_groups(algorithm, data)
    kept = torch.tensor([reason is None for reason in reasons])
    data = {name: column[kept] for name, column in data.items()}
    if kept.any():
        data["group_ids"] = dense_ids(data["group_ids"])
        data |= estimate_advantages(algorithm, data, kl_coef=kl_coef)
        data |= mask_turns(algorithm, data)
    return Prepared(kept, reasons, data)


def weighed(algorithm: Algorithm, data: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """``data`` of one update with the weights that its losses need."""
    before = {**data, "log_probs": data["log_probs"].detach()}
    return {**data, **token_weights(algorithm, before, generator=generator)}
