"""A wrong config ends before anything runs, and the message says what to write."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprims import algorithms
from rlprims.trainer.config import Config, load_config


def message(load: Callable[..., Config], values: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        load(values, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sampling.temprature=1", "did you mean 'temperature'?"),
        ("stepz=3", "did you mean 'steps'?"),
        ("ray.strategy=megatron", "ray.strategy: unknown; of verl: docs/migration.md has its names, docs"),
        ("actor_rollout_ref.actor.strategy=megatron", "docs/decisions/0009-torch-shards-the-models.md has Megatron"),
        ("steps=-3", "greater than or equal to 1, not -3"),
        ("steps=many", "not 'many'"),
        ("algorithm.policy_loss.cliphigh=0.3", "did you mean 'clip_high'?"),
        ("algorithm.policy_loss.clip_high=wide", "clip_high='wide' has the wrong type"),
        ("algorithm.policy_loss.clip_high=-1", "clip_high=-1.0, expected a number of at least 0"),
        ("algorithm.advantage=losses.reinforce", "advantage is losses.reinforce, expected a function of"),
        ("algorithm.group_size=1", "group_size is 1: every advantage would be 0"),
        ("algorithm.mini_batches=3", "not divisible by algorithm.mini_batches=3"),
        ("algorithm.preset=dap", "did you mean 'dapo'?"),
        ("algorithm.advantage=rlprims.advantage.nothing", "cannot import 'rlprims.advantage.nothing'"),
        ("sampling.temperature=0", "greedy"),
        ("verifier=no.such.function", "cannot import 'no.such.function'"),
        ("data.template=Question", "expected text with {question} in it, or chat"),
    ],
)
def test_an_error_says_what_to_write(
    load: Callable[..., Config], settings: dict[str, Any], override: str, expected: str
) -> None:
    assert expected in message(load, settings, override)


def test_all_errors_come_at_once(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    text = message(load, settings, "stepz=3", "sampling.temprature=1")
    assert "stepz" in text
    assert "temprature" in text


def test_a_missing_section_is_named(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    del settings["model"]
    assert "model: is missing: write model: ..." in message(load, settings)


def test_an_override_that_is_not_yaml_is_named(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^override 'data.system=\{a: \$\{seed\}\}': not YAML: [^\n]*$"):
        load(settings, "data.system={a: ${seed}}")


def test_overrides_reach_into_short_forms(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    config = load(settings | {"algorithm": "rloo"}, "algorithm.group_size=2", "optimizer.lr=3e-4")
    assert config.algorithm.name == "rloo"
    assert config.algorithm.group_size == 2
    assert config.optimizer.lr == 3e-4  # YAML 1.1 reads 3e-4 as text


def test_the_resolved_config_loads_to_itself(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    config = load(settings)
    assert load(yaml.safe_load(config.to_yaml())) == config


def test_short_names_are_those_that_the_tools_print(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    short = load(settings, "algorithm.aggregation=losses.seq_mean_token_mean", "verifier=rewards.verifiers.gsm8k")
    assert short.algorithm.aggregation.path == "rlprims.losses.seq_mean_token_mean"
    assert short.verifier.path == "rlprims.rewards.verifiers.gsm8k"


def test_a_module_beside_the_file_is_found_after_all_that_is_installed(
    load: Callable[..., Config], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine_beside.py").write_text("def reward(response, answer):\n    return float(answer in response)\n")
    (tmp_path / "einops.py").write_text("raise SystemExit('a file took the place of a package')\n")
    config = load(settings | {"verifier": "mine_beside.reward"})
    assert config.verifier.fn("72.", "72") == 1.0
    assert sys.path[-1] == str(tmp_path)
    assert importlib.util.find_spec("einops").origin != str(tmp_path / "einops.py")
    assert config.modules == (tmp_path,)
    # The resolved settings lie elsewhere, and still find it.
    elsewhere = tmp_path / "run" / "config.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(config.to_yaml())
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    del sys.modules["mine_beside"]
    assert load_config(elsewhere).verifier.fn("7", "72") == 0.0


def test_extends_changes_single_settings_and_takes_the_algorithm_whole(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(settings))
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nalgorithm: {preset: rloo}\nsampling: {temperature: 0.7}\n")
    config = load_config(child)
    assert config.algorithm.name == "rloo"
    assert config.algorithm.filter is None
    assert (config.sampling.temperature, config.sampling.max_new_tokens) == (0.7, 8)


def test_modules_are_found_beside_the_file_and_then_beside_those_that_it_extends(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folders = [tmp_path / name for name in ("child", "parent", "grandparent")]
    for folder, text in zip(folders, ("extends: ../parent/b.yaml", "extends: ../grandparent/c.yaml", ""), strict=True):
        folder.mkdir()
        (folder / f"{'abc'[folders.index(folder)]}.yaml").write_text(text or yaml.safe_dump(settings))
        if folder != folders[0]:
            (folder / "mine_above.py").write_text(f"def {folder.name}(response, answer):\n    return 1.0\n")
    config = load_config(folders[0] / "a.yaml", ["verifier=mine_above.parent"])
    assert config.modules == tuple(folders)
    assert sys.path[-3:] == list(map(str, folders))
    with pytest.raises(ValueError, match="No module named 'mine_nowhere'") as refused:
        load_config(folders[0] / "a.yaml", ["verifier=mine_nowhere.reward"])
    assert str(refused.value).endswith(f"; searched: installed packages, {', '.join(map(str, folders))}")
    del sys.modules["mine_above"]


def test_deterministic_is_refused_with_engines(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="deterministic: true needs execution: local"):
        load(settings, "deterministic=true", "execution=ray")


def test_files_that_are_no_config(tmp_path: Path) -> None:
    names = ("broken.yaml", "empty.yaml", "itself.yaml", "a.yaml", "b.yaml")
    broken, empty, itself, a, b = (tmp_path / name for name in names)
    broken.write_text("steps: [1,")
    empty.write_text("")
    itself.write_text("extends: itself.yaml")
    a.write_text("extends: b.yaml")
    b.write_text("extends: a.yaml")
    of = {
        broken: "not YAML",
        empty: "mapping of settings",
        itself: "itself.yaml: extends itself.yaml, which extends it",
        a: "b.yaml: extends a.yaml, which extends it",
        tmp_path / "none.yaml": "No such file",
    }
    for path, expected in of.items():
        with pytest.raises(ValueError, match=expected):
            load_config(path)


def test_a_hostile_tag_is_not_obeyed(tmp_path: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(f"steps: !!python/object/apply:os.system ['touch {tmp_path}/owned']")
    with pytest.raises(ValueError, match="not YAML"):
        load_config(path)
    assert not (tmp_path / "owned").exists()


def test_warnings_name_the_trap(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    assert load(settings).warnings() == []
    assert "learns to be short" in load(settings, "algorithm.filter=null").warnings()[0]
    assert "filter on acc or scores" in load(settings, "algorithm.filter.metric=shaped_scores").warnings()[0]
    assert load(settings, "max_staleness=1").warnings()[0].endswith("or use a loss that reads rollout_log_probs")
    corrected = ("max_staleness=1", "algorithm.corrections=[rlprims.corrections.tis]")
    assert load(settings, *corrected).warnings() == []
    assert load(settings, "sampling.top_p=0.9").warnings() == []
    assert "responses end at" in load(settings, "sampling.max_new_tokens=6").warnings()[0]


def test_an_override_needs_a_value(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"'model\.device': write key\.subkey=value"):
        load(settings, "model.device")


def test_a_preset_in_a_librarys_dialect(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    algorithm = {"preset": "grpo", "dialect": "verl-0.9", "group_size": 4, "policy_loss": {"clip_high": 0.3}}
    config = load(settings | {"algorithm": algorithm})
    assert config.algorithm == algorithms.grpo(dialect="verl-0.9").replace(group_size=4, policy_loss={"clip_high": 0.3})
    assert config.algorithm.policy_loss.hyperparameters["dual_clip"] == 3.0
    assert load(yaml.safe_load(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({"preset": "grpo", "dialect": "verl-1"}, "dialect='verl-1', expected one of verl-0.9, trl-1.16"),
        ({"preset": "remax", "dialect": "trl-1.16"}, "remax has no dialect 'trl-1.16'; its presets are grpo, dr_grpo"),
        ({"preset": "gdpo", "components": []}, "name the verifier's columns there"),
        ({"preset": "dppo", "corrections": ["rlprims.corrections.tis"]}, "corrects for the same gap again"),
        ({"preset": "grpo", "group_size": True}, "expected a number, a text or a function, got True"),
    ],
)
def test_config_refuses_algorithms_that_cannot_run(
    load: Callable[..., Config], settings: dict[str, Any], algorithm: dict[str, Any], expected: str
) -> None:
    assert expected in message(load, settings | {"algorithm": algorithm})


def test_data_that_no_stage_makes_is_named(load: Callable[..., Config], settings: dict[str, Any]) -> None:
    made = [
        {"preset": "gdpo", "components": ["acc", "format"]},
        {"preset": "dapo", "max_length": 8, "buffer_length": 4, "filter": {"keep": "rlprims.filters.completed_groups"}},
        {"preset": "ppo", "score_shaping": [{"fn": "rewards.truncation_penalty", "penalty": 0.5}]},
    ]
    for algorithm in made:
        assert not [line for line in load(settings | {"algorithm": algorithm}).warnings() if "does not compute" in line]
    token_baseline = {"preset": "opo", "advantage": "rlprims.advantage.optimal_token_baseline"}
    assert "needs ['sum_pi_squared'], which nothing in a run computes" in message(
        load, settings | {"algorithm": token_baseline}
    )
