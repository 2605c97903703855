"""Stored rows: JSON lines to token ids, and to batches."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlprims.data_proto import DataProto
from rlprims.execution import Kind
from rlprims.execution._columns import left_padded, right_padded
from rlprims.fit.config import FitDataConfig
from rlprims.runs.end_tokens import closing_tokens
from rlprims.runs.rows import read_rows


class Response(NamedTuple):
    """The tokens after a prompt."""

    ids: list[int]
    learned: list[bool]
    """One bool per token; False on messages of others in a chat."""


class StoredRow(NamedTuple):
    """A demonstration, or a pair: the chosen response and the rejected one."""

    prompt_ids: list[int]
    responses: tuple[Response, ...]
    margin: float = 0.0


class StoredRows(NamedTuple):
    """The rows of a file, and the numbers of those that were left out or cut."""

    rows: list[StoredRow]
    filtered: int
    """The number of rows that were left out because of their length."""
    equal: int
    """The number of pairs of two equal responses, which are left out because their gradient is 0."""
    truncated: int

    def digest(self) -> str:
        """A hash of all tokens. A resume must have the same one."""
        return hashlib.blake2b(json.dumps(self.rows).encode(), digest_size=16).hexdigest()


class Reader:
    """Tokenizes the rows of a file.

    ``end_ids`` are the ids that end a response by the model's generation config, ``window`` is the model's window.
    """

    def __init__(self, config: FitDataConfig, kind: Kind, tokenizer: Any, end_ids: Sequence[int], window: int) -> None:
        self.config, self.kind, self.tokenizer = config, kind, tokenizer
        self.end_ids = list(end_ids)
        self.window = min(window, config.max_length or window)
        self.max_prompt = min(self.window - 1, config.max_prompt_length or self.window)
        if not self.end_ids:
            raise ValueError("nothing ends a response: set eos_token_id in the model's generation_config.json")
        own = tokenizer.eos_token_id
        self.end = own if own in self.end_ids else self.end_ids[0]
        closing = [token for token in closing_tokens(tokenizer) if token in self.end_ids]
        self.end_of_message = closing[0] if closing else self.end

    def read(self, path: Path) -> StoredRows:
        """Read, check and tokenize every row.

        Raises:
            ValueError: no such file, an empty one, or a row that lacks a field, or is too long and the settings make
                that an error. The message has file and line.
        """
        rows: list[StoredRow] = []
        filtered = equal = truncated = 0
        for number, fields in read_rows(path):
            place = f"{path}:{number}"
            row = self._row(fields, place)
            if len(row.prompt_ids) > self.max_prompt:
                if self.config.overlong_prompts == "error":
                    raise ValueError(
                        f"{place}: expected a prompt of at most {self.max_prompt} tokens, got {len(row.prompt_ids)}"
                    )
                filtered += 1
                continue
            space = self.window - len(row.prompt_ids)
            longest = max(len(response.ids) for response in row.responses)
            if longest > space:
                if self.config.overlong_rows == "error":
                    got = len(row.prompt_ids) + longest
                    raise ValueError(f"{place}: expected a row of at most {self.window} tokens, got {got}")
                cut = tuple(Response(r.ids[:space], r.learned[:space]) for r in row.responses)
                if self.config.overlong_rows == "filter" or not all(any(r.learned) for r in cut):
                    filtered += 1
                    continue
                truncated += 1
                row = row._replace(responses=cut)
            if len(row.responses) == 2 and row.responses[0].ids == row.responses[1].ids:
                equal += 1
                continue
            rows.append(row)
        if not rows:
            left_out = (
                f"{filtered} rows are too long for {self.window} tokens, and {equal} are pairs of equal responses"
            )
            raise ValueError(f"{path}: nothing to train on: {left_out if filtered or equal else 'it has no rows'}")
        return StoredRows(rows, filtered, equal, truncated)

    def _row(self, fields: dict[str, Any], place: str) -> StoredRow:
        config = self.config
        if self.kind == "demonstrations" and config.messages in fields:
            return self._conversation(_messages(fields[config.messages], config.messages, place), place)
        names = [config.response] if self.kind == "demonstrations" else [config.chosen, config.rejected]
        prompt, *answers = (_text(fields, name, place) for name in (config.prompt, *names))
        if config.template == "chat":
            first = [{"role": "system", "content": config.system}] if config.system else []
            first.append({"role": "user", "content": prompt})
            conversations = [
                self._conversation([*first, {"role": "assistant", "content": answer}], place) for answer in answers
            ]
            prompt_ids, responses = conversations[0].prompt_ids, [row.responses[0] for row in conversations]
        else:
            prompt_ids = self._encode(config.template.replace("{prompt}", prompt), special=True)
            ids = [[*self._encode(answer), self.end] for answer in answers]
            responses = [Response(each, [True] * len(each)) for each in ids]
        if not prompt_ids:
            raise ValueError(f"{place}: the prompt is empty")
        margin = _number(fields, config.margin, place) if config.margin is not None else 0.0
        return StoredRow(prompt_ids, tuple(responses), margin)

    def _conversation(self, messages: list[dict[str, str]], place: str) -> StoredRow:
        """A chat in the form of its template. The response begins with the first message of the assistant.

        Each message of the assistant is learned up to the token that ends it. Text that the template adds after it, and
        messages of others, are not learned.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(f"{place}: a chat, but the tokenizer has no chat template: use prompt and response")
        assistant_messages = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not assistant_messages or assistant_messages[-1] != len(messages) - 1 or assistant_messages[0] == 0:
            roles = [message["role"] for message in messages]
            raise ValueError(f"{place}: expected a chat that begins with another and ends with assistant, got {roles}")
        prompt_ids: list[int] = []
        ids: list[int] = []
        learned: list[bool] = []
        written = ""
        for i in assistant_messages if self.config.turns == "all" else assistant_messages[-1:]:
            before = self._written(messages[:i], add_generation_prompt=True)
            after = self._written(messages[: i + 1], add_generation_prompt=False)
            if not (before.startswith(written) and after.startswith(before)):
                raise ValueError(
                    f"{place}: the chat template changes earlier messages when message {i} is added, so that no "
                    "row can have all of them: set data.turns: last"
                )
            between = self._encode(before[len(written) :])
            answer = self._encode(after[len(before) :])
            end = next((at for at, token in enumerate(answer) if token in self.end_ids), None)
            if end is None and i == assistant_messages[-1]:
                answer, end = [*answer, self.end_of_message], len(answer)
            own = len(answer) if end is None else end + 1
            if i == assistant_messages[-1]:
                answer = answer[:own]
            if not prompt_ids:
                prompt_ids = between
            else:
                ids += between
                learned += [False] * len(between)
            ids += answer
            learned += [at < own for at in range(len(answer))]
            written = after
        return StoredRow(prompt_ids, (Response(ids, learned),))

    def _written(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids


def _text(fields: dict[str, Any], name: str, place: str) -> str:
    if name not in fields:
        raise ValueError(f"{place}: expected a text in {name!r}, and the row has {sorted(fields)}: name the field")
    value = fields[name]
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text in {name!r}, got {_json(value)}")
    return value


def _number(fields: dict[str, Any], name: str, place: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place}: expected a number in {name!r}, got {_json(value)}")
    return float(value)


def _messages(value: Any, name: str, place: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: expected a list of messages in {name!r}, got {_json(value)}")
    for i, message in enumerate(value):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}: expected a text in role and content of {name}[{i}], got {_json(message)}")
    return value


def _json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_batch(rows: Sequence[StoredRow], pad_token_id: int) -> DataProto:
    """A batch of the rows' responses; the two responses of a pair are consecutive rows.

    For pairs it also has ``pair_ids`` int64, ``is_chosen`` bool and ``score_margins`` float (B,).
    """
    prompts = [row.prompt_ids for row in rows for _ in row.responses]
    responses = [response for row in rows for response in row.responses]
    longest = max(len(response.ids) for response in responses)
    padded_prompts, in_prompt = left_padded(prompts, max(map(len, prompts)), pad_token_id)
    padded_responses, in_response = right_padded([response.ids for response in responses], longest, pad_token_id)
    learned, _ = right_padded([response.learned for response in responses], longest, False)
    tensors = {
        "prompts": padded_prompts,
        "responses": padded_responses,
        "attention_mask": torch.cat([in_prompt, in_response], 1),
        "response_mask": learned.bool(),
    }
    if len(responses) == 2 * len(rows):
        tensors |= {
            "pair_ids": torch.arange(len(rows)).repeat_interleave(2),
            "is_chosen": torch.tensor([True, False]).repeat(len(rows)),
            "score_margins": torch.tensor([row.margin for row in rows]).repeat_interleave(2),
        }
    return DataProto.from_dict(tensors=tensors)
