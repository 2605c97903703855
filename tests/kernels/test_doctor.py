"""``rlprims doctor``, and with ``--kernels``."""

import pytest
import torch

from rlprims.cli import main
from rlprims.doctor import installation
from rlprims.kernels import ACCELERATED

Row = tuple[str, str, str]


def rows(capsys: pytest.CaptureFixture[str]) -> dict[Row, list[str]]:
    """The lines of the table, by formula, kernel and device."""
    assert main(["doctor", "--kernels"]) == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    return {(cells[1], cells[2], cells[3]): cells for cells in lines if cells}


@pytest.mark.slow
def test_the_doctor_compares_every_kernel_and_says_how_to_change_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.delenv("RLPRIMS_KERNELS", raising=False)
    found = rows(capsys)
    kernels = {(name, module, device) for name, of in ACCELERATED.items() for device, module in of.modules.items()}
    assert found.keys() == kernels
    assert all(cells[0] in ("ok", "-") for cells in found.values())
    row = found["log_probs_and_entropies", "log_probs", "cpu"]
    assert (row[0], row[7]) == ("ok", "on")
    assert "RLPRIMS_KERNELS=0" in row[8]
    monkeypatch.setenv("RLPRIMS_KERNELS", "0")
    row = rows(capsys)["log_probs_and_entropies", "log_probs", "cpu"]
    assert (row[7], row[8]) == ("off", "on: RLPRIMS_KERNELS=log_probs")


def test_the_doctor_says_that_gpus_are_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda: "Some GPU"}
    for name, answer in device.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    assert installation._accelerator().found == "2 x Some GPU; rlprims itself is untried on GPUs"
