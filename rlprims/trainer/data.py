"""Prompts: JSON lines to token ids, and the order in which a run uses them."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from rlprims.algorithms import Use
from rlprims.environments import CallStyle
from rlprims.filters import DifficultyPools
from rlprims.runs.config import Section, check_template
from rlprims.runs.rows import read_rows


class DataConfig(Section):
    """The prompts: JSON lines with a question and an answer."""

    train: Path
    eval: Path | None = Field(default=None, description="null: no evaluation")
    question: str = Field(default="question", description="field that holds the question")
    answer: str = Field(default="answer", description="field that holds the answer")
    source: str = Field(
        default="data_source",
        description="field by whose values metrics are reported; rows without it: the file's name",
    )
    template: str = Field(
        default="{question}", description="text with {question} in it, or chat: the tokenizer's template"
    )
    system: str | None = Field(default=None, description="system message of the chat template")
    max_prompt_length: int | None = Field(default=None, ge=1, description="tokens; null: limited by the window")
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        default="filter", description="truncate: the beginning is cut off"
    )
    shuffle: bool = True
    teacher: str | None = Field(
        default=None, description="field with the name of the row's teacher, if there are several"
    )
    teacher_template: str | None = Field(
        default=None,
        description="prompt of the teacher only, instead of the question: text with {question}, {FIELD} of the row, "
        "and {sibling}, another correct response of the group; null: the same prompt",
    )
    teacher_success: float = Field(default=1.0, description="the least score of a response for {sibling}")
    environment: Use | None = Field(
        default=None,
        description="class of an environment; its parameters are fields of the row; null: a single response",
    )
    pools: dict[str, tuple[float, float]] | None = Field(
        default=None,
        description="pools of prompts by solve rate, see filters.DifficultyPools: name to (least solve rate, weight in "
        "the draw of prompts); null: every prompt once per epoch",
    )
    calls: CallStyle | None = Field(
        default=None, description="how tool calls are written; null: json with the chat template, else tags"
    )

    @field_validator("pools")
    @classmethod
    def _are_valid_pools(cls, pools: dict[str, tuple[float, float]] | None) -> dict[str, tuple[float, float]] | None:
        if pools is not None:
            DifficultyPools(pools)
        return pools

    @field_validator("template")
    @classmethod
    def _names_the_question(cls, template: str) -> str:
        return check_template(template, "{question}")


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
