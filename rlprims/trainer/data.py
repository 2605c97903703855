"""Prompts: JSON lines to token ids, and the order in which a run uses them."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlprims.runs.rows import read_rows
from rlprims.trainer.config import DataConfig


class Example(NamedTuple):
    """One question."""

    prompt: str
    prompt_ids: list[int]
    answer: Any
    """A text, or another JSON value: a list, a mapping, a bool."""
    data_source: str
    question: str = ""
    """The question without the template."""
    fields: Mapping[str, Any] = {}
    """The row of the file, for environments, and for verifiers whose parameters are its fields."""

    @property
    def key(self) -> str:
        """An identifier for the state of a run. Equal rows have the same one, wherever they are in the file."""
        text = json.dumps([self.prompt, dict(self.fields)], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class Examples(NamedTuple):
    """The questions of a file, and how many were left out or cut."""

    rows: list[Example]
    filtered: int
    truncated: int


def load_examples(
    path: Path,
    config: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_length: int,
    check: Callable[[Any, str, Mapping[str, Any]], None] = lambda answer, source, fields: None,
) -> Examples:
    """Read, check and tokenize every row; ``check`` raises a ValueError for an answer that cannot be scored.

    Raises:
        ValueError: the file does not exist or is empty; a row is not an object with the two fields as text; or, with
            ``overlong_prompts: error``, a prompt is longer than the limit. The message has file and line.
    """
    rows: list[Example] = []
    filtered = truncated = 0
    for number, row in read_rows(path):
        place = f"{path}:{number}"
        source = str(row.get(config.source, path.stem))
        if config.environment is not None:
            if missing := sorted(config.environment.needs - row.keys()):
                raise ValueError(
                    f"{place}: {config.environment.path} takes {missing}; the row has {sorted(row)}: add the fields, "
                    "or give the arguments defaults"
                )
            texts = [str(row.get(field, "")) for field in (config.answer, config.question)]
            rows.append(Example("", [], texts[0], source, texts[1], row))
            continue
        question, answer = _text(row, config.question, place), _answer(row, config.answer, place)
        try:
            check(answer, source, row)
        except ValueError as error:
            raise ValueError(f"{place}: the answer cannot be scored: {error}") from None
        _check_teacher(row, config, place)
        prompt = filled_prompt(question, config, tokenizer)
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=config.template != "chat")
        if not ids:
            raise ValueError(f"{place}: the prompt is empty")
        if len(ids) > max_prompt_length:
            if config.overlong_prompts == "error":
                raise ValueError(f"{place}: the prompt has {len(ids)} tokens, the limit is {max_prompt_length}")
            if config.overlong_prompts == "filter":
                filtered += 1
                continue
            truncated += 1
            ids = ids[-max_prompt_length:]
        rows.append(Example(prompt, ids, answer, source, question, row))
    if not rows:
        reason = f"all {filtered} prompts are longer than {max_prompt_length} tokens" if filtered else "it has no rows"
        raise ValueError(f"{path}: nothing to train on: {reason}")
    return Examples(rows, filtered, truncated)


def _text(row: dict[str, Any], field: str, place: str) -> str:
    value = row.get(field)
    if isinstance(value, bool | dict | list) or value is None or value == "":
        what = f"is {value!r}" if field in row else f"is missing; the row has {sorted(row)}"
        raise ValueError(f"{place}: field {field!r} {what}: expected text or a number")
    return str(value)


def _answer(row: dict[str, Any], field: str, place: str) -> Any:
    """The answer, with a number as text, because verifiers expect text."""
    value = row.get(field)
    return value if isinstance(value, bool | dict | list) and value != [] and value != {} else _text(row, field, place)


def _check_teacher(row: dict[str, Any], config: DataConfig, place: str) -> None:
    """Raise a ValueError if the row lacks the teacher's name, or a field of the teacher's prompt."""
    if config.teacher is not None:
        _text(row, config.teacher, place)
    names = re.findall(r"\{(\w+)\}", config.teacher_template or "")
    if missing := sorted({*names} - row.keys() - {"question", "sibling"}):
        raise ValueError(f"{place}: data.teacher_template needs {missing}; the row has {sorted(row)}: add the fields")


def filled_prompt(question: str, config: DataConfig, tokenizer: Any) -> str:
    """The text of a prompt: the question in its template."""
    if config.template != "chat":
        return config.template.replace("{question}", question)
    messages = [{"role": "system", "content": config.system}] if config.system else []
    messages.append({"role": "user", "content": question})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text
