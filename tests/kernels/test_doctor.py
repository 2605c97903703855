"""``rlprims doctor --gpu``, whose CPU half runs everywhere."""

import json
from pathlib import Path

import pytest
import torch

from rlprims.cli import main
from rlprims.doctor import gpu, installation
from rlprims.execution.local import LocalExecution
from rlprims.kernels import ACCELERATED


@pytest.mark.slow
def test_the_doctor_tries_a_device_and_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    padded, log_probs = [], LocalExecution.log_probs
    monkeypatch.setattr(LocalExecution, "log_probs", lambda *x, **how: padded.append(how) or log_probs(*x, **how))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setenv("RLPRIMS_KERNELS", "linear_log_probs")
    assert main(["doctor", "--gpu", "sampling.max_new_tokens=4", "model.device=cpu"]) == 0
    lines = json.loads(Path("doctor-gpu.json").read_text())
    found = {line["what"]: line for line in lines}
    for name, of in ACCELERATED.items():
        is_on = of.modules["cpu"] == "linear_log_probs"
        meaning = found[f"kernel {name} beside its formula"]["note"]
        assert meaning == ("on; RLPRIMS_KERNELS=0: off" if is_on else "off; RLPRIMS_KERNELS=log_probs: on")
    for dtype in ("float32", "bfloat16"):
        assert found[f"{dtype}: log-probs beside the sampler's"]["ok"]
        assert found[f"{dtype}: log-probs beside those with padding"]["ok"]
        assert found[f"{dtype}: the same step twice"]["found"] == "the same bits"  # as it is a CPU
    assert found["bfloat16, deterministic: true"]["ok"]
    assert "32 rows, " in found["float32: sampling"]["found"]
    assert sum("plain" in how for how in padded) == 2  # it is shown once for each dtype
    page, shown = Path("doctor-gpu.md").read_text(), capsys.readouterr().out
    assert all(line["what"] in page and line["what"] in shown for line in lines)


def test_a_model_without_a_config_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpu", "some/model"]) == 2
    assert "takes CONFIG.yaml or key=value, not some/model" in capsys.readouterr().err


@pytest.mark.slow
def test_an_error_is_a_finding_and_the_rest_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu.made_config(tmp_path, ["sampling.max_new_tokens=4", "model.device=cpu"])

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(gpu, "_measured", fails)
    found = {line.what: line for line in gpu.try_gpu(config, None)}
    assert found["in float32"].ok is False
    assert found["in float32"].found == "RuntimeError: CUDA error: an illegal memory access"
    assert "Ray and vLLM on this card" in found


def test_the_doctor_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda: "Some GPU"}
    for name, answer in device.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert installation._accelerator().found == "2 x Some GPU: rlprims doctor --gpu tries it"
