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
    section = PAGE.split(f"\n## {title}")[1].split("\n## ")[0]
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

    config = yaml.safe_load((Path(verl.trainer.__file__).parent / "config" / "_generated_ppo_trainer.yaml").read_text())
    names = left_column("verl")
    assert len(names) > 70
    for name in names:
        section: Any = config
        for key in name.split("."):
            assert key in section, name
            section = section[key]


def test_trls_keys() -> None:
    from trl import GRPOConfig, GRPOTrainer

    names = left_column("TRL")
    assert len(names) > 40
    arguments = inspect.signature(GRPOTrainer).parameters.keys()
    assert set(names) <= {field.name for field in dataclasses.fields(GRPOConfig)} | arguments
