"""A batch made from rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlprims.ended import Ended
from rlprims.grouping import dense_ids
from rlprims.layout import cu_seqlens
from rlprims.turns._turn import Row

if TYPE_CHECKING:
    from rlprims.data_proto import DataProto

_COLUMNS = {
    "response_mask": torch.bool,
    "observation_mask": torch.bool,
    "rollout_log_probs": torch.float32,
    "rewards": torch.float32,
    "turn_ids": torch.int64,
    "versions": torch.int64,
}
_NAMES = {"prompts", "responses", "attention_mask", "trajectory_ids", "group_ids", "ended", "agent", *_COLUMNS}
_NAMES |= {"kept_counts", "kept_ids", "images"}


def to_batch(
    rollouts: Sequence[Sequence[Row]],
    group_labels: Sequence[Hashable],
    *,
    pad_id: int,
    packed: bool = False,
    fill: Mapping[str, Any] | None = None,
) -> DataProto:
    """One batch from the rows of several rollouts. The response of a row begins with its first sampled token.

    - ``prompts`` int64 (B, P), padded on the left; ``responses`` int64 (B, T), padded on the right.
    - ``attention_mask`` bool (B, P+T), unless packed; ``response_mask`` bool (B, T), the tokens to train on.
    - ``observation_mask`` bool (B, T): the tokens that came with a later turn's prompt, such as a tool's answer.
    - ``rollout_log_probs``, ``rewards`` float32 (B, T); ``turn_ids``, ``versions`` int64 (B, T).
    - ``trajectory_ids``, ``group_ids`` int64 (B,), dense: the number of the rollout, and of its label.
    - ``ended`` int8 (B,): the code of ``finish`` of the row's last turn. ``agent``: objects (B,).
    - ``images``, if there are any: the tuple of each row, objects (B,). Equal tuples are one object.
    - ``kept_counts`` int32 (B, T) and ``kept_ids`` int32, ragged (B, *), if turns have the extra ``kept``: the sets
      that truncated sampling drew from, as the trainer and ``types.SamplingSupport`` read them.
    - Every other entry of ``extras`` as (B, T, ...), in the dtype of its entries; Python floats become float32. If
      turns have an extra for their prompts too, the column ``prompt_<name>`` (B, P, ...) has it for the prompts.

    Args:
        rollouts: the rows of each rollout, from :func:`merge`.
        group_labels: a hashable label for each rollout: the prompt that it answers.
        pad_id: the token of padding. Masks are not computed from ids, so the token may also be sampled.
        packed: the columns (B, P) and (B, T) are jagged instead of padded: ``.values()`` of one is packed (N,) or
            (N, ...), and ``.offsets()`` is its ``cu_seqlens``. All columns of responses share the offsets.
        fill: name of an extra to the value for padding and for tokens without an entry, such as -1 for experts, or a
            whole entry, such as ``range(8)``. Default: 0.

    Raises:
        ValueError: not one label per rollout; an empty rollout; an extra of several shapes, or with a column's name.

    >>> from rlprims.turns import Turn, merge
    >>> rows = merge([Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 8], [4], [-0.1], reward=1.0)])
    >>> data = to_batch([rows], ["question 1"], pad_id=0)
    >>> data["prompts"].tolist(), data["responses"].tolist(), data["response_mask"].long().tolist()
    ([[1, 2]], [[3, 8, 4]], [[1, 0, 1]])
    """
    from rlprims.data_proto import DataProto  # here, because the rest of the package is plain Python and loads at once

    if len(rollouts) != len(group_labels):
        raise ValueError(f"group_labels has {len(group_labels)} entries, expected {len(rollouts)}: one per rollout")
    if not rollouts or not all(rollouts):
        empty = next((i for i, rows in enumerate(rollouts) if not rows), None)
        problem = "rollouts is empty" if empty is None else f"rollout {empty} has no rows"
        raise ValueError(f"{problem}, expected at least one row in each rollout: leave out rollouts without turns")
    rows = list(chain.from_iterable(rollouts))
    names = dict.fromkeys(name for row in rows for name in row.extras)
    is_truncated = names.pop("kept", True) is None  # entries of "kept" differ in length: separate columns
    if reserved := names.keys() & {*_NAMES, *(f"prompt_{name}" for name in names)}:
        raise ValueError(f"extras {sorted(reserved)} have the names of columns, expected other names")

    prompt_lengths = torch.tensor([row.prompt_length for row in rows])
    lengths = torch.tensor([len(row.token_ids) for row in rows]) - prompt_lengths
    pad = torch.tensor(pad_id)
    # For each column: the tokens of all rows, concatenated, and the value for padding.
    prompts = {"prompts": (_flat((row.token_ids[: row.prompt_length] for row in rows), torch.int64), pad)}
    responses = {"responses": (_flat((row.token_ids[row.prompt_length :] for row in rows), torch.int64), pad)}
    for name, dtype in _COLUMNS.items():
        values = _flat((getattr(row, name)[row.prompt_length :] for row in rows), dtype)
        responses[name] = values, torch.zeros((), dtype=dtype)
    for name in names:
        extras = [(row.extras.get(name, (None,) * len(row.token_ids)), row.prompt_length) for row in rows]
        prompt_entries = [entry for column, start in extras for entry in column[:start]]
        response_entries = [entry for column, start in extras for entry in column[start:]]
        padding = (fill or {}).get(name, 0)
        responses[name] = _extra(name, response_entries, padding)
        if any(entry is not None for entry in prompt_entries):
            prompts[f"prompt_{name}"] = _extra(name, prompt_entries, padding)

    columns: dict[str, Tensor] = {}
    if is_truncated:
        sizes, columns["kept_ids"] = _kept(rows)
        responses["kept_counts"] = sizes, sizes.new_zeros(())
    if packed:
        for part, offsets in ((prompts, cu_seqlens(prompt_lengths)), (responses, cu_seqlens(lengths))):
            for name, (values, _) in part.items():
                columns[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
    else:
        prompt_mask = (torch.arange(int(prompt_lengths.max())) < prompt_lengths[:, None]).flip(-1)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        for part, tokens in ((prompts, prompt_mask), (responses, mask)):
            columns |= {name: _padded(values, tokens, padding) for name, (values, padding) in part.items()}
        columns["attention_mask"] = torch.cat([prompt_mask, mask], 1)
    counts = torch.tensor([len(rollout) for rollout in rollouts])
    columns["trajectory_ids"] = torch.arange(len(rollouts)).repeat_interleave(counts)
    columns["group_ids"] = dense_ids(group_labels).repeat_interleave(counts)
    columns["ended"] = torch.tensor([Ended.from_label(row.finish) for row in rows], dtype=torch.int8)
    objects: dict[str, list[Any]] = {"agent": [row.agent for row in rows]}
    if any(row.images for row in rows):
        known: dict[tuple[bytes, ...], tuple[bytes, ...]] = {}
        objects["images"] = [known.setdefault(row.images, row.images) for row in rows]
    return DataProto.from_dict(tensors=columns, non_tensors=objects)


def _kept(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Of how many ids each token of the responses was drawn (0: the whole vocabulary), and these ids, by row."""
    of_rows = [row.extras.get("kept", (None,) * len(row.token_ids))[row.prompt_length :] for row in rows]
    sets = [[() if ids is None else [int(id_) for id_ in ids] for ids in of_row] for of_row in of_rows]
    row_sizes = torch.tensor([sum(map(len, of_row)) for of_row in sets])
    ids = _flat(chain.from_iterable(sets), torch.int32)
    sizes = torch.tensor([len(ids) for of_row in sets for ids in of_row], dtype=torch.int32)
    return sizes, torch.nested.nested_tensor_from_jagged(ids, cu_seqlens(row_sizes))


