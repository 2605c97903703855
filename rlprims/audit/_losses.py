"""The policy loss of a step, its weights and terms, and the mean that reduces it."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rlprims import advantage, losses
from rlprims.algorithms import Algorithm, BoundFunction, LossTerm, objective_parts, step_counts, token_weights, use
from rlprims.audit._candidates import Options, Weighting, candidates, loss_terms, policy_losses, weightings
from rlprims.audit._found import Data, Found, changed, difference, parts, plain, rows_of, telling_rows, worded

_EXACT = 1e-4
Tried: TypeAlias = "tuple[list[BoundFunction], Sequence[Mean], Weighting, LossTerm | None, float]"
Columns: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What the trainer computed, the policy loss, and the terms (a column each), in some rows."""


class Mean(NamedTuple):
    """A mean as a linear map: the step's loss is the sum of its row's weight (B, 1) times the loss of each token."""

    use: BoundFunction
    over: str
    weights: Tensor


class _Likely(NamedTuple):
    """A formula that fits on a few rows, and the means that differ by a factor only."""

    policy: BoundFunction
    means: Sequence[Mean]
    weighting: Weighting
    term: LossTerm | None


class Fit(NamedTuple):
    """factor x policy loss x weighting, plus coefficient x term, under a mean."""

    policy: BoundFunction
    mean: Mean
    weighting: Weighting
    term: LossTerm | None
    factor: float
    coefficient: float


def name_losses(data: Data, more: Options, tolerance: float) -> dict[str, Found]:
    """The stages ``loss`` and ``mean``: the formula of ``gradients``, ``losses`` or ``loss``."""
    data = {**({"old_log_probs": x} if (x := data.get("rollout_log_probs")) is not None else {}), **data}
    if "log_probs" not in data:
        raise ValueError(f"expected log_probs (B, T) for the losses; the batch has {sorted(data)}")
    kind = next(name for name in ("gradients", "losses", "loss") if name in data)
    if not data[kind].any():
        return {"loss": Found({}, f"cannot be told: all {kind} are 0", {})}
    means = list(_means(data, more))
    summed = Mean(use(losses.token_sum), "", torch.ones(len(data["response_mask"]), 1).double())
    search = _Search(data, kind, [summed] if kind == "losses" else means, more, tolerance)
    terms = loss_terms(data) if kind != "loss" else []  # one number determines no coefficient
    fits: list[Fit] = []
    first, *others = weightings(data)
    by_tokens = [[term for term in terms if (term.tokens is None) == of_all] for of_all in (True, False)]
    for weighted, extra in product([[first], others], [[], *filter(None, by_tokens)]):
        fits = fits or search.fits(weighted, extra)
    stages = {"loss": _said_loss(fits, search.nearest)}
    by_row = None
    if "losses" in data:
        by_row = data["losses"].where(data["response_mask"], 0.0).sum(1, keepdim=True, dtype=torch.float64)
    if kind == "losses" and by_row is not None and "loss" in data:
        wanted = float(data["loss"])
        totals = [(mean, float((mean.weights * by_row).sum())) for mean in means]
        fitting = [mean for mean, total in totals if abs(total - wanted) <= tolerance * abs(wanted)]
        fitting = fitting or [long for mean, total in totals if total and (long := _of_length(mean, wanted / total))]
        stages["mean"] = _said_mean(fitting, means, by_row)
    elif kind != "losses" and fits:
        fitting = [fit.mean for fit in fits if fit[0] == fits[0][0] and fit[2:4] == fits[0][2:4]]
        stages["mean"] = _said_mean(fitting, means, by_row)
    return stages


