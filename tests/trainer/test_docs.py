"""The table of settings is the config, no more and no less; the tables of metrics have all that a run writes."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from rlprims.algorithms import Algorithm, Use
from rlprims.execution import LoraConfig
from rlprims.runs.metrics import worker_metrics
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build, evaluate_parts

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
DOCS = Path(__file__).parents[2] / "docs" / "trainer.md"


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel) and inner not in (Algorithm, Use):
            yield from settings(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
            if inner == LoraConfig | None:  # a section of its own, which need not be there
                yield from settings(LoraConfig, f"{prefix}{name}.")


def test_every_setting_is_documented() -> None:
    table = DOCS.read_text().split("## Settings")[1].split("`algorithm` in full")[0]
    assert sorted(re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE)) == sorted(settings(Config))


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
