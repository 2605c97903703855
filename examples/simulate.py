"""The effect of one update on each token of some rollouts, and of several algorithms side by side. No model is updated.

In a notebook, with this file beside it:

>>> batch = {"scores": torch.tensor([1.0, 0.0]), "group_ids": torch.tensor([0, 0])}
>>> batch["response_mask"] = torch.ones(2, 1, dtype=torch.bool)
>>> table = simulate(algorithms.grpo(kl_coef=0.0), batch)
>>> [round(push, 3) for push in table["gradient"]]
[0.354, -0.354]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprims import algorithms
from rlprims.algorithms import Algorithm, ObjectiveTerm, diff
from rlprims.data_proto import DataProto
from rlprims.grouping import dense_ids
from rlprims.ratios import log_ratio
from rlprims.types import PerToken, TokenMask

Batch = DataProto | Mapping[str, Any]

_SHOWN = 60
"""The number of rows that are printed. All rows can be read by column name."""

_LONGEST = 80
"""The number of characters of a cell that are printed."""

_STYLE = (
    "<style>.rlprims-table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}"
    ".rlprims-table caption{text-align:left;padding:4px 0;font-weight:600;color:inherit}"
    ".rlprims-table th,.rlprims-table td{padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.3)}"
    "</style>"
)


@dataclass(frozen=True, repr=False)
class Table:
    """Columns of equal length by name. ``pandas.DataFrame(table.columns)`` converts it.

    Attributes:
        columns: name to plain Python values.
        title: the title of the table.
        notes: numbers of the whole table, by name.
        coloured: columns whose cells are shaded by sign and size, relative to the column's largest.

    >>> table = Table({"row": [0, 1], "push": [0.25, -0.5]}, title="two tokens")
    >>> table
    two tokens
    row  push
      0  0.25
      1  -0.5
    >>> table.where(row=1)["push"]
    [-0.5]
    """

    columns: Mapping[str, list[Any]]
    title: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    coloured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns have {lengths} entries, expected the same number in each")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self.columns:
            raise ValueError(f"no column {name!r}, expected one of {list(self.columns)}")
        return self.columns[name]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each row as a dict."""
        return (dict(zip(self.columns, values, strict=True)) for values in zip(*self.columns.values(), strict=True))

    def where(self, **values: Any) -> "Table":
        """The rows in which the named columns have these values. Notes are still those of the whole table."""
        wanted = [all(self[name][i] == value for name, value in values.items()) for i in range(len(self))]
        kept = {n: [x for x, keep in zip(c, wanted, strict=True) if keep] for n, c in self.columns.items()}
        return Table(kept, self.title, self.notes, self.coloured)

    @property
    def _caption(self) -> str:
        notes = ", ".join(f"{name} {_text(value)}" for name, value in self.notes.items())
        return " · ".join(filter(None, [_visible(self.title), _visible(notes)]))

    @property
    def _more(self) -> str:
        return f"… {len(self) - _SHOWN} more rows" if len(self) > _SHOWN else ""

    def __repr__(self) -> str:
        cells = [[name, *map(_text, column[:_SHOWN])] for name, column in self.columns.items()]
        aligned = ([cell.rjust(max(map(len, column))) for cell in column] for column in cells)
        lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        return "\n".join(filter(None, [self._caption, *lines, self._more]))

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:right'>{escape(name)}</th>" for name in self.columns)
        largest = {name: max(map(abs, self[name]), default=0.0) for name in self.coloured}
        body = []
        for row in list(self.rows())[:_SHOWN]:
            cells = (
                f"<td style='text-align:right{_shade(value, largest.get(name, 0.0))}'>{escape(_text(value))}</td>"
                for name, value in row.items()
            )
            body.append(f"<tr>{''.join(cells)}</tr>")
        caption = f"<caption>{escape(self._caption)}</caption>" if self._caption else ""
        more = f"<p>{self._more}</p>" if self._more else ""
        inner = f"{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
        return f"{_STYLE}<table class='rlprims-table'>{inner}</table>{more}"