class _Rows:
    """Some rows of the step, and the numbers that a formula gives for them, in the order of the trainer's."""

    def __init__(self, data: Data, kind: str, rows: Tensor) -> None:
        some = rows_of(data, rows)
        self.data = {name: x.double() if x.is_floating_point() else x for name, x in some.items()}
        self.kind, self.rows, self.mask = kind, rows, self.data["response_mask"]
        self.data["log_probs"] = self.data["log_probs"].clone().requires_grad_(kind == "gradients")
        self.wanted = self.data["loss"].reshape(1) if kind == "loss" else self.data[kind][self.mask]

    def losses(self, policy: BoundFunction) -> Tensor | None:
        """Per token; None if the data or the hyperparameters do not fit, or there is no gradient to compare."""
        try:
            per_token = policy(self.data)
        except (ValueError, TypeError):
            return None
        fits = isinstance(per_token, Tensor) and per_token.shape == self.mask.shape
        return per_token if fits and (self.kind != "gradients" or per_token.requires_grad) else None

    def column(self, per_token: Tensor, weights: Tensor) -> Tensor:
        """What the trainer would have computed from these losses, with the weights of these rows."""
        weights = weights.expand(self.mask.shape)
        if self.kind == "gradients":
            (gradient,) = torch.autograd.grad(per_token, self.data["log_probs"], weights, retain_graph=True)
            return gradient[self.mask]
        weighted = (per_token.detach() * weights)[self.mask]
        return weighted if self.kind == "losses" else weighted.sum().reshape(1)


def _products(y: Tensor, policy: Tensor, terms: Tensor) -> tuple[Tensor, ...]:
    """p·p, p·y, y·y; and by term p·t, t·t, t·y. Those of several parts add up to those of all rows."""
    return policy @ policy, policy @ y, y @ y, policy @ terms, (terms * terms).sum(0), y @ terms


def _solve(
    kind: str, pp: Tensor, py: Tensor, yy: Tensor, pt: Tensor, tt: Tensor, ty: Tensor
) -> Iterator[tuple[int, float, float]]:
    """For each term that may fit its number, the policy loss's factor, and its coefficient.

    Least squares in two unknowns: [p·p p·t; p·t t·t] (factor, coefficient) = (p·y, t·y).
    """
    if kind == "loss" or not len(tt):
        yield 0, 1.0 if kind == "loss" else _near_one(float(py / pp.clamp(min=1e-300))), 0.0
        return
    determinant = (pp * tt - pt * pt).clamp(min=1e-300)
    factors, coefficients = (tt * py - pt * ty) / determinant, (pp * ty - pt * py) / determinant
    if not pp:  # advantages of 0: the term alone
        factors, coefficients = torch.ones_like(tt), ty / tt
    left = yy - 2 * (factors * py + coefficients * (ty - factors * pt)) + factors**2 * pp + coefficients**2 * tt
    for i in (left <= 1e-6 * yy).nonzero()[:, 0].tolist():
        factor, coefficient = _near_one(float(factors[i])), float(coefficients[i])
        if factor == 1:  # then only the coefficient is unknown
            coefficient = float((ty[i] - pt[i]) / tt[i])
        yield i, factor, coefficient


def _sum(policy: Tensor, terms: Tensor, number: int, factor: float, coefficient: float) -> Tensor:
    return factor * policy + coefficient * terms[:, number : number + 1].sum(1)


