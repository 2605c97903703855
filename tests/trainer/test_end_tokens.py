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
from tests.hybrids import save_hybrid

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


@pytest.mark.parametrize("packing", [None, False])
def test_a_type_that_is_padded_is_noted_once(
    packing: bool | None, load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    path = save_hybrid(tmp_path / "hybrid", "lfm2")
    build(load({**settings, "model": {"path": str(path), "packing": packing}}), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("note: a lfm2 is padded: no test packs this type\n") == (packing is None)
    assert text.count("padded") == (packing is None)


def test_a_tokenizer_beyond_the_embedding_is_one_line_before_the_weights_are_read(
    load: Callable[..., Config], settings: dict[str, Any], console: Console, tmp_path: Path
) -> None:
    """The folder has no weights at all; the run was an IndexError in the first forward pass."""
    tiny.config(vocab_size=30).save_pretrained(tmp_path / "files")
    tiny.tokenizer().save_pretrained(tmp_path / "files")
    with pytest.raises(
        ValueError, match=r"^model\.path: the tokenizer has 2 tokens, such as '[kl]', beyond the 30 rows .*$"
    ):
        build(load({**settings, "model": {"path": str(tmp_path / "files")}}), console)


@pytest.mark.slow
def test_the_doctor_takes_a_model_or_a_config(
    folder: Path, load: Callable[..., Config], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(folder / "absent")]) == 2
    assert "cannot load" in capsys.readouterr().err
