"""verl's configuration as our hyperparameters."""

from collections.abc import Mapping
from typing import Any

from rlprims.algorithms import Use


def configured(part: Use, config: Any, knobs: Mapping[str, str]) -> dict[str, Any]:
    """Values for the hyperparameters of ``part`` that ``config`` has a setting for; ``knobs`` maps ours to its name."""
    if config is None:
        return {}
    values = {ours: config.get(knobs[ours], None) for ours in part.hyperparameters if ours in knobs}
    return {ours: value for ours, value in values.items() if value is not None}
