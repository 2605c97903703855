"""The peers, imported and never copied; one that is not installed is left out with a line."""

import importlib
from functools import cache
from typing import Any


@cache
def peer(module: str) -> Any | None:
    """The module, or None."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        print(f"left out, cannot be imported: {module} ({error})")
        return None


def verl() -> Any | None:
    return peer("verl.trainer.ppo.core_algos")


def verl_actor(**settings: float) -> Any | None:
    """verl's configuration of a policy loss, or None."""
    configs = peer("verl.workers.config")
    if configs is None:
        return None
    return configs.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)


def trl() -> Any | None:
    return peer("trl.trainer.grpo_trainer")


def torchrl() -> Any | None:
    return peer("torchrl.objectives.value.functional")