def simulate(algorithm: Algorithm, batch: Batch, *, seed: int = 0) -> Table:
    """The effect that one update would have on each token, and the reason. No model is updated.

    The algorithm's own stages process the batch: scores are shaped, groups filtered, advantages estimated, tokens
    weighted, losses aggregated; then autograd gives the gradients. A batch without ``scores`` starts from its
    ``advantages``. Missing ``old_log_probs`` are the sampler's, missing ``log_probs`` the old ones, with ratio 1.

    Columns, one entry per response token in reading order, tool tokens inside a response too:

    =========== ============================================================================================
    row         the row of the batch
    position    the position in the row
    token       its text, if the batch has ``response_tokens``
    ratio       π/π_old, of ``log_probs`` and ``old_log_probs``
    advantage   A, as the loss reads it
    weight      the weight of corrections and token selection on the policy loss
    clip        ``low`` or ``high``: the policy loss has no gradient, because the ratio is out of bounds on that side
    cause       why the policy loss gives the token no gradient: ``masked``, ``dropped: ...``, ``no advantage``,
                the correction or selection that gives it weight 0, ``clipped``; else empty
    coefficient −∂(Σ policy losses)/∂log π / A, before weights and aggregation: 1 is REINFORCE's gradient; 0 if A is 0
    loss_share  the token's part of the objective; the parts add up to it
    gradient    −∂objective/∂log π, of all terms: if positive, a step of descent makes the token likelier
    =========== ============================================================================================

    Args:
        algorithm: any algorithm.
        batch: named tensors, padded (B, T), or a DataProto of them.
        seed: the seed of random token selections.

    Returns:
        A Table; its note ``objective`` is the value of :func:`rlprims.algorithms.policy_objective`.

    Raises:
        ValueError: the batch lacks data that a stage needs. The message names them.
    """
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"expected an Algorithm, got {algorithm!r}: write algorithms.grpo(), or another preset")
    data = _tensors_of(batch)
    mask = data["response_mask"]
    controller = algorithm.kl_in_reward.controller({}) if algorithm.kl_in_reward else None
    kept, reasons, trained = _prepared(algorithm, data, controller.value if controller else 0.0)
    numbers = {"ratio": log_ratio(data["log_probs"], data["old_log_probs"], mask).exp().detach()}
    names = ("advantage", "weight", "coefficient", "loss_share", "gradient", "side")
    numbers |= {name: torch.zeros_like(numbers["ratio"]) for name in names}
    causes = [["" if inside else "masked" for inside in row] for row in mask.tolist()]
    for row, reason in zip(causes, reasons, strict=True):
        row[:] = [cause or f"dropped: {reason}" if reason else cause for cause in row]
    objective = 0.0
    if kept.any():
        objective, found, found_causes = _update(algorithm, trained, torch.Generator().manual_seed(seed))
        for name, values in found.items():
            numbers[name][kept] = values.to(numbers[name].dtype)
        for row, row_causes in zip(kept.nonzero().flatten().tolist(), found_causes, strict=True):
            causes[row] = row_causes
    return _table(algorithm.name, batch, mask, numbers, causes, objective)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between algorithms on the same rollouts.

    Attributes:
        settings: the settings that differ from the first algorithm's.
        responses: the columns ``step``, ``group_ids``, ``scores`` and ``answer`` if the batch has them; and per
            algorithm ``push``, the sum of the tokens' gradients, and ``share``, their part of all |gradient|.
        tokens: advantage, gradient and cause per token and algorithm, as in :func:`simulate`; ``change`` is the
            gradient minus the first algorithm's.
    """

    settings: Table
    responses: Table
    tokens: Table

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, (self.settings, self.responses, self.tokens)))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in (self.settings, self.responses, self.tokens))


def compare(compared: Sequence[Algorithm], batch: Batch, *, seed: int = 0) -> Comparison:
    """Compare algorithms on the same rollouts.

    Each algorithm is compared with the first one. Columns are named ``<what> <algorithm>``; equal names are numbered.

    Raises:
        ValueError: fewer than two algorithms, or a batch without data that one of them needs.
    """
    if len(compared) < 2:
        raise ValueError(f"expected at least two algorithms, got {len(compared)}")
    names = _names(compared)
    tables = {name: simulate(algorithm, batch, seed=seed) for name, algorithm in zip(names, compared, strict=True)}
    first = names[0]
    place = {key: tables[first][key] for key in ("row", "position", "token") if key in tables[first].columns}
    gradients = {name: table["gradient"] for name, table in tables.items()}
    tokens = place | {f"advantage {name}": table["advantage"] for name, table in tables.items()}
    tokens |= {f"gradient {name}": column for name, column in gradients.items()}
    for name in names[1:]:
        tokens[f"change {name}"] = [b - a for a, b in zip(gradients[first], gradients[name], strict=True)]
    tokens |= {f"cause {name}": table["cause"] for name, table in tables.items()}
    shaded = tuple(name for name in tokens if name.startswith(("gradient ", "change ")))
    responses = _responses(place["row"], gradients, batch)
    return Comparison(_settings(names, compared), responses, Table(tokens, "tokens", coloured=shaded))


def _update(
    algorithm: Algorithm, data: dict[str, Tensor], generator: torch.Generator
) -> tuple[float, dict[str, PerToken], list[list[str]]]:
    """The objective, and the numbers and causes of the rows that are trained on."""
    mask, log_probs = data["response_mask"], data["log_probs"].detach().clone().requires_grad_()
    weights = algorithms.token_weights(algorithm, {**data, "log_probs": log_probs.detach()}, generator=generator)
    update = {**data, "log_probs": log_probs, **weights}
    objective = algorithms.policy_objective(algorithm, update)
    (gradient,) = torch.autograd.grad(objective, log_probs)
    shares = torch.stack([_shares(part, update) for part in algorithms.objective_parts(algorithm)]).sum(0)
    policy = algorithm.policy_loss(update)
    (policy_gradient,) = torch.autograd.grad(policy.sum(), log_probs)
    a = torch.where(mask, update["advantages"], 0.0)
    safe = torch.where(a == 0, 1.0, a)
    weight = torch.where(mask, update.get("loss_weights", torch.ones_like(a)), 0.0)
    flat = mask & (a != 0) & (policy_gradient == 0)
    ratio = log_ratio(log_probs, update["old_log_probs"], mask).exp()
    side = torch.where(flat, _side(ratio, -policy / safe, a), 0.0)
    coefficient = torch.where(a == 0, 0.0, -policy_gradient / safe)
    numbers = {"advantage": a, "weight": weight, "coefficient": coefficient}
    numbers |= {"loss_share": shares, "gradient": -gradient, "side": side}
    # If several causes apply to a token, the last one is shown.
    marks = [("clipped", flat), *_weighers(algorithm, update, generator), ("no advantage", a == 0), ("masked", ~mask)]
    causes = torch.zeros(mask.shape, dtype=torch.int64)
    for number, (_, where) in enumerate(marks, 1):
        causes = torch.where(where, number, causes)
    names = ["", *(name for name, _ in marks)]
    detached = {name: values.detach() for name, values in numbers.items()}
    return float(objective.detach()), detached, [[names[cause] for cause in row] for row in causes.tolist()]


def _shares(part: ObjectiveTerm, data: dict[str, Tensor]) -> PerToken:
    """Each token's contribution to a part of the objective: its loss times the derivative of the mean."""
    losses = part.losses(data).detach().requires_grad_()
    (derivative,) = torch.autograd.grad(part.mean(data, losses), losses)
    return derivative * losses