def _flat(parts: Iterator[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(parts)), dtype=dtype)


def _padded(values: Tensor, mask: Tensor, padding: Tensor) -> Tensor:
    """(B, width, ...): the tokens of all rows where the mask is True, row by row."""
    token_of = torch.where(mask, mask.flatten().cumsum(0).view(mask.shape), 0)  # 0 is the padding
    return torch.cat([padding.expand(1, *values.shape[1:]), values])[token_of]


def _extra(name: str, entries: Sequence[Any], fill: Any) -> tuple[Tensor, Tensor]:
    """The entries as one tensor, and the value for padding and for tokens without an entry."""
    present = [i for i, entry in enumerate(entries) if entry is not None]
    try:
        given = [entries[i] for i in present]
        if given and isinstance(given[0], Tensor):
            values = torch.stack(given)
        else:
            values = torch.from_numpy(np.asarray(given))
            is_python = not given or not isinstance(given[0], np.ndarray | np.generic)
            values = values.float() if is_python and values.dtype == torch.float64 else values
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"extras[{name!r}]: expected entries of one shape that are numbers, got {error}") from None
    padding = torch.as_tensor(list(fill) if isinstance(fill, Sequence) else fill).to(values.dtype)
    position = torch.zeros(len(entries), dtype=torch.int64)
    position[present] = torch.arange(1, len(present) + 1)
    return torch.cat([padding.expand(1, *values.shape[1:]), values])[position], padding
