"""What changes over a run, with a state: ``update`` after a step, ``state_dict`` for the checkpoint.

Coefficients have a ``value`` for this step; :class:`Ema` moves weights.
"""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor


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
        self.value = kl_coef

    def update(self, kl: float, samples: int) -> None:
        """Nothing changes."""

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
        if target <= 0 or horizon <= 0:
            raise ValueError(f"target={target} (nats) and horizon={horizon} (samples) must be above 0")
        self.value = kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        (self.value,) = _numbers(state, "value")


class AdaptiveEntropy:
    """A coefficient of the entropy bonus that keeps the entropy up, Skywork-OR1 2025 (arXiv:2505.22312).

    After a step with mean entropy H per token the coefficient c moves by ``delta``, up if H < target and down if
    H > target, within 0 and ``max_coef``. It is applied only while H <= target: ``value``, the factor of
    ``losses.entropy`` in the next step, is c if H <= target, otherwise 0; and 0 before the first update.

    Target and delta are the paper's. The paper measures H on the rollouts of the same step; TRL, whose bounds these
    are, one step later, as here.

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
        if target <= 0 or delta <= 0:
            raise ValueError(f"target={target} (nats per token) and delta={delta} must be above 0")
        if not 0 <= entropy_coef <= max_coef:
            raise ValueError(f"entropy_coef={entropy_coef} must be from 0 to max_coef={max_coef}")
        self.value = 0.0
        self.coefficient = entropy_coef
        self.target = target
        self.delta = delta
        self.max_coef = max_coef

    def update(self, entropy: float) -> None:
        step = self.delta if entropy < self.target else -self.delta if entropy > self.target else 0.0
        self.coefficient = min(max(self.coefficient + step, 0.0), self.max_coef)
        self.value = self.coefficient if entropy <= self.target else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.coefficient = _numbers(state, "value", "coefficient")


class Ema:
    """Weights that follow others as an exponential moving average: θ' ← θ' + rate (θ − θ').

    It happens at each ``every``-th update. The average forgets with a half-life of about 0.7 every / rate updates; at
    rate 1 it is a copy that is taken anew every so often, as for a reference that is reset. The rate is the share of
    the *new* weights: what others call a decay of 0.95 is a rate of 0.05.

    It adds up in the weights' own dtype: in bfloat16, where 1 and 1.004 are neighbours, a small rate changes nothing.

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
        self.rate = rate
        self.every = every
        self.updates = 0

    @torch.no_grad()
    def update(self, average: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Count an update, and move the tensors of ``average`` if it is time, in place.

        Raises:
            ValueError: the two have other names or shapes.
        """
        if differing := sorted(average.keys() ^ weights.keys()):
            raise ValueError(f"average and weights differ in {differing[:3]}: they must be of one architecture")
        self.updates += 1
        if self.updates % self.every:
            return
        for name, followed in weights.items():
            if average[name].shape != followed.shape:
                raise ValueError(
                    f"{name}: average has shape {tuple(average[name].shape)}, weights {tuple(followed.shape)}"
                )
            if followed.is_floating_point():
                average[name].lerp_(followed.to(average[name].dtype), self.rate)

    def state_dict(self) -> dict[str, float]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.updates = int(*_numbers(state, "updates"))


def _numbers(state: dict[str, float], *names: str) -> list[float]:
    if sorted(state) != sorted(names) or not all(math.isfinite(number) for number in state.values()):
        raise ValueError(f"the state must hold finite {' and '.join(names)} and nothing else, it is {state}")
    return [state[name] for name in names]