def _side(ratio: Tensor, bound: Tensor, a: Tensor) -> Tensor:
    """−1 or 1: the side of the bounds at which a token's loss is flat.

    A loss is flat where its gradient would move the ratio further outside, so the sign of A is the side. Some clips are
    also flat for tokens that would move back: then the token's own ratio agrees with the bound of the loss.
    """
    agree = torch.where((ratio > 1) & (bound > 1), 1.0, torch.where((ratio < 1) & (bound < 1), -1.0, 0.0))
    return torch.where(agree == 0, a.sign(), agree)


def _weighers(algorithm: Algorithm, data: dict[str, Tensor], generator: torch.Generator) -> list[tuple[str, TokenMask]]:
    """The names and masks of the corrections that give a token weight 0, and of the selection if no correction does."""
    if "loss_weights" not in data:
        return []
    marks = [(str(algorithm.token_selection), data["loss_weights"] == 0)]
    corrections_only = algorithm.replace(token_selection=None, loss_terms=())
    for part in algorithm.corrections:
        weights = algorithms.token_weights(corrections_only.replace(corrections=(part,)), data, generator=generator)
        marks.append((str(part), weights["loss_weights"] == 0))
    return marks


def _table(
    name: str, batch: Batch, mask: Tensor, numbers: dict[str, Tensor], causes: list[list[str]], objective: float
) -> Table:
    # From the first token of a response to its last.
    inside = (mask.cumsum(-1) > 0) & (mask.flip(-1).cumsum(-1).flip(-1) > 0)
    rows, positions = (x.tolist() for x in inside.nonzero(as_tuple=True))
    places = list(zip(rows, positions, strict=True))
    clip = {-1.0: "low", 0.0: "", 1.0: "high"}
    columns = {name: column[inside].tolist() for name, column in numbers.items()}
    texts = (batch.non_tensor_batch if isinstance(batch, DataProto) else batch).get("response_tokens")
    token = {} if texts is None else {"token": [texts[row][position] for row, position in places]}
    return Table(
        {
            "row": rows,
            "position": positions,
            **token,
            **{name: columns[name] for name in ("ratio", "advantage", "weight")},
            "clip": [clip[side] for side in columns["side"]],
            "cause": [causes[row][position] for row, position in places],
            **{name: columns[name] for name in ("coefficient", "loss_share", "gradient")},
        },
        title=name,
        notes={"objective": objective},
        coloured=("advantage", "gradient"),
    )


# The stages before the loss, in the order of a trainer's step.


