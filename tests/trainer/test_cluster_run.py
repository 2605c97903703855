"""A run on Ray from the command line: as the local one. Runs with a cluster of their own are in test_cluster_faults."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rlprims.plan.memory import plan, total
from rlprims.plan.sizes import Prompts
from rlprims.runs.steps import StepResult, train
from rlprims.trainer.config import Config
from rlprims.trainer.loop import Trainer
from rlprims.trainer.session import build
from tests.trainer.runs import metrics_of
from tests.trainer.shared_cluster import rlprims

pytestmark = pytest.mark.ray
CLUSTER = {
    "training_workers": 2,
    "rollout_workers": 1,
    "engine": "hf",
    "call_timeout": 120.0,
    "training_timeout": 120.0,
}
VLLM = ("ray.engine=vllm", f"ray.kv_cache_bytes={64 << 20}")


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"execution": "ray", "ray": CLUSTER, "optimizer": {"lr": 1e-4, "eps": 1e-4}}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("max_staleness=1",), marks=pytest.mark.release),
        pytest.param(
            ("sampling.top_p=0.8", "sampling.top_k=20", "stream=true", *VLLM),
            marks=pytest.mark.release,
        ),
        pytest.param(
            (
                "evaluation.sampling={temperature: 0.7, top_k: 20}",
                "evaluation.sets={short: {file: '${data.eval}', limit: 2, samples: 3}}",
                "evaluation.sets.short.sampling={top_p: 0.5, top_k: 9}",
                "evaluation.sets.short.verifier=tests.trainer.verifiers.one_number",
                "steps=1",
                *VLLM,
            ),
            marks=pytest.mark.release,
        ),
        (
            "data.environment=tests.trainer.environments.Digits",
            *(
                "verifier=null",
                "episode_limits.turns=3",
                "stream=true",
                "max_staleness=1",
                "steps=2",
                "audit=true",
                "ray.training_workers=1",
                "ray.engine=vllm",
                f"ray.kv_cache_bytes={64 << 20}",
            ),
        ),
    ],
    ids=[
        "one ahead",
        "streamed truncated responses of vLLM",
        "evaluations of their own in vLLM",
        "streamed episodes of several turns in vLLM, one batch ahead",
    ],
)
def test_the_metrics_are_those_of_one_process(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path, changes: tuple[str, ...]
) -> None:
    config = write_config(settings)
    for name in ("ray", "local"):
        where = (f"run_dir={tmp_path / name}", f"execution={name}")
        rlprims("train", config, *where, *changes)
    audits = [tmp_path / name / "audit.json" for name in ("ray", "local") if "audit=true" in changes]
    assert len({json.loads(path.read_text())["stages"]["advantages"]["said"] for path in audits}) == bool(audits)
    pairs = zip(metrics_of(tmp_path / "ray"), metrics_of(tmp_path / "local"), strict=True)
    for ours, theirs in pairs:
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.release
def test_an_ended_run_that_gets_more_steps_goes_on_with_its_batch_ahead(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Six steps are three and three more, line by line; each batch but the first has samples of older weights."""
    config = write_config(settings | {"max_staleness": 1})
    rlprims("train", config, f"run_dir={tmp_path / 'whole'}")
    rlprims("train", config, f"run_dir={tmp_path / 'parts'}", "steps=3")
    (tmp_path / "parts" / ".lock").unlink()  # this process holds it still
    rlprims("resume", tmp_path / "parts", "steps=6")
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    steps = [line for line in metrics_of(tmp_path / "parts") if line["kind"] == "train"]
    assert [line["staleness_max"] > 0 for line in steps] == [False, True, True, True, True, True]


