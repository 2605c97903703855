"""``${...}`` in a file of settings: other settings and environment variables."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprims.runs import config as config_of_runs
from rlprims.trainer.config import Config, load_config
from rlprims.trainer.session import start


def resolved(values: dict[str, Any]) -> Any:
    return config_of_runs.resolved(values, values, "x.yaml", "")


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"a": 3, "b": "${a}"}, 3),  # a whole value keeps its type
        ({"a": [1, {"c": 2}], "b": "${a}"}, [1, {"c": 2}]),
        ({"a": None, "b": "${a}"}, None),
        ({"a": {"b": {"c": "x"}}, "b": "-${a.b.c}-${a.b.c}"}, "-x-x"),
        ({"a": "${c}!", "c": "${d}", "d": 1, "b": "${a}"}, "1!"),
        ({"b": "${oc.env:RLPRIMS_TEST}"}, "7"),  # a text, whose type the setting decides
        ({"b": "in ${oc.env:RLPRIMS_TEST}"}, "in 7"),
        ({"b": "${oc.env:RLPRIMS_NONE,8}"}, "8"),
        ({"b": "${oc.env:RLPRIMS_NONE,a/b c}"}, "a/b c"),
        ({"b": "${oc.env:RLPRIMS_TEST,8}"}, "7"),
        ({"b": r"a \${question}"}, "a ${question}"),
        ({"b": "$5 {question} $"}, "$5 {question} $"),
    ],
)
def test_references_mean_what_they_mean_in_omegaconf(
    values: dict[str, Any], found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPRIMS_TEST", "7")
    monkeypatch.delenv("RLPRIMS_NONE", raising=False)
    assert resolved(values)["b"] == found
    if find_spec("omegaconf") is not None:
        omegaconf = import_module("omegaconf").OmegaConf
        assert resolved(values) == omegaconf.to_container(omegaconf.create(values), resolve=True)


@pytest.mark.parametrize(
    ("values", "place", "reference"),
    [
        ({"a": {"b": ["${c}"]}}, "a.b", "${c}"),
        ({"a": 1, "b": "${a.c}"}, "b", "${a.c}"),
        ({"a": {"c": 1}, "b": "x ${a.d}"}, "b", "${a.d}"),
        ({"b": "${oc.env:RLPRIMS_NONE}"}, "b", "${oc.env:RLPRIMS_NONE}"),
        ({"b": "${now:%Y}"}, "b", "${now:%Y}"),
        ({"a": "${b}", "b": "${a}"}, "a", "${"),
        ({"b": "${}"}, "b", "${}"),
    ],
)
def test_a_reference_to_nothing_is_told_with_its_key(values: dict[str, Any], place: str, reference: str) -> None:
    with pytest.raises(ValueError, match="names nothing, or itself") as told:
        resolved(values)
    assert str(told.value).startswith(f"x.yaml: {place}: {reference}")
    assert "\n" not in str(told.value)


def test_settings_of_a_run(load, settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Behind ``extends`` and overrides, so that both may name and be named."""
    monkeypatch.setenv("RLPRIMS_STEPS", "9")
    settings |= {"steps": "${oc.env:RLPRIMS_STEPS}", "seed": "${evaluation.samples}", "run_dir": "${data.train}.runs"}
    config = load(settings)
    assert (config.steps, config.seed, config.run_dir) == (9, 2, Path(settings["data"]["train"] + ".runs"))
    assert load(settings, "evaluation.samples=5").seed == 5
    assert load(settings, "checkpoint.every=${steps}").checkpoint.every == 9
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({"extends": "config.yaml", "evaluation": {"samples": 6}}))
    assert load_config(tmp_path / "other.yaml").seed == 6


def test_a_stored_config_has_no_references(load, settings, console) -> None:
    """Text that looks like one, also beside letters that YAML quotes, comes back as it is."""
    settings["data"]["template"] = r"é \${question} ${seed}" + "\n{question}"
    config = load(settings | {"seed": 3, "steps": 1}, "data.eval=null")
    assert config.data.template == "é ${question} 3\n{question}"
    assert start(config, console) == 0
    again = load_config(config.run_dir / "config.yaml")
    assert again.data.template == config.data.template
    assert Config.model_validate(again.model_dump()) == again