class _Search:
    """All formulas, tried first on the groups with the largest ratios, and then on all rows."""

    def __init__(self, data: Data, kind: str, means: Sequence[Mean], more: Options, tolerance: float) -> None:
        self.data, self.kind, self.more, self.tolerance = data, kind, more, tolerance
        few = torch.arange(len(data["response_mask"])) if kind == "loss" else telling_rows(data, _gap(data))
        self.few = _Rows(data, kind, few)
        self.nearest: tuple[float, BoundFunction | None] = (torch.inf, None)
        self.directions = _directions(means) if kind == "gradients" else [[mean] for mean in means]
        self.of_step: dict[Any, tuple[Data, Mapping[str, Any]]] = {}

    def fits(self, weighted: Sequence[Weighting], terms: Sequence[LossTerm]) -> list[Fit]:
        """The formulas that give the trainer's numbers, the simplest first; those with a factor only if no other."""
        likely: list[_Likely] = []
        for alike, means, weighting, term, apart in self._tried(weighted, terms):
            if apart < self.nearest[0]:
                self.nearest = apart, alike[0]
            likely += [_Likely(policy, means, weighting, term) for policy in alike if apart <= self.tolerance]
        found = list(self._on_all(likely)) if likely else []
        counts = [count for fit in found if (count := _count_of(fit.factor))]
        if counts:
            found = [fit for fit in found if _count_of(fit.factor) == min(counts)]
        else:  # no mean explains the factor: the first one
            found = [fit for fit in found if fit.mean is found[0].mean]
        return sorted(found, key=lambda fit: len(changed(fit.policy)) + bool(fit.mean.over))

    def _tried(self, weighted: Sequence[Weighting], terms: Sequence[LossTerm]) -> Iterator[Tried]:
        """Every formula on a few rows, with its difference."""
        few = self.few
        factors = [(weighting, self._factor(weighting)[few.rows].double()) for weighting in weighted]
        columns = [[self._term(term, means[0], few) for term in terms] for means in self.directions]
        of_terms = [torch.stack(each, 1) if each else few.wanted.new_zeros(len(few.wanted), 0) for each in columns]
        for alike in (each for fn in policy_losses(self.data) for each in self._distinct(fn)):
            per_token = few.losses(alike[0])
            assert per_token is not None
            for (means, own), (weighting, factor) in product(zip(self.directions, of_terms, strict=True), factors):
                of_policy = few.column(per_token, means[0].weights[few.rows] * factor)
                for number, *scales in _solve(self.kind, *_products(few.wanted, of_policy, own)):
                    apart = difference(_sum(of_policy, own, number, *scales), few.wanted)
                    yield alike, means, weighting, terms[number] if terms else None, apart

    def _distinct(self, fn: Any) -> list[list[BoundFunction]]:
        """Its uses, those together that give the same numbers on a few rows."""
        alike: dict[bytes, list[BoundFunction]] = {}
        for policy in (use(fn, **values) for values in candidates(fn, self.more)):
            per_token = self.few.losses(policy)
            if per_token is not None:
                weights = self.directions[0][0].weights[self.few.rows]
                column = self.few.column(per_token, weights) if self.kind != "loss" else per_token
                alike.setdefault(blake2b(column.detach().numpy().data).digest(), []).append(policy)
        return list(alike.values())

    def _columns(self, likely: Sequence[_Likely]) -> Iterator[tuple[int, Columns]]:
        """Of all rows, some whole groups at a time, and of each formula by its number."""
        factors = {id(each.weighting): self._factor(each.weighting) for each in likely}
        for some in [self.few.rows] if self.kind == "loss" else parts(self.data):
            rows, of_terms = _Rows(self.data, self.kind, some), dict[tuple[int, int], Tensor]()
            for number, (policy, (mean, *_), weighting, term) in enumerate(likely):
                key = id(term), id(mean)
                if key not in of_terms:
                    column = [] if term is None else [self._term(term, mean, rows)[:, None]]
                    of_terms[key] = torch.cat([rows.wanted.new_zeros(len(rows.wanted), 0), *column], 1)
                per_token = rows.losses(policy)
                assert per_token is not None
                of_policy = rows.column(per_token, mean.weights[some] * factors[id(weighting)][some].double())
                yield number, (rows.wanted, of_policy, of_terms[key])

    def _on_all(self, likely: Sequence[_Likely]) -> Iterator[Fit]:
        """The fits on all rows, under each of the means that differ by a factor only."""
        products = dict[int, tuple[Tensor, ...]]()
        hashes = [blake2b() for _ in likely]
        for number, columns in self._columns(likely):
            of_part = _products(*columns)  # added in place: many small tensors would split the heap
            totals = products.setdefault(number, tuple(map(torch.zeros_like, of_part)))
            for total, x in zip(totals, of_part, strict=True):
                total += x
            for column in columns[1:]:
                hashes[number].update(column.contiguous().numpy().data)
        digests = [each.digest() for each in hashes]
        firsts = [digests.index(digest) for digest in digests]  # the first formula with the same numbers
        distinct = sorted(set(firsts))
        scales = {first: [(x, y) for _, x, y in _solve(self.kind, *products[first])] for first in distinct}
        apart = {first: torch.zeros(1 + len(scales[first]), dtype=torch.float64) for first in distinct}
        for number, (y, of_policy, of_term) in self._columns([likely[first] for first in distinct]):
            first = distinct[number]
            left = [(_sum(of_policy, of_term, 0, *scale) - y).abs().max() for scale in scales[first]]
            torch.maximum(apart[first], torch.stack([y.abs().max(), *left]), out=apart[first])
        for each, first in zip(likely, firsts, strict=True):
            size, *left = apart[first]
            for (factor, coefficient), largest in zip(scales[first], left, strict=True):
                for mean in each.means if largest <= self.tolerance * size else ():
                    yield _fit(each, mean, factor, coefficient)

    def _term(self, term: LossTerm, mean: Mean, rows: _Rows) -> Tensor:
        """The numbers of a term with coefficient 1, in some rows; a mean or a selection of its own is over the step."""
        spec = _spec(policy_coefficient=0.0, policy_loss=use(losses.nll), loss_terms=[term], aggregation=mean.use)
        key = term.mask, term.tokens, term.over
        if key not in self.of_step:
            chosen = token_weights(spec, self.data)
            counts = step_counts(spec, {**self.data, **chosen})
            self.of_step[key] = {**chosen, **counts.columns}, counts.totals
        columns, totals = self.of_step[key]
        data = {**rows.data, **{name: x[rows.rows] for name, x in columns.items()}, **totals}
        part = objective_parts(spec)[-1]
        per_token = part.losses(data)
        column = torch.zeros_like(per_token)
        if self.kind == "losses" and part.number is None:
            column = per_token.detach()
        elif self.kind == "gradients" and per_token.requires_grad:
            weighted = per_token * mean.weights[rows.rows]
            total = weighted.sum() if part.number is None else part.mean(data, per_token)
            column = torch.autograd.grad(total, data["log_probs"], materialize_grads=True)[0]
        return column[rows.mask]

    def _factor(self, weighting: Weighting) -> Tensor:
        """The weights of corrections and selections over the step; those of the batch if it has them."""
        if "loss_weights" in self.data:
            return self.data["loss_weights"]
        spec = _spec(corrections=weighting[0], token_selection=weighting[1])
        return token_weights(spec, self.data).get("loss_weights", torch.ones(len(self.data["log_probs"]), 1))