@pytest.mark.release
def test_groups_go_on_through_updates(
    settings: dict[str, Any], write_config: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """Two updates of staleness; after a resume the groups that were being sampled begin again."""
    ahead = (
        "max_staleness=2",
        "stream=true",
        "ray.training_workers=1",
        "ray.engine=vllm",
        f"ray.kv_cache_bytes={64 << 20}",
    )
    rlprims("train", write_config(settings), "steps=3", *ahead)
    (tmp_path / "run" / ".lock").unlink()  # this process holds it still
    rlprims("resume", tmp_path / "run", "steps=5")
    steps = [line for line in metrics_of(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(line["staleness_max"] for line in steps) in (1, 2)
    samples = [
        (row["step"], row["sample_id"])
        for path in sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
        for row in map(json.loads, path.read_text().splitlines())
    ]
    trained = [sample for _, sample in samples]
    assert len(trained) == len(set(trained)), "a sample is recorded once"


def test_episodes_go_on_through_updates(
    settings: dict[str, Any], load: Callable[..., Config], console: Console
) -> None:
    """Turns of one episode are drawn by several weights, and each token knows which.

    The learning rate is so small that the log-probs of all weights are equal: those of each turn came back to its
    tokens.
    """
    config = load(
        settings | {"verifier": None, "episode_limits": {"turns": 3}, "optimizer": {"lr": 1e-12}},
        "data.environment=tests.trainer.environments.SlowDigits",
        *("data.eval=null", "steps=6", "max_staleness=2", "stream=true"),
        *("ray.training_workers=1", "ray.engine=vllm", f"ray.kv_cache_bytes={64 << 20}"),
    )
    parts, steps = build(config, console), list[StepResult]()
    with closing(parts.execution):
        trainer = Trainer(config, parts.execution, parts.tokenizer, parts.training.rows)
        train(trainer, [lambda _, step: steps.append(step)])
    of_several = 0
    for step in steps:
        batch, mask = step.batch, step.batch["response_mask"]
        assert len(batch["group"].unique()) == 4
        torch.testing.assert_close(batch["old_log_probs"][mask], batch["rollout_log_probs"][mask], atol=1e-4, rtol=0)
        for sample in batch["sample_id"].unique():
            rows = batch["sample_id"] == sample
            versions = batch["versions"][rows][mask[rows]]
            assert torch.equal(versions, versions.sort().values), "weights do not become older"
            assert 0 <= step.number - versions[0] <= 2
            of_several += len(versions.unique()) > 1
    assert of_several > 0
    samples = torch.cat([step.batch["sample_id"].unique() for step in steps])
    assert len(samples) == len(samples.unique()), "an episode is trained on once"


@pytest.mark.release
def test_processes_without_a_model_are_as_large_as_a_plan_says(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    load: Callable[..., Config],
    tmp_path: Path,
) -> None:
    """The tests' model is nothing beside Python, torch, transformers, Ray and vLLM."""
    changes = ("steps=2", "ray.engine=vllm", f"ray.kv_cache_bytes={16 << 20}", "model.device=cpu")
    rlprims("train", write_config(settings), *changes)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    planned = plan(load(settings, *changes), Prompts(10, 10))
    for process, size in (("training_0", planned.peak), ("rollout_0", total(planned.engine))):
        measured = max(line.get(f"memory/{process}", 0.0) for line in lines)
        assert size / 2**30 == pytest.approx(measured, rel=0.25), process


def test_shards_are_copied_to_a_url_and_a_run_goes_on_from_there(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks, engine and driver have the model from a url, too; the run's own disk is lost."""
    monkeypatch.setenv("RLPRIMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    settings["model"]["path"] = f"file://{settings['model']['path']}"
    settings |= {"steps": 2, "evaluation": {"every": 9, "before_training": False, "limit": 2, "samples": 1}}
    settings["checkpoint"] = {"every": 1, "keep": 1}
    settings["ray"] = {**CLUSTER, "engine": "vllm", "kv_cache_bytes": 64 << 20}
    config = write_config(settings)
    rlprims("train", config, f"run_dir={tmp_path / 'whole'}")
    url = f"file://{tmp_path}/bucket/run"
    rlprims("train", config, f"run_dir={tmp_path / 'broken'}", "steps=1", f"checkpoint.copy_to={url}")
    there = tmp_path / "bucket/run/step_000001/checkpoints/step_000001"
    shards = sorted(path.name for path in (there / "policy_shards").glob("*.safetensors"))
    assert len(shards) == 2, shards
    here = tmp_path / "broken/checkpoints/step_000001"
    names = [{path.relative_to(of) for path in of.rglob("*") if path.is_file()} for of in (here, there)]
    assert names[0] == names[1]
    shutil.rmtree(tmp_path / "broken")
    rlprims("resume", url, "steps=2")
    lines = [[line for line in metrics_of(run) if line["kind"] == "train"] for run in (Path("runs/run"), Path("whole"))]
    for line in lines[0]:
        assert line.pop("failed_copies") == 0
    assert [line["step"] for line in lines[0]] == [1, 2]
    for ours, theirs in zip(*lines, strict=True):
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5, nan_ok=True)
    assert [path.name for path in (tmp_path / "bucket/run").iterdir()] == ["step_000002"]
