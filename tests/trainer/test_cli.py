"""The commands, as a user types them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlprims
from rlprims.cli import main
from rlprims.runs.directory import RunDirectory
from rlprims.runs.records import read_rollouts
from tests.trainer.runs import metrics_of

WriteConfig = Callable[[dict[str, Any]], Path]


@pytest.fixture
def finished(settings: dict[str, Any], write_config: WriteConfig) -> Path:
    assert main(["train", str(write_config(settings)), "steps=3"]) == 0
    return Path(settings["run_dir"])


@pytest.mark.parametrize("command", [[], ["train"], ["resume"], ["eval"], ["plot"], ["rollouts"], ["algorithms"]])
def test_help_everywhere(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    assert "usage: rlprims" in capsys.readouterr().out


def test_a_run_leaves_a_whole_directory(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()} - {".lock"}
    assert names == {"config.yaml", "environment.json", "metrics.jsonl", "rollouts", "checkpoints", "curves.png",
                     "summary.json"}  # fmt: skip
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0 <= summary["after"]["sampled/acc"] <= 1
    assert len(list((finished / "rollouts").iterdir())) == 3
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"]


def test_a_directory_that_exists_is_not_written_over(
    finished: Path, settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "metrics.jsonl").read_text()
    assert main(["train", str(write_config(settings))]) == 2
    assert "exists: continue it with 'rlprims resume" in " ".join(capsys.readouterr().err.split())
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_eval_of_a_run_repeats_its_last_evaluation(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(finished)]) == 0
    last = json.loads((finished / "summary.json").read_text())["after"]
    assert f"{last['sampled/acc']:.4g}" in capsys.readouterr().out


def test_eval_of_a_model_alone(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the models that only training needs: these do not even exist."""
    settings["algorithm"] = {"preset": "ppo", "kl_in_reward": {}}
    settings["model"] |= {"reward": "no/such/model", "reference": "no/such/model", "critic": "no/such/model"}
    assert main(["eval", str(write_config(settings)), "evaluation.samples=3"]) == 0
    out = capsys.readouterr().out
    assert "greedy/acc" in out
    told = [line for line in out.splitlines() if line.startswith("sampling")]
    assert told == ["sampling 1 x 5 responses at temperature 0", "sampling 3 x 5 responses at temperature 1"]
    assert not Path(settings["run_dir"]).exists()


def test_plot_and_rollouts(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(finished), "--out", str(tmp_path / "two.png")]) == 0
    assert (tmp_path / "two.png").stat().st_size > 10_000
    assert main(["rollouts", str(finished), "--step", "2", "--count", "3"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    trained = [row for row in read_rollouts(finished, 2) if row.status == "trained"]
    assert any("".join(row.response.split()) in shown and row.prompt in shown for row in trained)
    assert shown.count("▸score") == 3
    assert f"{len(read_rollouts(finished, 2)) - 3}moreresponses" in shown
    page = tmp_path / "page.html"
    for options, steps in (([], [1, 2, 3]), (["--step", "2"], [2])):
        assert main(["rollouts", str(finished), "--html", str(page), *options]) == 0
        data = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
        assert data
        assert [step["step"] for step in json.loads(data[1])["steps"]] == steps


def test_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    assert "dapo" in capsys.readouterr().out
    assert main(["algorithms", "dapo"]) == 0
    shown = capsys.readouterr().out
    assert "losses.clipped_surrogate(clip_high=0.28, clip_low=0.2)" in shown
    assert "arXiv:2503.14476" in shown
    assert main(["algorithms", "grpo", "dr_grpo"]) == 0
    assert "advantage.normalize_std" in capsys.readouterr().out
    assert main(["algorithms", "grpp"]) == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": {"path": "no/such/model"}}, "model.path: cannot load 'no/such/model'"),
        (  # before a model is asked for at the hub
            {"data": {"train": "no/such/file.jsonl"}, "model": {"path": "no/such/model"}},
            "no/such/file.jsonl: No such file",
        ),
        ({"replay": "no/such/run"}, "no/such/run has no recorded rollouts"),
        ({"verifier": "gsm8k"}, "verifier: cannot import 'gsm8k' (it names no module): write it as package.module."),
        ({"verifier": "..gsm8k"}, "verifier: cannot import '..gsm8k' (it names no module)"),
        ({"verifier": ""}, "verifier: cannot import '' (it names no module)"),
        ({"scoring": {"workers": 1, "preload": [""]}}, "scoring.preload: '' is not a module name"),
        ({"log_to": "nowhere"}, "log_to: nowhere: cannot import 'nowhere' (it names no module)"),
        ({"log_to": "tests.trainer.verifiers.one_number"}, "expected a class with the methods log(metrics, step) and"),
        (
            {"log_to": "tensorboard", "log_samples": 2},
            "log_samples: nothing in log_to has tables: add one of mlflow, trackio, wandb",
        ),
    ],
)
def test_mistakes_end_with_one_message_and_no_directory(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str], change: Any, expected: str
) -> None:
    assert main(["train", str(write_config(settings | change))]) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.slow
