"""Prompts: the rows of a file to token ids."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from rlprims.algorithms import BoundFunction
from rlprims.environments import CallStyle
from rlprims.filters import DifficultyPools
from rlprims.runs.layouts import MISSING, as_messages, fields_of, is_chat, value_at
from rlprims.runs.rows import BadRows, OnDisk, RowsConfig, read_rows
from rlprims.turns.tokens import checked_messages, checked_tools, encode, text_ids
from rlprims.vision.messages import images_of_row
from rlprims.vision.processor import prompt as image_prompt


class DataConfig(RowsConfig):
    """The prompts: rows with a question and an answer."""

    question: str = Field(default="question", description="field that holds the question: a text or messages")
    answer: str = Field(default="answer", description="field that holds the answer")
    source: str = Field(
        default="data_source", description="field that results are reported by; rows without it: the file's name"
    )
    template: str = Field(
        default="{question}",
        description="text with {question} in it, or chat: the tokenizer's template, which messages always have",
    )
    overlong_prompts: Literal["filter", "truncate", "error"] = Field(
        default="filter", description="filter leaves the row out, truncate keeps the prompt's end; both are counted"
    )
    teacher: str | None = Field(default=None, description="field that names the row's teacher, if there are several")
    teacher_template: str | None = Field(
        default=None,
        description="prompt of the teacher only, instead of the question: text with {question}, {FIELD} of the row, "
        "and {sibling}, another correct response of the group; null: the same prompt",
    )
    teacher_success: float = Field(default=1.0, description="the lowest score of a response shown as {sibling}")
    environment: BoundFunction | None = Field(
        default=None,
        description="class of an environment, whose arguments are the fields of a row; {fn: my_module.Env, most: 3} "
        "sets others; null: one response for each prompt, which the verifier scores",
    )
    pools: dict[str, tuple[float, float]] | None = Field(
        default=None,
        description="prompts are drawn by how often they were solved (filters.DifficultyPools): name to (lowest solve "
        "rate, weight in the draw), such as {open: [0.0, 1.0], mastered: [1.0, 0.0]}; null: every prompt once in an "
        "epoch",
    )
    calls: CallStyle | None = Field(
        default=None,
        description="how tool calls are written: json, xml or tags; null: json with the chat template, otherwise tags",
    )

    @field_validator("pools")
    @classmethod
    def _are_valid_pools(cls, pools: dict[str, tuple[float, float]] | None) -> dict[str, tuple[float, float]] | None:
        if pools is not None:
            DifficultyPools(pools)
        return pools

    @property
    def declares_images(self) -> bool:
        """Whether the environment's class says that its messages have images."""
        return bool(getattr(self.environment and self.environment.fn, "has_images", False))


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
    images: tuple[bytes, ...] = ()
    """Encoded images, in the order of their places in the prompt."""

    @property
    def key(self) -> str:
        """An identifier for the state of a run. Equal rows have the same one, wherever they are in the file."""
        shown = [hashlib.sha256(image).hexdigest() for image in self.images]
        text = json.dumps([self.prompt, dict(self.fields), *shown], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class Examples(NamedTuple):
    """The questions of a file, and how many were left out or cut."""

    rows: Sequence[Example]
    filtered: int
    truncated: int
    bad: BadRows
    """Rows that cannot be used, which were left out."""
    layout: str | None = None
    """The layout that was recognized or set."""
    has_images: bool = False


def load_examples(
    path: Path | str,
    config: DataConfig,
    tokenizer: Any,
    *,
    max_prompt_length: int,
    check: Callable[[Any, str, Mapping[str, Any]], None] = lambda answer, source, fields: None,
) -> Examples:
    """Read, check and tokenize every row; ``check`` raises a ValueError for an answer that cannot be scored."""
    bad = BadRows(path, config.on_bad_row)
    rows = OnDisk(lambda values: Example(*values)._replace(images=tuple(map(base64.b64decode, values[-1]))))
    reader: Reader | None = None
    filtered, truncated, has_images = 0, 0, config.declares_images
    name = source_of(path)
    for place, row in read_rows(path, bad):
        reader = reader or Reader(config, tokenizer, row, check)
        try:
            example = reader.example(row, name, Path(place).parent)
        except ValueError as error:
            bad.add(place, error)
            continue
        if (size := len(example.prompt_ids)) > max_prompt_length:
            if config.overlong_prompts == "error" or (example.images and config.overlong_prompts == "truncate"):
                uncut = ", and images cannot be cut: set data.overlong_prompts: filter" if example.images else ""
                raise ValueError(f"{place}: the prompt has {size} tokens, the limit is {max_prompt_length}{uncut}")
            if config.overlong_prompts == "filter":
                filtered += 1
                continue
            truncated += 1
        has_images |= bool(example.images)
        rows.append(example._replace(prompt_ids=example.prompt_ids[-max_prompt_length:]))
    bad.check()
    if not rows:
        reason = f"all {filtered} prompts are longer than {max_prompt_length} tokens" if filtered else "it has no rows"
        raise ValueError(f"{path}: nothing to train on: {bad.text() or reason}")
    return Examples(rows, filtered, truncated, bad, reader.fields.described if reader else None, has_images)


def source_of(path: Path | str) -> str:
    """The source of rows that have none: the file's name."""
    return Path(Path(path).name.removesuffix(".gz").removesuffix(".zst")).stem


class Reader:
    """Makes examples of the rows of a file, whose layout the first row shows."""

    def __init__(
        self, config: DataConfig, tokenizer: Any, first: Mapping[str, Any], check: Callable[..., None]
    ) -> None:
        self.fields = fields_of(config, "prompts", first)
        self.config, self.tokenizer, self.check = config, tokenizer, check
        self.processor: Any = None  # of the model, if the row has images
        if config.declares_images:
            from rlprims.vision.processor import load_processor

            load_processor(tokenizer.name_or_path)  # an error before anything starts

    def example(self, row: dict[str, Any], name: str, folder: Path = Path()) -> Example:
        """The example of a row; ``name`` is the source of rows that have none, and ``folder`` has images."""
        config, paths = self.config, self.fields.paths
        source = value_at(row, paths["source"])
        source = name if source is MISSING else str(source)
        if config.environment is not None:
            if missing := sorted(config.environment.needs - row.keys()):
                raise ValueError(
                    f"{config.environment.path} takes {missing}; the row has {sorted(row)}: add the fields, "
                    "or give the arguments defaults"
                )
            answer, question = (value_at(row, paths[field]) for field in ("answer", "question"))
            texts = ["" if value is MISSING else str(value) for value in (answer, question)]
            _, row, images = self._split_images("", row, folder)
            return Example("", [], texts[0], source, texts[1], row, images)
        question = as_messages(value_at(row, paths["question"]))
        if not is_chat(question):
            question = _text(row, paths["question"])
        answer = _answer(row, paths["answer"], self.fields.convert)
        question, row, images = self._split_images(question, row, folder)
        try:
            self.check(answer, source, {"images": images, **row})
        except ValueError as error:
            raise ValueError(f"the answer cannot be scored: {error}") from None
        _check_teacher(row, config)
        tools = value_at(row, paths["tools"])
        tools = None if tools is MISSING else tools
        prompt, ids = tokenized_prompt(question, config, self.processor if images else self.tokenizer, tools, images)
        if not ids:
            raise ValueError("the prompt is empty")
        if isinstance(question, list):
            question = next((_words(m["content"]) for m in reversed(question) if m["role"] == "user"), prompt)
        return Example(prompt, ids, answer, source, question, row, images)

    def _split_images(self, question: Any, row: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any], Any]:
        """The question with bare image parts, the row without its images, and these."""
        config, path = self.config, self.fields.paths["question"]
        messages, images, self.processor = images_of_row(question, row, config, self.tokenizer, folder)
        if not images:
            return question, row, ()
        if config.teacher_template is not None:
            raise ValueError("the row has images, and data.teacher_template writes texts: leave it out")
        rest = {name: value for name, value in row.items() if name != config.images}
        return messages, rest | ({path: messages} if is_chat(row.get(path)) else {}), images


