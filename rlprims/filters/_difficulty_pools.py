"""See :class:`DifficultyPools`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DifficultyPools:
    """Prompts by how often they were solved last time, and draws that prefer some pools to others.

    A pool has a least solve rate and a weight. A prompt belongs to the pool with the largest least rate that its own
    reaches; one that was not seen yet has weight 1. With weight 0 a pool is never drawn from again, so
    ``{"open": (0.0, 1.0), "mastered": (1.0, 0.0)}`` retires a prompt as soon as all its responses are right.

    The solve rates are the state, and JSON; the pools are configuration.

    Args:
        pools: name to (least solve rate, weight).

    >>> pools = DifficultyPools({"hard": (0.0, 1.0), "normal": (0.2, 2.0), "easy": (0.8, 0.0)})
    >>> pools.observe({"1+1": 1.0, "17*23": 0.5})
    >>> pools.pool("1+1"), pools.pool("17*23"), pools.pool("unseen")
    ('easy', 'normal', None)
    >>> sorted(pools.draw(["1+1", "17*23", "unseen"], 2, generator=torch.Generator().manual_seed(0)))
    ['17*23', 'unseen']
    """

    def __init__(self, pools: Mapping[str, tuple[float, float]]) -> None:
        if not pools or any(not math.isfinite(least) or not 0 <= w < math.inf for least, w in pools.values()):
            raise ValueError(f"pools={pools!r} needs names with (least solve rate, weight), finite, no weight negative")
        self.pools = dict(sorted(pools.items(), key=lambda item: -item[1][0]))
        self.solve_rates: dict[str, float] = {}

    def pool(self, prompt: str) -> str | None:
        """The prompt's pool, None if it was not seen; below every least rate it is in the lowest."""
        if prompt not in self.solve_rates:
            return None
        rate = self.solve_rates[prompt]
        return next((name for name, (least, _) in self.pools.items() if rate >= least), list(self.pools)[-1])

    def weight(self, prompt: str) -> float:
        """How likely a draw is to take the prompt, beside the weights of the others."""
        pool = self.pool(prompt)
        return 1.0 if pool is None else self.pools[pool][1]

    def observe(self, solve_rates: Mapping[str, float]) -> None:
        """Note each prompt's mean accuracy in the last batch; it replaces the one before."""
        wrong = [prompt for prompt, rate in solve_rates.items() if not math.isfinite(rate)]
        if wrong:
            raise ValueError(f"the solve rate of {wrong[0]!r} is {solve_rates[wrong[0]]}: leave unknown ones out")
        self.solve_rates.update({prompt: float(rate) for prompt, rate in solve_rates.items()})

    def draw(self, prompts: Sequence[str], count: int, *, generator: torch.Generator) -> list[str]:
        """``count`` different prompts, in random order, each as likely as its weight says.

        Raises:
            ValueError: fewer than ``count`` have a positive weight; it says how many each pool holds.
        """
        weights = torch.tensor([self.weight(prompt) for prompt in prompts], dtype=torch.float64)
        if not 0 < count <= int((weights > 0).sum()):
            held = Counter(self.pool(prompt) or "unseen" for prompt in prompts)
            raise ValueError(
                f"count={count} needs at least 1 and at most {int((weights > 0).sum())}, the prompts of positive "
                f"weight; of {len(prompts)} there are {dict(held)}"
            )
        return [prompts[i] for i in torch.multinomial(weights, count, generator=generator).tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {"solve_rates": dict(self.solve_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rates = state.get("solve_rates")
        if set(state) != {"solve_rates"} or not isinstance(rates, Mapping):
            raise ValueError(f"the state has {sorted(state)}, needs solve_rates: prompt to number")
        if any(not isinstance(k, str) or type(v) not in (int, float) or not math.isfinite(v) for k, v in rates.items()):
            raise ValueError("solve_rates must map strings to finite numbers")
        self.solve_rates = {prompt: float(rate) for prompt, rate in rates.items()}
