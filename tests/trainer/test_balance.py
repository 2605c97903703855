"""Runs of a mixture of experts with ``model.router_aux_loss_coef``, and the note about one that is off."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.trainer.runs import metrics_of, rlprims


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_two_steps_with_it_and_two_without(
    settings: dict[str, Any],
    write_config: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    path = tiny.save_mixture(tmp_path / kind, kind, output_router_logits=True, router_aux_loss_coef=0.25)
    settings["model"]["path"] = str(path)
    note = f"note: the load-balancing loss of {path} is off; model.router_aux_loss_coef=0.25 trains with it"
    run = {name: {**settings, "run_dir": str(tmp_path / name)} for name in ("on", "off")}
    rlprims("train", write_config(run["on"]), "steps=2", "model.router_aux_loss_coef=0.25")
    assert "load-balancing" not in capsys.readouterr().out
    rlprims("train", write_config(run["off"]), "steps=2")
    assert note in capsys.readouterr().out
    on, off = ([x for x in metrics_of(tmp_path / name) if x["kind"] == "train"] for name in ("on", "off"))
    assert all(2 < line["router_aux_loss"] < 8 for line in on)
    assert on[0]["loss"] == pytest.approx(off[0]["loss"] + 0.25 * on[0]["router_aux_loss"], rel=1e-4)
    assert on[1]["loss"] != pytest.approx(off[1]["loss"], rel=1e-3)
    assert not any("router_aux_loss" in line for line in off)