def _words(content: Any) -> str:
    return "".join(str(part.get("text", "")) for part in content) if isinstance(content, list) else str(content)


def _text(row: dict[str, Any], field: str) -> str:
    value = value_at(row, field)
    if value is MISSING:
        raise ValueError(f"field {field!r} is missing; the row has {sorted(row)}: expected text or a number")
    if isinstance(value, bool | dict | list) or value is None or value == "":
        raise ValueError(f"field {field!r} is {value!r}: expected text or a number")
    return str(value)


def _answer(row: dict[str, Any], field: str, convert: Callable[[Any], Any] | None) -> Any:
    """The answer as it is, with a number as text, because verifiers expect text."""
    value = value_at(row, field)
    if convert is not None and value is not MISSING:
        try:
            return convert(value)
        except (KeyError, TypeError) as error:
            raise ValueError(f"field {field!r} has another form than the layout says: {error!r}") from None
    return value if value is None or isinstance(value, bool | dict | list) else _text(row, field)


def _check_teacher(row: dict[str, Any], config: DataConfig) -> None:
    """Raise a ValueError if the row lacks the teacher's name, or a field of the teacher's prompt."""
    if config.teacher is not None:
        _text(row, config.teacher)
    names = re.findall(r"\{(\w+)\}", config.teacher_template or "")
    if missing := sorted({*names} - row.keys() - {"question", "sibling"}):
        raise ValueError(f"data.teacher_template needs {missing}; the row has {sorted(row)}: add the fields")


def tokenized_prompt(
    question: str | list[Any], config: DataConfig, tokenizer: Any, tools: Any = None, images: Sequence[bytes] = ()
) -> tuple[str, list[int]]:
    """The text of a prompt and its ids: the question in its template, or messages in the tokenizer's.

    Of messages with images it is the template of a processor, in the place of the tokenizer.
    """
    if isinstance(question, str) and config.template != "chat":
        text = config.template.replace("{question}", question)
        return text, text_ids(tokenizer, text)
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    messages = checked_messages(messages, config.question, images=bool(images))
    if config.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system}, *messages]
    chat, tools = config.chat(tokenizer), checked_tools(tools, config.tools)
    if images:
        return image_prompt(tokenizer, messages, images, tools, chat.arguments)
    text = chat.text(messages, tools, generate=True)
    return text, encode(tokenizer, text)
