"""A step as the checks read it: columns that are there, and what follows from them."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from rlprims.audit._advantages import name_advantages
from rlprims.audit._found import Found
from rlprims.audit._losses import name_losses
from rlprims.ended import Ended
from rlprims.grouping import group_count, group_sum, is_varied
from rlprims.layout import last_token
from rlprims.masking import zero_outside


class Step(dict[str, Tensor]):
    """The columns by the names of this library; one that is not there raises ``ValueError``."""

    def __init__(self, data: Mapping[str, Tensor], tokenizer: Any) -> None:
        super().__init__(data)
        self.mask, self.tokenizer = data["response_mask"], tokenizer
        self.width, self.rows = self.mask.shape[1], self.mask.any(1)
        self.trainer = "old_log_probs" if "old_log_probs" in data else "log_probs"
        if parts := [data[name] for name in ("prompts", "responses") if name in data]:
            self.setdefault("input_ids", torch.cat(parts, 1) if parts[1:] else parts[0])
        if "input_ids" in self:
            self["ids"] = self["input_ids"][:, -self.width :]

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(f"needs {'responses or input_ids' if name == 'ids' else name}")

    def per_token(self, name: str) -> Tensor:
        """A column (B, T) in float32 or more, 0 outside the mask and where it is not finite, which N1 reports."""
        x = self[name].to(torch.promote_types(self[name].dtype, torch.float32))
        need(x.shape == self.mask.shape, f"{name} of the shape of response_mask")
        return zero_outside(x, self.mask & x.isfinite())

    def tokens(self, *names: str) -> list[Tensor]:
        need(self.mask.sum() >= 64, "64 learned tokens")
        return [self.per_token(name)[self.mask] for name in names]

    @cached_property
    def gap(self) -> Tensor:
        """(B, T): trainer less sampler, 0 where the sampler scored nothing."""
        gap = self.per_token(self.trainer) - self.per_token("rollout_log_probs")
        need(self.scored.sum() >= 64, "64 tokens that the sampler scored")
        return zero_outside(gap, self.scored)

    @property
    def scored(self) -> Tensor:
        return self.per_token("rollout_log_probs") != 0

    def grows(self, by: Tensor, where: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """``where``, if log mean |gap| of a row grows with ``by``, t = r √((n−2) / (1−r²)) > 5, to twice its least."""
        by, size = by[self.rows].double(), (self.gap.abs().sum(1) / self.mask.sum(1).clamp(min=1))[self.rows]
        need(len(by) >= 12 and (by != by[0]).any(), "12 rows that differ in it")
        r, least = correlation((size + 1e-6).log(), by), by == by.min()
        t = r * ((len(by) - 2) / max(1 - r * r, 1e-9)) ** 0.5
        ratio = float(size[~least].mean() / size[least].mean().clamp(min=1e-3))
        return where & (t > 5) & (ratio > 2), {"t": t, "ratio": ratio}

    @cached_property
    def attended(self) -> Tensor:
        return self["attention_mask"][:, -self.width :].bool()

    @property
    def read(self) -> Tensor:
        """bool (B, P+T): prompt and response without padding."""
        need(self["attention_mask"].shape == self["input_ids"].shape, "attention_mask of prompt and response")
        return self["attention_mask"].bool()

    @property
    def prompts(self) -> Tensor:
        """(B, P) ids, -1 at padding."""
        size = self["prompts"].shape[1] if "prompts" in self else self["input_ids"].shape[1] - self.width
        need(size > 0, "prompts")
        return torch.where(self.read, self["input_ids"], -1)[:, :size]

    @property
    def of_prompt(self) -> Tensor:
        """bool (T,): columns of response_mask that are of the prompt."""
        return torch.arange(self.width) < self.width - self["input_ids"].shape[1] + self["prompts"].shape[1]

    @cached_property
    def sampled(self) -> Tensor:
        """bool (B, T): the sampler gave a log-prob (0 elsewhere, or -1 as verl pads)."""
        x = self["rollout_log_probs"]
        found = x.isfinite() & (x < 0) & (x != -1)
        beyond = "attention_mask" in self and bool((found & ~self.attended).any())
        some = (~found).any() and 2 * (found & self.mask).sum() > self.mask.sum()  # not greedy: 0 everywhere
        need(some and not beyond, "rollout_log_probs of 0 where nothing was sampled")
        return found

    def ends(self, reason: Ended) -> Tensor:
        """bool (B, T): the last token, if it is the end token (the tokenizer's, or the usual one) after ``reason``."""
        last = last_token(self.attended if "attention_mask" in self else self.mask) & self.rows[:, None]
        if (end := getattr(self.tokenizer, "eos_token_id", None)) is None:
            found = self["ids"][last & (self["ended"] == Ended.STOP)[:, None]]
            end = found.mode().values if len(found) >= 4 else -1
            need((found == end).double().mean() >= 0.9, "a tokenizer, for its end token")
        return last & (self["ids"] == end) & (self["ended"] == reason)[:, None]

    @cached_property
    def outcomes(self) -> Tensor:
        """(B,): the sum of the rewards, or the scores."""
        return (self.per_token("rewards").sum(1) if "rewards" in self else self["scores"].double()).nan_to_num()

    @cached_property
    def row_advantages(self) -> Tensor:
        """(B,): of rows whose tokens have one advantage each."""
        x = self.per_token("advantages")
        mean = x.sum(1) / self.mask.sum(1).clamp(min=1)
        one = zero_outside(x - mean[:, None], self.mask).abs().max() <= 1e-5 * x.abs().max()
        need(one and x.any(), "advantages that are one number per row, not all 0")
        return mean

    @cached_property
    def varied(self) -> Tensor:
        """bool (B,): rows of groups of two or more whose outcomes differ, and that have no row without tokens."""
        ids = self["group_ids"]
        return is_varied(self.outcomes, ids) & (group_sum(self.rows.long(), ids) == group_count(ids).clamp(min=2))

    @cached_property
    def off_zero(self) -> Tensor:
        """(B,): |Σ A| / Σ |A| of the group."""
        a, ids = self.row_advantages, self["group_ids"]
        return group_sum(a, ids).abs() / group_sum(a.abs(), ids).clamp(min=1e-30)

    @cached_property
    def estimator(self) -> Found:
        need("advantages" in self and ("rewards" in self or "scores" in self), "advantages, and scores or rewards")
        return name_advantages(self, {}, 1e-4)

    @cached_property
    def objective(self) -> Mapping[str, Found]:
        need("losses" in self or "gradients" in self, "losses or gradients")
        return name_losses(self, {}, 1e-4)

    def share(self, where: Tensor) -> str:
        """The share that tokens (B, T), or rows (B,), have in the sum of |A|, or in the mask if there is no A."""
        given = "advantages" in self and bool(self["advantages"].any())
        size = self.per_token("advantages").abs() if given else self.mask.double()
        part = (size * where.view(len(where), -1)).sum() / size.sum().clamp(min=1e-30)
        return f"{float(part):.1%} of {'the sum of |A|' if given else 'the learned tokens'}"


Said: TypeAlias = Tensor | bool | tuple[Tensor | bool, dict[str, Any]]
"""Where it is wrong, bool (B, T), (B,) or one; and the numbers of the message."""
Checks: TypeAlias = dict[str, Callable[[Step], Said]]


def need(there: Tensor | bool, what: str) -> None:
    if not there:
        raise ValueError(f"needs {what}")


def correlation(x: Tensor, y: Tensor) -> float:
    x, y = (each.to(torch.float64, copy=True) for each in (x, y))
    x, y = x.sub_(x.mean()), y.sub_(y.mean())
    return float(x @ y / (x.norm() * y.norm()).clamp(min=1e-30))
