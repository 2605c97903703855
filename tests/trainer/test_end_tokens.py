"""A model whose parts disagree about the end of a response is warned of, by the doctor and when a run begins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlprims.cli import main
from rlprims.doctor.installation import check_end_tokens
from rlprims.trainer.config import Config
from rlprims.trainer.session import build
from tests import tiny

CHATML = (
    "{% for message in messages %}{{ '<answer>' + message['content'] + '</answer>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save_model(tmp_path / "model")


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_model_that_agrees_with_itself_is_ok(folder: Path) -> None:
    finding = check_end_tokens(str(folder))
    assert (finding.ok, finding.found) == (True, tiny.EOS)


def test_a_tokenizer_with_another_end_is_named_with_both(folder: Path) -> None:
    # What transformers 5.10 says of SmolLM2 in the GGUF format: the tokenizer's end is where a message begins.
    rewrite(folder / "tokenizer_config.json", eos_token="<answer>")
    finding = check_end_tokens(str(folder))
    assert not finding.ok
    assert finding.found == (
        "the tokenizer says that <answer> (3) ends a sequence, and the generation config that <eos> (1) does"
    )


def test_a_template_that_closes_a_message_by_another_token_is_found(folder: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    found = check_end_tokens(str(folder)).found
    assert found == "the chat template closes a message with </answer> (4), and responses end at <eos> (1)"
    rewrite(folder / "generation_config.json", eos_token_id=[1, 4])
    assert check_end_tokens(str(folder)).ok


def test_several_ends_agree_if_the_tokenizers_is_one_of_them(folder: Path) -> None:
    rewrite(folder / "generation_config.json", eos_token_id=[5, 1])
    assert check_end_tokens(str(folder)).ok


def test_a_run_warns_before_it_loads_the_model(
    folder: Path, load: Callable[..., Config], settings: dict[str, Any], console: Console
) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token="<answer>")
    build(load({**settings, "model": {"path": str(folder)}}), console)
    assert "warning" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "ends a sequence" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_doctor_takes_a_model_or_a_config(
    folder: Path, load: Callable[..., Config], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(folder / "absent")]) == 2
    assert "cannot load" in capsys.readouterr().err