def test_a_reward_of_one_number_works_with_dapo_and_the_run_says_what_the_filter_sees(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run beside it, whose verifier says the same as ``acc``, samples, drops and learns the same."""
    assert main(["train", str(write_config(settings | {"run_dir": settings["run_dir"] + "-acc"})), "steps=1"]) == 0
    capsys.readouterr()
    changed = settings | {"verifier": "tests.trainer.verifiers.one_number"}
    assert main(["train", str(write_config(changed)), "steps=1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    note = "note: tests.trainer.verifiers.one_number returns no acc: the filter looks at scores"
    assert 0 <= said.index(note) < said.index("step 0: accuracy")
    runs = [metrics_of(Path(settings["run_dir"] + end)) for end in ("", "-acc")]
    for name in ("groups_dropped", "filter_yield", "loss", "score"):
        of = [[line[name] for line in run if line["kind"] == "train"] for run in runs]
        assert of[0] == of[1]
    assert any(line.get("groups_dropped") for line in runs[0])


def test_an_unknown_metric_is_reported_before_anything_runs(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["algorithm"]["filter"]["metric"] = "format"
    config = write_config(settings | {"verifier": "tests.trainer.verifiers.one_number"})
    assert main(["train", str(config)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "one_number returned ['scores']: write scores, or return a dict with 'format'" in said
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.slow
def test_the_console_script_finds_a_module_beside_the_file_and_finds_it_again(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path
) -> None:
    """Started from another folder, then resumed from a third."""
    (tmp_path / "my_rewards.py").write_text("def digits(response, answer):\n    return float('1' in response)\n")
    settings |= {"verifier": "my_rewards.digits", "algorithm": "rloo", "evaluation": {"before_training": False}}
    settings["data"]["eval"] = None
    script = Path(sys.executable).with_name("rlprims")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    for command in (["train", str(write_config(settings)), "steps=1", "algorithm.group_size=2"],
                    ["resume", settings["run_dir"], "steps=2"]):  # fmt: skip
        (elsewhere := tmp_path / command[0]).mkdir()
        ran = subprocess.run(
            [str(script), *command], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
    assert json.loads((Path(settings["run_dir"]) / "summary.json").read_text())["steps"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", "model.device=cuda: "), ("cuda:3", "model.device=cuda:3: "), ("gpu", "write auto, cpu, cuda or cuda:0")],
)
def test_a_device_that_is_not_here(
    settings: dict[str, Any],
    write_config: WriteConfig,
    capsys: pytest.CaptureFixture[str],
    command: str,
    device: str,
    expected: str,
) -> None:
    assert main([command, str(write_config(settings)), f"model.device={device}"]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.parametrize("package", ["wandb", "tensorboard", "mlflow", "swanlab", "trackio"])
def test_a_logger_that_is_not_installed(
    settings: dict[str, Any],
    write_config: WriteConfig,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    """Before anything is written, so that the same command runs when it is installed."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert main(["train", str(write_config(settings)), f"log_to={package}"]) == 2
    error = capsys.readouterr().err
    assert f"log_to: {package}: " in error
    extra = package in ("wandb", "tensorboard")
    assert ("pip install '.[track]' in the clone of rlprims" if extra else f"pip install {package}, or leave") in error
    assert error.count("\n") == 1
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.filterwarnings("ignore:.*no server")
def test_a_verifier_that_always_fails_is_named_and_not_the_prompts(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings["verifier"] = "tests.trainer.verifiers.has_no_server"
    settings["algorithm"]["filter"] = {"max_generation_batches": 2}
    assert main(["train", str(write_config(settings))]) == 2
    told = capsys.readouterr()
    assert "100% of the responses could not be scored and count as wrong" in told.out
    assert (
        "none of 36 responses could be scored by tests.trainer.verifiers.has_no_server: 36 raised ConnectionError; "
        "the first: 'raised ConnectionError: no server at localhost:8000'" in told.err
    )
    assert "too hard" not in told.err


def test_a_run_that_is_not_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("resume", "eval"):
        assert main([command, str(tmp_path)]) == 2
        assert "is not a run" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_trainers_in_one_directory(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = RunDirectory.open(finished)
    other.lock()
    assert main(["resume", str(finished), "steps=4"]) == 2
    assert f"is in use by process {os.getpid()}" in " ".join(capsys.readouterr().err.split())


def test_a_second_start_in_a_fresh_directory_is_refused_before_it_loads_anything(
    settings: dict[str, Any], write_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = str(write_config(settings)), Path(settings["run_dir"])
    with RunDirectory.claim(path):
        assert main(["train", config, "model.path=/nowhere"]) == 2
        assert f"{path} is in use by process {os.getpid()}" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    "before", [(), ("run",), ("run", "run/.lock")], ids=["no directory", "empty", "of a killed start"]
)
def test_a_start_that_fails_leaves_the_directory_free(
    settings: dict[str, Any], write_config: WriteConfig, tmp_path: Path, before: tuple[str, ...]
) -> None:
    """Its parents, too; and what was there stays."""
    made = tmp_path / "here"
    settings["run_dir"] = str(made / "run")
    for name in before:
        (made / name).touch() if name.endswith(".lock") else (made / name).mkdir(parents=True)
    assert main(["train", str(write_config(settings)), "model.path=/nowhere"]) == 2
    assert (made / "run").exists() == made.exists() == bool(before)
    assert not (made / "run" / ".lock").exists()


def test_a_start_that_is_interrupted_leaves_the_directory_free(
    settings: dict[str, Any], write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **options: Any) -> None:
        assert Path(settings["run_dir"]).exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlprims.trainer.session.build", interrupted)
    assert main(["train", str(write_config(settings))]) == 130
    assert not Path(settings["run_dir"]).exists()


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"rlprims {rlprims.__version__}"
