"""Hyperparameters from verl's configuration."""

from collections.abc import Mapping
from typing import Any

from rlprims.algorithms import Use


def configured(part: Use, config: Any, settings: Mapping[str, str]) -> dict[str, Any]:
    """The values in ``config`` for the hyperparameters of ``part``.

    ``settings`` maps names of hyperparameters to names of verl's settings.
    """
    if config is None:
        return {}
    values = {name: config.get(settings[name], None) for name in part.hyperparameters if name in settings}
    return {name: value for name, value in values.items() if value is not None}
