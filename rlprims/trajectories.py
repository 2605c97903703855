"""Rollouts of several rows: the rows of each rollout are joined into one sequence.

A rollout has several rows if its context was rewritten, if it had sub-agents, or if it was cut at a turn. Rows with the
same entry in ``trajectory_ids`` (B,) belong to one rollout. :func:`by_trajectory` calls a primitive on whole rollouts.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

from rlprims.grouping import check_group_ids, first_rows
from rlprims.kernels import are_readable
from rlprims.layout import expand_to_tokens
from rlprims.masking import check_sequences
from rlprims.types import CuSeqlens, GroupIds, PerSequence, PerToken, RowMask, TokenMask, Totals, TrajectoryIds


class Trajectories(NamedTuple):
    """The positions of the tokens of each rollout in the batch.

    There are B slots, the last of which may be empty, so that the number of rollouts is not read from a device.
    """

    token_order: Tensor
    """int64 (N,): the position in the flattened batch of each token, rollout after rollout."""
    cu_seqlens: CuSeqlens
    """int64 (B+1,): where the tokens of each rollout begin and end, in that order."""
    first_row: Tensor
    """int64 (B,): the first row of each rollout."""
    exists: RowMask
    """bool (B,): whether the slot holds a rollout."""
    trajectory_ids: TrajectoryIds
    token_shape: torch.Size

    def tokens(self, x: PerToken) -> PerToken:
        """A tensor per token, padded or packed, to one of (N,): rollout after rollout."""
        return x.flatten(0, len(self.token_shape) - 1)[self.token_order]

    def rows(self, x: PerSequence) -> PerSequence:
        """A value per row to a value per rollout: the value of its first row."""
        return x[self.first_row]

    def groups(self, group_ids: GroupIds) -> GroupIds:
        """The group of each rollout. Each empty slot gets its own unused group, so that it changes no statistic."""
        is_used = torch.zeros_like(group_ids).index_fill(0, group_ids, 1)
        unused = is_used.argsort(stable=True)
        empty = (~self.exists).long()
        return torch.where(self.exists, self.rows(group_ids), unused[empty.cumsum(0) - empty])

    def tokens_back(self, x: PerToken) -> PerToken:
        """The inverse of :meth:`tokens`."""
        return x[self.token_order.argsort()].reshape(*self.token_shape, *x.shape[1:])

    def rows_back(self, x: PerSequence) -> PerSequence:
        """A value per rollout to a value per row."""
        return x[self.trajectory_ids]


def join_rows(
    trajectory_ids: TrajectoryIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None
) -> Trajectories:
    """The order of tokens that puts the tokens of each rollout end to end, its rows in the order of the batch.

    >>> mask = torch.tensor([[True, True], [True, True], [True, False]])
    >>> joined = join_rows(torch.tensor([0, 1, 0]), mask)
    >>> joined.tokens(torch.tensor([[1, 2], [3, 4], [5, 6]])), joined.cu_seqlens
    (tensor([1, 2, 5, 6, 3, 4]), tensor([0, 4, 6, 6]))
    """
    check_sequences(response_mask, cu_seqlens, trajectory_ids=trajectory_ids)
    check_group_ids(trajectory_ids, name="trajectory_ids")
    rollout = expand_to_tokens(trajectory_ids, response_mask, cu_seqlens).flatten()
    lengths = torch.zeros_like(trajectory_ids).index_add(0, rollout, torch.ones_like(rollout))
    first_row = first_rows(trajectory_ids)
    exists = first_row < trajectory_ids.shape[0]
    return Trajectories(
        token_order=rollout.argsort(stable=True),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
        first_row=torch.where(exists, first_row, 0),
        exists=exists,
        trajectory_ids=trajectory_ids,
        token_shape=response_mask.shape,
    )


def by_trajectory(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with whole rollouts as its sequences. Call the result with keyword arguments, and with ``trajectory_ids``.

    The annotations of ``fn`` (``types.PerToken``, ``types.PerSequence``, ...) say which arguments are per token and
    which are per row; without annotations their shapes decide. For an argument per row, the entry of the rollout's
    first row is used. ``totals.trajectories`` replaces ``totals.sequences``. A result per token or per rollout is
    returned per token or per row of the batch. ``fn`` must take ``cu_seqlens``.

    Raises:
        ValueError: as :func:`join_rows`; a rollout in two groups or with two scores; totals without trajectories.

    >>> from rlprims.advantage import grpo
    >>> mask = torch.ones(4, 1, dtype=torch.bool)
    >>> rewards = torch.tensor([[0.0], [0.0], [1.0], [0.0]])  # rows 0 to 2 are one rollout, rewarded 1; row 3 the other
    >>> ids = {"group_ids": torch.zeros(4, dtype=torch.int64), "trajectory_ids": torch.tensor([0, 0, 0, 1])}
    >>> by_trajectory(grpo)(rewards=rewards, response_mask=mask, **ids).T
    tensor([[ 0.7071,  0.7071,  0.7071, -0.7071]])
    """
    parameters = inspect.signature(fn).parameters
    hints = get_type_hints(fn, include_extras=True)

    @wraps(fn)
    def of_rollouts(
        *, trajectory_ids: TrajectoryIds, response_mask: TokenMask, cu_seqlens: CuSeqlens | None = None, **others: Any
    ) -> Any:
        joined = join_rows(trajectory_ids, response_mask, cu_seqlens)
        for name in ("group_ids", "scores"):
            check_equal_rows(joined, name, others.get(name))
        data = {name: _join(joined, name, x, hints.get(name)) for name, x in others.items()}
        if "valid_rows" in parameters:
            valid_rows = data.get("valid_rows")
            data["valid_rows"] = joined.exists if valid_rows is None else joined.exists & valid_rows
        mask = {"response_mask": joined.tokens(response_mask)} if "response_mask" in parameters else {}
        return _split(joined, fn(**data, **mask, cu_seqlens=joined.cu_seqlens), hints.get("return"))

    return of_rollouts