def _fit(found: _Likely, mean: Mean, factor: float, coefficient: float) -> Fit:
    """The fit under one of its means, where these numbers are those under the first."""
    ratio = float(found.means[0].weights.sum() / mean.weights.sum())
    own, of_term = _near_one(factor * ratio), coefficient * ratio
    if own != 1 and (long := _of_length(mean, own)):
        mean, own, of_term = long, 1.0, of_term / own
    return Fit(found.policy, mean, found.weighting, found.term, own, of_term)


def _near_one(factor: float) -> float:
    return 1.0 if abs(factor - 1) <= _EXACT else factor


def _count_of(factor: float) -> int | None:
    """n, if the factor is n or 1/n, as that of eight micro-batches."""
    count = max(abs(factor), 1 / max(abs(factor), 1e-300))
    return round(count) if abs(count - round(count)) <= _EXACT * count else None


def _of_length(mean: Mean, factor: float) -> Mean | None:
    """Dr. GRPO's mean, if the factor is that of a constant length."""
    n = round(1 / factor) if factor else 0
    if mean.use.fn is not losses.seq_mean_token_sum or n < 2 or abs(n * factor - 1) > _EXACT:
        return None
    return Mean(use(losses.seq_mean_token_sum_norm, length=float(n)), mean.over, mean.weights * factor)


def _directions(means: Sequence[Mean]) -> list[list[Mean]]:
    """The means, those that differ by a factor only together."""
    found: list[list[Mean]] = []
    for mean in means:
        unit = mean.weights / mean.weights.norm()
        same = [d for d in found if float((d[0].weights / d[0].weights.norm() - unit).norm()) <= 1e-9]
        if same:
            same[0].append(mean)
        else:
            found.append([mean])
    return found


def _gap(data: Data) -> Tensor:
    """(B,): the largest log-ratio of each row."""
    old = data.get("old_log_probs", data.get("rollout_log_probs", data["log_probs"]))
    return (data["log_probs"] - old).abs_().masked_fill_(~data["response_mask"], 0.0).amax(1)


