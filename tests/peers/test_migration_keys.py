"""The left columns of docs/migration.md: verl's and TRL's own names."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.peers
PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()


def left_column(title: str) -> list[str]:
    """Its names; one without a dot has the prefix of the one before it in its cell."""
    section = re.split(r"\n###? ", re.split(rf"\n###? {title}.*\n", PAGE)[1])[0]
    names = []
    for cell in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE):
        prefix = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            full = name if "." in name else prefix + name
            prefix = full.rpartition(".")[0] + "." if "." in full else ""
            names.append(full.replace("a.r.", "actor_rollout_ref."))
    return names


def test_verls_keys() -> None:
    import verl.trainer

    folder = Path(verl.trainer.__file__).parent / "config"
    files = ("_generated_ppo_trainer.yaml", "_generated_ppo_megatron_trainer.yaml")
    configs = [yaml.safe_load((folder / file).read_text()) for file in files]
    names = left_column("verl")
    assert len(names) > 70
    of_roles = [name for name in left_column("Megatron in verl") if "." in name]
    names += [f"actor_rollout_ref.{name if 'rollout.' in name else f'actor.{name}'}" for name in of_roles]
    for name in names:
        assert any(has(config, name.split(".")) for config in configs), name


def has(section: Any, keys: list[str]) -> bool:
    return not keys or (keys[0] in section and has(section[keys[0]], keys[1:]))


def test_trls_keys() -> None:
    from trl import GRPOConfig, GRPOTrainer

    names = left_column("TRL")
    assert len(names) > 40
    arguments = inspect.signature(GRPOTrainer).parameters.keys()
    assert set(names) <= {field.name for field in dataclasses.fields(GRPOConfig)} | arguments