def check_equal_rows(joined: Trajectories, name: str, x: Tensor | None) -> None:
    """Raise ``ValueError`` unless the rows of each rollout have the same entry. Values are checked on a CPU only."""
    if x is None or not are_readable(x, joined.trajectory_ids):
        return
    expected = x[joined.first_row][joined.trajectory_ids]
    differs = (x != expected) & ~(x.isnan() & expected.isnan())
    if differs.any():
        row = int(differs.nonzero()[0, 0])
        own, other = float(x[row]), float(expected[row])
        raise ValueError(f"{name} of row {row} is {own:g}, expected {other:g} as in another row of its rollout")


def _join(joined: Trajectories, name: str, x: Any, hint: Any) -> Any:
    if isinstance(x, Totals):
        return x.of_rollouts()
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    if name == "group_ids":
        return joined.groups(x)
    return joined.tokens(x) if _is_per_token(joined, name, x.shape, joined.token_shape, hint) else joined.rows(x)


def _split(joined: Trajectories, x: Any, hint: Any) -> Any:
    if is_dataclass(x) and not isinstance(x, type):  # corrections.Weights
        parts = {field.name: getattr(x, field.name) for field in fields(x)}
        tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(x, **{name: _split(joined, part, PerToken) for name, part in tensors.items()})
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x
    packed = joined.token_order.shape
    return joined.tokens_back(x) if _is_per_token(joined, "the result", x.shape, packed, hint) else joined.rows_back(x)


def _is_per_token(joined: Trajectories, name: str, shape: torch.Size, token_shape: torch.Size, hint: Any) -> bool:
    for annotated in (hint, *get_args(hint)):  # also inside Optional
        for shapes in getattr(annotated, "__metadata__", ()):
            return "(B, T" in shapes
    if token_shape == joined.exists.shape:
        raise ValueError(
            f"{name} has shape {tuple(shape)}, and the batch has as many rows as packed tokens: annotate it as "
            "types.PerToken or types.PerSequence"
        )
    return shape[: len(token_shape)] == token_shape
