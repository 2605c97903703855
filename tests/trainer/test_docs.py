"""The tables of settings are those of the config; the tables of metrics have all that a run writes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from rich.console import Console

from rlprims.fit.config import FitConfig
from rlprims.runs.metrics import worker_metrics
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, evaluate_parts
from tools import settings_tables

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
DOCS = Path(__file__).parents[2] / "docs" / "trainer.md"


def test_the_tables_of_settings_are_of_today() -> None:
    for path in settings_tables.PAGES:
        assert path.read_text() == settings_tables.page(path), "run python -m tools.settings_tables"


def test_every_setting_is_documented_once() -> None:
    tables = DOCS.read_text().split("## Settings")[1].split("## A run directory")[0]
    tables = "".join(re.findall("<!-- settings:.*?<!-- end -->", tables, re.DOTALL))
    named = re.findall(r"^\| `([a-z_.]+)` \|", tables, re.MULTILINE)
    assert sorted(named) == sorted(name for name, _ in settings_tables.settings(Config))
    assert {"run_dir", "model.lora.rank", "ray.roles.critic", "profile.steps"} <= set(named)


@pytest.mark.parametrize("config", [Config, FitConfig])
def test_every_setting_has_a_description_and_shows_its_values(config: type[BaseModel]) -> None:
    for name, field in settings_tables.settings(config):
        assert field.description, name
        shown = settings_tables.meaning(name, field, "trainer.md")
        assert all(str(value) in shown for value in settings_tables.choices(field.annotation)), name


def test_a_row_of_the_table() -> None:
    assert settings_tables.table(Config, ["optimizer.schedule"], "trainer.md").splitlines()[-1] == (
        "| `optimizer.schedule` | constant | constant, linear or cosine; of the learning rate, after the warm-up |"
    )


def test_places_that_say_more_of_a_setting_are_there() -> None:
    known = {name for config in (Config, FitConfig) for name, _ in settings_tables.settings(config)}
    assert set(settings_tables.MORE) <= known
    for place in settings_tables.MORE.values():
        file, _, anchor = place.partition("#")
        headings = re.findall(r"^#+ (.*)$", (DOCS.parent / file).read_text(), re.MULTILINE)
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def documented_metrics() -> list[str]:
    cells = re.findall(r"^\| (`.*?`) \|", METRICS.read_text(), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(.+?)`", cell)]


def test_every_metric_of_a_run_has_its_formula(
    load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    ppo = {"preset": "ppo", "kl_in_reward": {"estimator": "k1"}}
    config = load(settings | {"algorithm": ppo, "prompts_per_generation": None})
    parts = build(config, console)
    step = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows).step()
    written = {*step.metrics, *worker_metrics(parts.workers.reports()), *evaluate_parts(config, parts, console)}
    # A word in capitals stands for any.
    known = re.compile("|".join(re.sub(r"[A-Z]{2,}", ".+", name) for name in documented_metrics()))
    assert written > {"kl_coef", "critic/loss", "explained_variance", "greedy/acc"}
    assert not {name for name in written if not known.fullmatch(name)}


def test_every_documented_metric_is_written_somewhere() -> None:
    source = "".join(path.read_text() for path in (METRICS.parents[1] / "rlprims").rglob("*.py"))
    for name in documented_metrics():
        last = [part for part in name.split("/") if not re.search(r"[A-Z]{2,}", part)][-1]
        names = f"{last}|{re.sub('_(low|high)$', '', last)}"  # the ends of an interval are made of its name
        assert re.search(rf"[\"(/]({names})[\")/]", source), name
