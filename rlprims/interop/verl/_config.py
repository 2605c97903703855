"""verl's configuration as our hyperparameters."""

from collections.abc import Mapping
from typing import Any

from rlprims.algorithms import Use


def configured(part: Use, config: Any, settings: Mapping[str, str]) -> dict[str, Any]:
    """Values for the hyperparameters of ``part`` that ``config`` has a setting for.

    ``settings`` maps their names to verl's.
    """
    if config is None:
        return {}
    values = {ours: config.get(settings[ours], None) for ours in part.hyperparameters if ours in settings}
    return {ours: value for ours, value in values.items() if value is not None}
