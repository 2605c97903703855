"""``rlprims doctor --cluster``: a run's cluster on trial, on this machine's processors or its GPUs."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from rlprims.cli import main
from rlprims.doctor.cluster import try_cluster
from rlprims.trainer.config import load_config

CLUSTER = {"training_workers": 2, "rollout_workers": 1, "engine": "vllm", "kv_cache_bytes": 64 << 20}


ON_GPUS = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: NCCL, CUDA graphs, sleep and colocation need one"
)


@pytest.mark.ray
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="CPU"),
        pytest.param(["model.device=cuda"], id="GPUs apart", marks=ON_GPUS),
        pytest.param(["model.device=cuda", "ray.colocate=true"], id="GPUs together", marks=ON_GPUS),
    ],
)
def test_every_part_works_and_is_measured(
    settings: dict[str, Any], model: Path, write_config: Callable[[dict[str, Any]], Path], overrides: list[str]
) -> None:
    config = load_config(write_config(settings | {"execution": "ray", "ray": CLUSTER}), overrides)
    findings = list(try_cluster(config, Console(file=io.StringIO())))
    found = {finding.what: finding.found for finding in findings}
    assert [finding for finding in findings if not finding.ok] == [], "slow is none of them"
    assert found["sum over 2 ranks"].startswith("64.00 MiB in ")
    assert re.match(r"60 responses, \d+ tokens in .* of the bare engine's .* \(median of 5\)", found["sampling"])
    for when in ("at the start", "after it"):
        said = found[f"log-probs of engines and ranks {when}"]
        apart = re.fullmatch(r"(\S+) nats apart at most, (\S+) on average", said)
        assert apart
        assert float(apart[2]) <= float(apart[1]) < 1e-3
    size = 4 * AutoModelForCausalLM.from_pretrained(model).num_parameters()
    assert found["sync of weights"].startswith(f"{size / 2**20:.2f} MiB to each engine")
    assert not config.run_dir.exists(), "a trial saves nothing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "add execution=ray"),
        (
            {"execution": "ray", "data": {"environment": "tests.trainer.environments.Digits"}, "verifier": None},
            "use a file of prompts",
        ),
    ],
)
def test_doctor_cluster_names_what_it_cannot_try(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    changes = {**changes, "data": settings["data"] | changes.get("data", {})}
    assert main(["doctor", "--cluster", str(write_config(settings | changes))]) == 2
    assert message in "".join(capsys.readouterr())


def test_doctor_cluster_needs_a_config(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["doctor", "--cluster", str(model)]) == 2
    assert "rlprims doctor --cluster CONFIG.yaml" in "".join(capsys.readouterr())
