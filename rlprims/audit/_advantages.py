"""The estimator of a step's advantages."""

from collections.abc import Iterator, Mapping, Sequence, Set
from inspect import signature
from itertools import product
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor

from rlprims import advantage
from rlprims.algorithms import BoundFunction, use
from rlprims.audit._candidates import FINE, Options, candidates, of_package
from rlprims.audit._found import Data, Found, difference, parts, plain, rows_of, simplest, telling_rows
from rlprims.grouping import dense_ids
from rlprims.ratios import Estimator
from rlprims.rewards import at_last_token, kl_penalty

Fit: TypeAlias = tuple[BoundFunction, BoundFunction | None]
"""An estimator, and a transform after it."""
_PARTS = {"ranks": " over all rows of a rank", "micro_batches": " over all rows of a micro-batch"}


def name_advantages(data: Data, more: Options, tolerance: float) -> Found:
    """The estimator, and the transform after it, that gives ``advantages``.

    Formulas of groups are found on a few groups, and then tried on all, some at a time. Where none holds, as one with
    statistics of all rows, all formulas are tried on all rows.
    """
    mask = data["response_mask"]
    size = torch.where(mask, data["advantages"], 0.0).abs_().amax(1)
    if not size.any():
        return Found({}, "cannot be told: all advantages are 0", {})
    few = telling_rows(data, size)
    if len(few) < len(mask):
        said, fits = _search(rows_of(data, few), more, tolerance)
        for part in (rows_of(data, rows) for rows in parts(data) if fits):
            fits = [fit for fit in fits if _apart(fit, said, part, more) <= tolerance * float(size.max())]
        if fits:
            return _found(said, fits)
    said, fits = _search(data, more, tolerance)
    return _found(said, fits) if fits else Found({}, said, {})


def _search(data: Data, more: Options, tolerance: float) -> tuple[str, list[Fit]]:
    """What the estimator read, and the formulas that fit; or none, and what is nearest."""
    mask = data["response_mask"]
    wanted = torch.where(mask, data["advantages"], 0.0)
    nearest, told = torch.inf, "none"
    for said, columns in _inputs(data, more):
        fits: list[Fit] = []
        for fn, values, result in _coarse(columns, more, mask):
            apart = difference(result, wanted)
            if apart < nearest:
                nearest, told = apart, _none(apart, f"{plain(use(fn, **values))}{said}", result, wanted, data)
            if apart < 0.05:
                fits += ((part, None) for part in _finely(fn, values, columns, wanted, more, tolerance))
        if not fits or not columns.get("values", mask).any():  # those of a critic that begins with 0
            fits += _transformed(columns, wanted, more, tolerance, {"values"} if fits else set())
        if fits:
            return said, fits
    return told, []


def _apart(fit: Fit, said: str, data: Data, more: Options) -> float:
    """The largest difference of a formula from the advantages of these rows."""
    (estimator, transform), mask = fit, data["response_mask"]
    columns = next(columns for each, columns in _inputs(data, more) if each == said)
    result = _call(estimator.fn, columns, estimator.hyperparameters, mask)
    if transform is not None and result is not None:
        result = _call(transform.fn, {**columns, "advantages": result}, transform.hyperparameters, mask)
    wanted = torch.where(mask, data["advantages"], 0.0)
    return torch.inf if result is None else float((result - wanted).abs().max())


def _found(said: str, fits: Sequence[Fit]) -> Found:
    (estimator, transform), *_ = fits
    others = [f"{plain(after)} of {plain(part)}" for part, after in fits if after]
    if transform is None:
        part, undecided = simplest(estimator for estimator, after in fits if after is None)
        undecided |= {"the formula": tuple(others[:1])} if others else {}
        return Found({"advantage": part}, f"{part}{said}", undecided)
    part, undecided = simplest(transform for _, transform in fits if transform)
    estimator = plain(estimator)
    return Found({"advantage": estimator, "normalization": part}, f"{part} of {estimator}{said}", undecided)


