"""Sampling of prompts: generation batches until a training batch is full, and draws by difficulty."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch

from rlprims.masking import check_choice

Group = TypeVar("Group")
AtLimit: TypeAlias = Literal["error", "smaller_batch"]


class SamplingExhausted(RuntimeError):
    """The limit of generation batches was reached before the batch was full. The message has the counts."""


class DynamicSampling(Generic[Group]):
    """Collects kept groups over generation batches until a training batch is full (DAPO, arXiv:2503.14476, sec. 3.2).

    A group is any object and is never divided: :meth:`take` returns it as it was added. Surplus groups are kept for the
    next batch (verl discards them). Every added group is taken, surplus, or dropped for a reason that is counted.

    Args:
        groups: the number of groups in a training batch.
        max_generation_batches: the most that may be added for one training batch; None: no limit.
        at_limit: "error" raises :class:`SamplingExhausted`; "smaller_batch" takes the groups there are, if any.

    >>> sampling = DynamicSampling(groups=2, max_generation_batches=3)
    >>> sampling.add(["a", "b", "c"], dropped=[None, "all acc = 0", None])
    >>> sampling.full
    True
    >>> sampling.take()
    ['a', 'c']
    """

    def __init__(self, *, groups: int, max_generation_batches: int | None = None, at_limit: AtLimit = "error") -> None:
        check_choice("at_limit", at_limit, AtLimit)
        if groups < 1 or (max_generation_batches is not None and max_generation_batches < 1):
            raise ValueError(f"{groups=} and {max_generation_batches=}, expected at least 1")
        self.groups = groups
        self.max_generation_batches = max_generation_batches
        self.at_limit = at_limit
        self.surplus: list[Group] = []
        self.generation_batches = 0
        self.sampled = 0
        self.dropped: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether a training batch can be taken. At the limit it raises or accepts fewer groups: see ``at_limit``."""
        if len(self.surplus) >= self.groups:
            return True
        limit = self.max_generation_batches
        if limit is None or self.generation_batches < limit:
            return False
        if self.at_limit == "smaller_batch" and self.surplus:
            return True
        seen = "; ".join(f"{count} dropped: {reason}" for reason, count in self.dropped.most_common())
        raise SamplingExhausted(
            f"{len(self.surplus)} of {self.groups} groups after {limit} generation batches, the limit. "
            f"Of {self.sampled} groups sampled: {seen or 'none dropped'}. The prompts may be too hard or too easy for "
            "this policy: change the data, sample more per group, or raise max_generation_batches"
        )

    def add(self, groups: Sequence[Group], dropped: Sequence[str | None]) -> None:
        """Add a generation batch: its groups, and for each the reason to drop it, or None to keep it."""
        if len(groups) != len(dropped):
            raise ValueError(f"{len(groups)} groups but {len(dropped)} reasons: expected one each, None to keep")
        self.generation_batches += 1
        self.sampled += len(groups)
        self.surplus += [group for group, reason in zip(groups, dropped, strict=True) if reason is None]
        self.dropped.update(reason for reason in dropped if reason is not None)

    def take(self) -> list[Group]:
        """Return the training batch, oldest groups first, and reset the counters for the next one."""
        if not self.full:
            raise ValueError(f"{len(self.surplus)} of {self.groups} groups, expected all: add batches until full")
        batch, self.surplus = self.surplus[: self.groups], self.surplus[self.groups :]
        self.generation_batches, self.sampled, self.dropped = 0, 0, Counter()
        return batch


class DifficultyPools:
    """Sorts prompts into pools by their last solve rate, and draws prompts with a weight per pool.

    ``pools`` has a lowest solve rate and a weight for each name. A prompt belongs to the pool with the largest lowest
    rate that is not above the prompt's own rate. A prompt that was not seen yet has weight 1. A pool with weight 0 is
    never drawn, so ``{"open": (0.0, 1.0), "mastered": (1.0, 0.0)}`` retires a prompt as soon as all its responses are
    correct. The pools are configuration and are not part of the state.

    >>> pools = DifficultyPools({"hard": (0.0, 1.0), "normal": (0.2, 2.0), "easy": (0.8, 0.0)})
    >>> pools.observe({"1+1": 1.0, "17*23": 0.5})
    >>> pools.pool("1+1"), pools.pool("17*23"), pools.pool("unseen")
    ('easy', 'normal', None)
    >>> sorted(pools.draw(["1+1", "17*23", "unseen"], 2, generator=torch.Generator().manual_seed(0)))
    ['17*23', 'unseen']
    """

    def __init__(self, pools: Mapping[str, tuple[float, float]]) -> None:
        if not pools or any(not math.isfinite(lowest) or not 0 <= w < math.inf for lowest, w in pools.values()):
            raise ValueError(f"pools={pools!r}, expected names with (lowest solve rate, weight), finite, weights >= 0")
        self.pools = dict(sorted(pools.items(), key=lambda item: -item[1][0]))
        self.solve_rates: dict[str, float] = {}

    def pool(self, prompt: str) -> str | None:
        """The prompt's pool; None if it was not seen. A rate below every lowest rate belongs to the lowest pool."""
        if prompt not in self.solve_rates:
            return None
        rate = self.solve_rates[prompt]
        return next((name for name, (lowest, _) in self.pools.items() if rate >= lowest), list(self.pools)[-1])

    def weight(self, prompt: str) -> float:
        """The prompt's probability of being drawn, relative to the weights of the other prompts."""
        pool = self.pool(prompt)
        return 1.0 if pool is None else self.pools[pool][1]

    def observe(self, solve_rates: Mapping[str, float]) -> None:
        """Record each prompt's mean accuracy in the last batch. It replaces the earlier one."""
        wrong = [prompt for prompt, rate in solve_rates.items() if not math.isfinite(rate)]
        if wrong:
            raise ValueError(f"the solve rate of {wrong[0]!r} is {solve_rates[wrong[0]]}, expected a finite number")
        self.solve_rates.update({prompt: float(rate) for prompt, rate in solve_rates.items()})

    def draw(self, prompts: Sequence[str], count: int, *, generator: torch.Generator) -> list[str]:
        """``count`` different prompts in random order, drawn by weight.

        Raises:
            ValueError: fewer than ``count`` have a positive weight; the message has the number of prompts per pool.
        """
        weights = torch.tensor([self.weight(prompt) for prompt in prompts], dtype=torch.float64)
        if not 0 < count <= int((weights > 0).sum()):
            pools = Counter(self.pool(prompt) or "unseen" for prompt in prompts)
            raise ValueError(
                f"count={count}, expected at least 1 and at most {int((weights > 0).sum())}, the prompts of positive "
                f"weight; of {len(prompts)} there are {dict(pools)}"
            )
        return [prompts[i] for i in torch.multinomial(weights, count, generator=generator).tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {"solve_rates": dict(self.solve_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rates = state.get("solve_rates")
        if set(state) != {"solve_rates"} or not isinstance(rates, Mapping):
            raise ValueError(f"the state has {sorted(state)}, expected solve_rates: prompt to number")
        if any(not isinstance(k, str) or type(v) not in (int, float) or not math.isfinite(v) for k, v in rates.items()):
            raise ValueError("solve_rates holds other values, expected strings to finite numbers")
        self.solve_rates = {prompt: float(rate) for prompt, rate in rates.items()}
