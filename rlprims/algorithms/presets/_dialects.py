"""Dialects: the settings with which a preset computes the numbers of another library.

Each entry of ``_dialects.json`` changes the preset so that advantages and loss equal the library's. They still differ
on some batches by design: here a group of equal rewards gets exactly 0, log-ratios are clamped to ±20, KL estimates are
not capped, and a response without tokens has no loss. Filters, penalties and group sizes are not part of a dialect,
except that they are removed if the library has none. What cannot be reproduced here has no entry: NeMo-RL's GRPO
divides by a leave-one-out std, which can be 0, and verl's Clip-Cov does not draw the tokens that PPO clips. SkyRL's
recorded numbers do not determine its DPPO thresholds exactly. prime-rl's defaults of 2026-08-21 are DPPO and a KL term
to the sampler; since 2026-09-18 (its pull requests 3418 and 3586) they are its "IPO" at 0.3, without that term. Its KL
is 1e-3 log²ρ, and k2 is half the square.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeAlias

from rlprims._json import beside
from rlprims.algorithms._algorithm import Algorithm

Dialect: TypeAlias = Literal[
    "verl-0.9",
    "trl-1.16",
    "openrlhf-0.11",
    "nemo-rl-2026.08",
    "skyrl-2026.08",
    "slime-2026.08",
    "areal-2026.05",
    "prime-rl-2026.08",
    "prime-rl-2026.09",
]
P = ParamSpec("P")

_DIALECTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = beside(__file__, "_dialects.json")
DIALECTS = {name: tuple(presets) for name, presets in _DIALECTS.items()}
"""The presets of each dialect."""


def in_dialects(preset: Callable[P, Algorithm]) -> Callable[P, Algorithm]:
    """The preset with the settings of the library that its argument ``dialect`` names.

    Raises:
        ValueError: an unknown dialect, or a dialect without this preset.
    """

    @wraps(preset)
    def in_dialect(*args: P.args, **kwargs: P.kwargs) -> Algorithm:
        algorithm, dialect = preset(*args, **kwargs), kwargs.get("dialect")
        if dialect is None:
            return algorithm
        if dialect not in _DIALECTS:
            raise ValueError(f"dialect={dialect!r}, expected one of {', '.join(_DIALECTS)}")
        presets = _DIALECTS[str(dialect)]
        if algorithm.name not in presets:
            raise ValueError(f"{algorithm.name} has no dialect {dialect!r}; its presets are {', '.join(presets)}")
        return algorithm.replace(**presets[algorithm.name])

    return in_dialect