def _inputs(data: Data, more: Options) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What the estimator may have read: rewards with or without a KL, in groups, or in all rows of a part."""
    mask = data["response_mask"]
    base = {name: x for name, x in data.items() if name != "advantages"}
    scores = base.get("shaped_scores", base.get("scores", torch.zeros(len(mask))))
    base = {"rewards": at_last_token(scores, mask), **base}
    yield "", base
    for coefficient, kind in product(more.get("kl_in_reward", ()), get_args(Estimator)):
        policies = base["old_log_probs"], base["ref_log_probs"]
        rewards = kl_penalty(base["rewards"], *policies, mask, kl_coef=coefficient, estimator=kind)
        yield f" of rewards with the KL {kind} x {coefficient}", {**base, "rewards": rewards}
    parts = {said: dense_ids(base[name]) for name, said in _PARTS.items() if name in base}
    for said, ids in {**parts, " over all rows": torch.zeros(len(mask), dtype=torch.int64)}.items():
        if "group_ids" in base:
            yield f"{said}, not the group", {**base, "group_ids": ids}


def _coarse(columns: Data, more: Options, mask: Tensor) -> Iterator[tuple[Any, dict[str, Any], Tensor]]:
    """Every estimator with every combination of its coarse hyperparameters, and its result."""
    for fn in of_package(advantage, {"response_mask"}, {"advantages"}, columns):
        for values in candidates(fn, more, fine=False):
            if (result := _call(fn, columns, values, mask)) is not None:
                yield fn, values, result


def _finely(
    fn: Any, coarse: Mapping[str, Any], columns: Data, wanted: Tensor, more: Options, tolerance: float
) -> Iterator[BoundFunction]:
    mask = columns["response_mask"]
    for fine in candidates(fn, more, fine=True):
        values = {**coarse, **{name: value for name, value in fine.items() if name in FINE}}
        result = _call(fn, columns, values, mask)
        if result is not None and difference(result, wanted) <= tolerance:
            yield use(fn, **values)


def _transformed(columns: Data, wanted: Tensor, more: Options, tolerance: float, needed: Set[str]) -> list[Fit]:
    """An estimator that reads some columns, and a transform after it, such as whitening: most signs stay."""
    mask = columns["response_mask"]
    y = wanted[mask].double() - wanted[mask].double().mean()
    readable = {**columns, "advantages": wanted}
    for fn, values, result in _coarse(columns, more, mask):
        x = result[mask] - result[mask].mean()
        if needed - {*signature(fn).parameters} or float((x @ y) / (x.norm() * y.norm()).clamp(min=1e-30)) < 0.5:
            continue
        for transform in of_package(advantage, {"response_mask", "advantages"}, set(), readable):
            fits: list[Fit] = []
            for chosen in candidates(transform, more):
                after = _call(transform, {**columns, "advantages": result}, chosen, mask)
                if after is not None and difference(after, wanted) <= tolerance:
                    fits.append((use(fn, **values), use(transform, **chosen)))
            if fits:
                return fits
    return []


def _call(fn: Any, columns: Data, values: Mapping[str, Any], mask: Tensor) -> Tensor | None:
    """The result per token, in float64; None if the hyperparameters or the columns do not fit together."""
    own = {*signature(fn).parameters, "trajectory_ids"} & columns.keys()
    read = {name: x.double() if (x := columns[name]).is_floating_point() else x for name in own}
    try:
        result = use(fn)(read, **values)
    except (ValueError, TypeError):
        return None
    return result.double() if isinstance(result, Tensor) and result.shape == mask.shape else None


def _none(apart: float, said: str, result: Tensor, wanted: Tensor, data: Data) -> str:
    off = (result - wanted).abs()
    row, position = divmod(int(off.argmax()), off.shape[1])
    group = f", group {int(data['group_ids'][row])}" if "group_ids" in data else ""
    numbers = f"{float(wanted[row, position]):.6g}, not {float(result[row, position]):.6g}"
    return f"none; the nearest is {said}, which differs by {apart:.2%} at row {row}{group}, token {position}: {numbers}"
