"""Small objects with a state: adaptive coefficients of the KL and the entropy, and a moving average of weights.

Call ``update`` after each step, and save ``state_dict``. A coefficient has its ``value`` for the next step.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rlprims.masking import check_above, check_at_least, check_finite, check_range


class KLController(Protocol):
    """A coefficient of the KL penalty."""

    value: float

    def update(self, kl: float, samples: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """A constant coefficient.

    >>> FixedKL(kl_coef=0.05).value
    0.05
    """

    def __init__(self, *, kl_coef: float = 0.001) -> None:
        check_finite(kl_coef=kl_coef)
        self.value = kl_coef

    def update(self, kl: float, samples: int) -> None:
        """Does nothing: the coefficient is constant."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        (self.value,) = _numbers(state, "value")


class AdaptiveKL:
    """Proportional control of the KL towards a target, Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.

    After n samples with mean KL: β ← β (1 + clip(KL / target − 1, ±0.2) n / horizon).

    >>> beta = AdaptiveKL(kl_coef=0.2, target=6.0, horizon=10_000)
    >>> beta.update(kl=12.0, samples=500)
    >>> round(beta.value, 4)
    0.202
    """

    def __init__(self, *, kl_coef: float = 0.2, target: float = 6.0, horizon: int = 10_000) -> None:
        check_above(0, target=target, horizon=horizon)
        check_finite(kl_coef=kl_coef)
        self.value, self.target, self.horizon = kl_coef, target, horizon

    def update(self, kl: float, samples: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        (self.value,) = _numbers(state, "value")


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that keeps the entropy near a target, Skywork-OR1 2025 (arXiv:2505.22312).

    After a step with mean entropy H per token the coefficient c grows by ``delta`` if H < target and shrinks by
    ``delta`` if H > target, within 0 and ``max_coef``. ``value`` multiplies ``losses.negative_entropy`` in the next
    step: it is c if H <= target, else 0, and it is 0 before the first update.

    Target and delta are the paper's, the bounds are TRL's. The paper measures H on the rollouts of the same step; TRL
    and this class use it one step later.

    >>> coefficient = AdaptiveEntropy(target=0.2, delta=0.005)
    >>> for entropy in (0.1, 0.15, 0.3):
    ...     coefficient.update(entropy)
    ...     print(coefficient.value)
    0.005
    0.01
    0.0
    """

    def __init__(
        self, *, entropy_coef: float = 0.0, target: float = 0.2, delta: float = 0.005, max_coef: float = 1.0
    ) -> None:
        check_above(0, target=target, delta=delta)
        check_at_least(0, max_coef=max_coef)
        check_range(0, max_coef, entropy_coef=entropy_coef)
        self.value, self.coefficient, self.max_coef = 0.0, entropy_coef, max_coef
        self.target, self.delta = target, delta

    def update(self, entropy: float) -> None:
        step = self.delta if entropy < self.target else -self.delta if entropy > self.target else 0.0
        self.coefficient = min(max(self.coefficient + step, 0.0), self.max_coef)
        self.value = self.coefficient if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.coefficient = _numbers(state, "value", "coefficient")


class Ema:
    """An exponential moving average θ' of weights θ: θ' ← θ' + rate (θ − θ') at each ``every``-th update.

    The rate is the share of the *new* weights: a decay of 0.95 in other libraries is a rate of 0.05. At rate 1 the
    average is a plain copy, which suits a reference model that is reset every few steps. The sum is in the dtype of the
    weights: bfloat16 has no number between 1 and 1.0078, so there a small rate changes nothing.

    >>> average, weights = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    >>> ema = Ema(rate=0.5, every=2)
    >>> for _ in range(4):
    ...     ema.update(average, weights)
    ...     print(average["w"].item())
    0.0
    0.5
    0.5
    0.75
    """

    def __init__(self, *, rate: float = 0.05, every: int = 1) -> None:
        if not 0 < rate <= 1 or every < 1:
            raise ValueError(f"rate={rate} and every={every}, expected rate in (0, 1] and every at least 1")
        self.rate, self.every, self.updates = rate, every, 0

    @torch.no_grad()
    def update(self, average: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Count an update; at each ``every``-th one change the tensors of ``average`` in place.

        Raises:
            ValueError: the names or shapes of ``average`` and ``weights`` differ.
        """
        if differing := sorted(average.keys() ^ weights.keys()):
            raise ValueError(f"only one of average and weights has {differing[:3]}, expected the same names")
        self.updates += 1
        if self.updates % self.every:
            return
        for name, weight in weights.items():
            own = average[name]
            if own.shape != weight.shape:
                raise ValueError(f"{name} of average has shape {tuple(own.shape)}, expected {tuple(weight.shape)}")
            if weight.is_floating_point():
                own.lerp_(weight.to(own.dtype), self.rate)

    def state_dict(self) -> dict[str, float]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.updates = int(*_numbers(state, "updates"))


def _numbers(state: dict[str, float], *names: str) -> list[float]:
    if sorted(state) != sorted(names) or not all(math.isfinite(number) for number in state.values()):
        raise ValueError(f"the state is {state}, expected finite {' and '.join(names)} and nothing else")
    return [state[name] for name in names]
