"""Small stateful coefficients: ``value`` now, ``update`` after a step, ``state_dict`` for the checkpoint."""

from typing import Protocol


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
        self.value = state["value"]


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
        self.value = state["value"]