def _tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The named tensors of a batch, which must be padded. Missing log-probs are filled in, so that ratios are 1.

    Missing ``old_log_probs`` are ``rollout_log_probs``, else ``log_probs``, else 0; the other two then equal them.
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
        shape = tuple(mask.shape)
        raise ValueError(f"response_mask has shape {shape}, expected (B, T); use layout.unpack to pad packed tokens")
    known = [data[n].detach() for n in ("old_log_probs", "rollout_log_probs", "log_probs") if n in data]
    old = known[0] if known else torch.zeros(mask.shape)
    return {"log_probs": old, "old_log_probs": old, "rollout_log_probs": old, **data}


def _prepared(
    algorithm: Algorithm, data: dict[str, Tensor], kl_coef: float
) -> tuple[Tensor, list[str | None], dict[str, Tensor]]:
    """The rows that are trained on, bool (B,); why each other is not; and the data of the former, with advantages.

    They are computed from scores, for the groups that the filter keeps. Without scores the batch's own are used.
    """
    rows = len(data["response_mask"])
    if "scores" not in data:
        if "advantages" not in data:
            raise ValueError(f"the batch has neither scores nor advantages, expected either; it has {sorted(data)}")
        return torch.ones(rows, dtype=torch.bool), [None] * rows, data
    if "group_ids" not in data:
        raise ValueError(f"the batch has no group_ids; it has {sorted(data)}: give int (B,), the prompt of each row")
    data = {**data, "group_ids": dense_ids(data["group_ids"])}
    data |= algorithms.leave_out_rows(algorithm, data)
    data |= algorithms.fill_invalid_scores(algorithm, data)
    data |= algorithms.component_scores(algorithm, data)
    data |= algorithms.shape_scores(algorithm, data)
    reasons = algorithms.filter_groups(algorithm, data)
    kept = torch.tensor([reason is None for reason in reasons])
    data = {name: column[kept] for name, column in data.items()}
    if kept.any():
        data["group_ids"] = dense_ids(data["group_ids"])
        data |= algorithms.estimate_advantages(algorithm, data, kl_coef=kl_coef)
        data |= algorithms.mask_turns(algorithm, data)
    return kept, reasons, data


# The tables of a comparison.


def _names(compared: Sequence[Algorithm]) -> list[str]:
    names: list[str] = []
    for algorithm in compared:
        before = sum(name.split(" #")[0] == algorithm.name for name in names)
        names.append(f"{algorithm.name} #{before + 1}" if before else algorithm.name)
    return names


def _settings(names: Sequence[str], compared: Sequence[Algorithm]) -> Table:
    """A row per setting and algorithm, except the first algorithm."""
    columns: dict[str, list[Any]] = {"setting": [], "algorithm": [], "value": [], names[0]: []}
    for name, other in zip(names[1:], compared[1:], strict=True):
        for setting, (mine, theirs) in diff(compared[0], other).items():
            if setting != "name":
                for column, value in zip(columns.values(), (setting, name, str(theirs), str(mine)), strict=True):
                    column.append(value)
    return Table(columns, "settings that differ")


_OF_A_RESPONSE = {"step": "step", "group": "group_ids", "score": "scores", "answer": "answer"}
"""Columns of the table, and their names in a batch."""


def _responses(rows: Sequence[int], gradients: dict[str, list[float]], batch: Batch) -> Table:
    """Each response with its columns of the batch, the sum of its gradients, and its share of all gradients."""
    present = sorted(set(rows))
    columns: dict[str, list[Any]] = {"row": present}
    for name, key in _OF_A_RESPONSE.items():
        if key in batch:
            column = batch[key].tolist() if isinstance(batch[key], Tensor | np.ndarray) else batch[key]
            columns[name] = [column[row] for row in present]
    columns["tokens"] = [rows.count(row) for row in present]
    for name, gradient in gradients.items():
        whole = sum(map(abs, gradient))
        own = [[g for r, g in zip(rows, gradient, strict=True) if r == row] for row in present]
        columns[f"push {name}"] = [sum(part) for part in own]
        columns[f"share {name}"] = [sum(map(abs, part)) / whole if whole else 0.0 for part in own]
    return Table(columns, "responses", coloured=tuple(f"push {name}" for name in gradients))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value + 0.0:.4g}"  # −0 is 0
    text = _visible(str(value).replace("\n", "↵"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _shade(value: Any, largest: float) -> str:
    """Green for a positive value, red for a negative one, readable on light and dark pages."""
    if not largest or not isinstance(value, int | float) or not value:
        return ""
    colour = "0,165,80" if value > 0 else "225,50,45"
    return f";background:rgba({colour},{0.55 * abs(value) / largest:.3f})"


def _visible(text: str) -> str:
    """The text with names in place of characters that control a terminal or reorder text."""
    return "".join(x if x.isprintable() or x in "\t\n" else f"⟨U+{ord(x):04X}⟩" for x in text)
