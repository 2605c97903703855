"""The doctor reads the files of a config's model, and then compares its numbers, without a run."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from rlprims.cli import main
from rlprims.doctor.model import check_files
from tests import tiny


def test_the_doctor_compares_without_a_run(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["doctor", str(tmp_path / "run.yaml")]) == 0
    out = capsys.readouterr().out
    assert "vocabulary" in out
    assert "equal up to rounding" in out
    assert not (tmp_path / "run").exists()


JAMBA = importlib.util.find_spec("transformers.models.jamba.modeling_jamba")
OF_NEWER_VERSIONS = pytest.mark.skipif(
    JAMBA is None or "from_hub_with_fallback" not in Path(str(JAMBA.origin)).read_text(),
    reason="this version of transformers asks for kernels in another way, which the doctor does not read",
)


@pytest.mark.parametrize(
    ("kind", "changes", "what", "found"),
    [
        ("qwen2", {"vocab_size": 30}, "vocabulary", "30 rows of the embedding, largest token 31"),
        ("llava_next", {}, "type of the model", "a llava_next is refused: it is multimodal"),
        ("reformer", {"is_decoder": True}, "type of the model", "a reformer is refused: "),
        ("t5", {}, "type of the model", "t5: no causal language model"),
        pytest.param(
            "jamba",
            {},
            "kernels of the model",
            "causal-conv1d, mamba-ssm not installed: transformers uses slow",
            marks=OF_NEWER_VERSIONS,
        ),
        ("qwen2", {}, "kernels of the model", "none is missing"),
    ],
)
def test_the_doctor_reads_the_files_first(
    tmp_path: Path, kind: str, changes: dict[str, Any], what: str, found: str
) -> None:
    AutoConfig.for_model(kind, **changes).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    by_name = {finding.what: finding for finding in check_files(str(tmp_path))}
    assert by_name[what].found.startswith(found)
    assert by_name[what].ok == (what == "kernels of the model")