def _spec(**parts: Any) -> Algorithm:
    return Algorithm(name="part", advantage=use(advantage.discounted_returns), **parts)


def _means(data: Data, more: Options) -> Iterator[Mean]:
    """The aggregations over the step, and as means over its micro-batches or ranks of their own means."""
    columns = {name: data[name] for name in ("response_mask", "group_ids", "trajectory_ids") if name in data}
    mask, lengths = data["response_mask"], (data["response_mask"].shape[1], *more.get("length", ()))
    parts = [use(losses.token_mean), use(losses.seq_mean_token_mean), use(losses.seq_mean_token_sum)]
    parts += [use(losses.seq_mean_token_sum_norm, length=float(length)) for length in lengths] + [use(losses.token_sum)]
    parts += [use(losses.prompt_token_mean)] if "group_ids" in data else []
    parts += [use(losses.trajectory_mean)] if "trajectory_ids" in data else []
    groupings = {"": torch.zeros(len(mask), dtype=torch.int64)}
    for name, said in (("micro_batches", "of each micro-batch"), ("ranks", "of each rank")):
        groupings |= {said: data[name].long()} if name in data else {}
    for over, ids in groupings.items():
        for part in parts:
            weights = torch.zeros(len(mask), 1, dtype=torch.float64)
            numbers = sorted(set(ids.tolist()))
            for rows in ((ids == number).nonzero()[:, 0] for number in numbers):
                weights[rows] = _weights(part, rows_of(columns, rows)) / len(numbers)
            yield Mean(part, over, weights)


def _weights(part: BoundFunction, data: Data) -> Tensor:
    """(B, 1): the derivative of a mean by the loss of a token of each row, some rows at a time."""
    counts, found = step_counts(_spec(aggregation=part), data), []
    for rows in torch.arange(len(data["response_mask"])).split(32):  # type: ignore[no-untyped-call]
        some = rows_of({**data, **counts.columns}, rows)
        x = torch.zeros(some["response_mask"].shape, dtype=torch.float64, requires_grad=True)
        (by_token,) = torch.autograd.grad(part({**some, **counts.totals, "losses": x}), x)
        found.append(by_token.amax(1, keepdim=True))
    return torch.cat(found)


def _said_loss(fits: Sequence[Fit], nearest: tuple[float, BoundFunction | None]) -> Found:
    if not fits:
        apart, policy = nearest
        name = "none" if policy is None else f"none; the nearest is {plain(policy)}"
        return Found({}, f"{name}, which differs by {apart:.2%}", {})
    best = fits[0]
    loss, (corrections, selection) = plain(best.policy), best.weighting
    parts: dict[str, Any] = {"policy_loss": loss}
    said = str(loss)
    if best.factor != 1:
        said, parts["policy_coefficient"] = f"{best.factor:.6g} x {loss}", best.factor
    if corrections or selection:
        said += "".join(f" x {part}" for part in (*corrections, *([selection] if selection else [])))
        parts |= {"corrections": corrections, "token_selection": selection}
    if best.term is not None:
        said += f" + {best.coefficient:.6g} x {best.term.loss}"
        parts["loss_terms"] = (best.term.model_copy(update={"coefficient": best.coefficient}),)
    same = [fit.policy for fit in fits if fit.mean is best.mean and fit[2:4] == best[2:4]]
    return Found(parts, said, worded(loss, same))


def _said_mean(fitting: Sequence[Mean], means: Sequence[Mean], by_row: Tensor | None) -> Found:
    if not fitting:
        return Found({}, "none of the library's means, with these denominators", {})
    best = fitting[0]
    said = str(best.use)
    if best.over:
        step = next(mean for mean in means if mean.use == best.use and not mean.over)
        said += f" {best.over}, then the mean of these"
        if by_row is not None:
            apart = difference((best.weights * by_row).sum(), (step.weights * by_row).sum())
            said += f": {apart:.1%} from the step's"
    others = tuple(dict.fromkeys(f"{mean.use} {mean.over}".rstrip() for mean in fitting))[1:]
    return Found({"aggregation": best.use}, said, {"aggregation": others} if others else {})
