"""Stored rows: the rows of a file to token ids, and to batches."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlprims.data_proto import DataProto
from rlprims.execution import Kind
from rlprims.execution._columns import left_padded, right_padded
from rlprims.fit.config import FitDataConfig
from rlprims.runs.end_tokens import closing_tokens
from rlprims.runs.layouts import MISSING, as_messages, fields_of, is_chat, value_at
from rlprims.runs.rows import BadRows, OnDisk, read_rows
from rlprims.turns.tokens import Answered, checked_messages, checked_tools, encode_after, shown, text_ids
from rlprims.vision.messages import images_of_row
from rlprims.vision.processor import ImageChat


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
    images: tuple[bytes, ...] = ()
    """Encoded images, in the order of their places in the tokens."""


def _stored_row(values: list[Any]) -> StoredRow:
    prompt_ids, responses, margin, images = values
    pair = tuple(Response(*response) for response in responses)
    return StoredRow(prompt_ids, pair, margin, tuple(map(base64.b64decode, images)))


class StoredRows(NamedTuple):
    """The rows of a file, and the numbers of those that were left out or cut."""

    rows: Sequence[StoredRow]
    filtered: int
    """The number of rows that were left out because of their length."""
    equal: int
    """The number of pairs of two equal responses, which are left out because their gradient is 0."""
    truncated: int
    bad: BadRows = BadRows(Path())
    """Rows that cannot be used, which were left out."""
    layout: str | None = None
    """The layout that was recognized or set."""
    has_images: bool = False

    def digest(self) -> str:
        """A hash of all tokens and images. A resume must have the same one."""
        found = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            found.update(b"".join([json.dumps(row[:3]).encode(), *(hashlib.sha256(x).digest() for x in row.images)]))
        return found.hexdigest()


class Reader:
    """Tokenizes the rows of a file. ``end_ids`` end a response by the generation config; ``window`` is the model's."""

    def __init__(self, config: FitDataConfig, kind: Kind, tokenizer: Any, end_ids: Sequence[int], window: int) -> None:
        self.config, self.kind, self.tokenizer = config, kind, tokenizer
        self.end_ids = list(end_ids)
        self.window = min(window, config.max_length or window)
        self.max_prompt = min(self.window - 1, config.max_prompt_length or self.window)
        if not self.end_ids:
            raise ValueError("nothing ends a response: set eos_token_id in the model's generation_config.json")
        own = tokenizer.eos_token_id
        self.end = own if own in self.end_ids else self.end_ids[0]
        self.chat = config.chat(tokenizer)
        self.answers = ["response"] if kind == "demonstrations" else ["chosen", "rejected"]
        closing = [token for token in closing_tokens(tokenizer) if token in self.end_ids]
        self.end_of_message = closing[0] if closing else self.end

    def read(self, path: Path | str) -> StoredRows:
        """Read, check and tokenize every row."""
        rows, bad = OnDisk(_stored_row), BadRows(path, self.config.on_bad_row)
        filtered = equal = truncated = 0
        has_images = False
        for number, (place, fields) in enumerate(read_rows(path, bad)):
            if number == 0:
                self.see(fields)
            try:
                row = self.row(fields, Path(place).parent)
            except ValueError as error:
                bad.add(place, error)
                continue
            fitted, is_cut = self._fitted(row, place)
            if fitted is None:
                filtered += 1
                continue
            if len(fitted.responses) == 2 and fitted.responses[0].ids == fitted.responses[1].ids:
                equal += 1
            else:
                rows.append(fitted)
                truncated += is_cut
                has_images |= bool(fitted.images)
        bad.check()
        if not rows:
            long = f"{filtered} rows are too long for {self.window} tokens"
            left_out = f"{long}, and {equal} are pairs of equal responses" if filtered or equal else "it has no rows"
            reason = bad.text() or left_out
            raise ValueError(f"{path}: nothing to train on: {reason}")
        return StoredRows(rows, filtered, equal, truncated, bad, self.fields.described, has_images)

    def _fitted(self, row: StoredRow, place: str) -> tuple[StoredRow | None, bool]:
        """The row, cut to the limits, and whether its responses were cut; None if it is left out."""
        config, length = self.config, len(row.prompt_ids)
        uncut = ", and images cannot be cut: set data.{}: filter" if row.images else ""
        if length > self.max_prompt:
            if config.overlong_prompts == "error" or (uncut and config.overlong_prompts == "truncate"):
                got = f"{length}{uncut.format('overlong_prompts')}"
                raise ValueError(f"{place}: expected a prompt of at most {self.max_prompt} tokens, got {got}")
            if config.overlong_prompts == "filter":
                return None, False
            row = row._replace(prompt_ids=row.prompt_ids[-self.max_prompt :])
        space = self.window - len(row.prompt_ids)
        longest = max(len(response.ids) for response in row.responses)
        if longest <= space:
            return row, False
        if config.overlong_rows == "error" or (uncut and config.overlong_rows == "truncate"):
            got = f"{len(row.prompt_ids) + longest}{uncut.format('overlong_rows')}"
            raise ValueError(f"{place}: expected a row of at most {self.window} tokens, got {got}")
        cut = tuple(Response(r.ids[:space], r.learned[:space]) for r in row.responses)
        if config.overlong_rows == "filter" or not all(any(r.learned) for r in cut):
            return None, False
        return row._replace(responses=cut), True

    def see(self, first: Mapping[str, Any]) -> None:
        """Find the fields of a file in its first row."""
        self.fields = fields_of(self.config, "demonstrations" if self.kind == "demonstrations" else "pairs", first)

    def row(self, fields: dict[str, Any], folder: Path = Path()) -> StoredRow:
        """The tokens of a row of the file that was seen; ``folder`` has images."""
        config, paths = self.config, self.fields.paths
        margin = _number(fields, config.margin) if config.margin is not None else 0.0
        if self.kind == "demonstrations" and value_at(fields, paths["messages"]) is not MISSING:
            messages = checked_messages(self._messages(fields, "messages"), paths["messages"], images=True)
            system = value_at(fields, paths.get("system", ""))
            return self._chats([messages], fields, folder, first=0, system=None if system is MISSING else system)
        prompt, *values = (self._messages(fields, name) for name in ("prompt", *self.answers))
        if config.template != "chat" and not any(map(is_chat, (prompt, *values))):
            texts = [_text(fields, paths[name]) for name in ("prompt", *self.answers)]
            images_of_row(texts[0], fields, config, self.tokenizer, folder)  # an error if there are images
            return self._texts(*texts, margin=margin)
        asked = prompt
        if prompt is MISSING and all(map(is_chat, values)):
            asked = []  # the answers are whole chats
        elif not is_chat(prompt):
            asked = [{"role": "user", "content": _text(fields, paths["prompt"])}]
        asked = checked_messages(asked, paths["prompt"], images=True) if asked else []
        named = zip(self.answers, values, strict=True)
        chats = [self._chat(asked, value, fields, paths[name]) for name, value in named]
        first = _shared(chats) if len(chats) > 1 else len(asked)
        return self._chats(chats, fields, folder, first=first, system=config.system)._replace(margin=margin)

    def _messages(self, fields: Mapping[str, Any], name: str) -> Any:
        return as_messages(value_at(fields, self.fields.paths[name]), self.fields.layout)

    def _texts(self, prompt: str, *answers: str, margin: float) -> StoredRow:
        text = self.config.template.replace("{prompt}", prompt)
        prompt_ids = text_ids(self.tokenizer, text)
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        responses = []
        for answer in answers:
            ids = encode_after(self.tokenizer, text, answer)
            if ids[-1:] != [self.end]:  # the text may have it
                ids.append(self.end)
            responses.append(Response(ids, [True] * len(ids)))
        return StoredRow(prompt_ids, tuple(responses), margin)

    def _chat(self, asked: list[Any], answer: Any, fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """The messages of a prompt and its answer; the answer may be the whole chat."""
        if not is_chat(answer):
            answer = [{"role": "assistant", "content": _text(fields, name)}]
        answer = checked_messages(answer, name, images=True)
        return [*asked, *answer] if answer[0]["role"] == "assistant" else answer

    def _chats(
        self, chats: list[Any], fields: dict[str, Any], folder: Path, *, first: int, system: str | None
    ) -> StoredRow:
        """Chats in the form of the tokenizer's template. A response begins with the first message that is learned."""
        split = [images_of_row(messages, fields, self.config, self.tokenizer, folder) for messages in chats]
        _, images, processor = split[0]
        if split[-1][1] != images:
            raise ValueError("the two chats of a pair have different images: expected the same")
        if not (processor or self.tokenizer).chat_template:
            raise ValueError("a chat, but the tokenizer has no chat template: use prompt and response")
        of_images = self.config.chat(processor).arguments, processor, images
        chat = ImageChat(self.tokenizer, *of_images) if images else self.chat
        path = self.fields.paths["tools"]
        tools = value_at(fields, path)
        tools = None if tools is MISSING else checked_tools(tools, path)
        found = list[Answered]()
        for messages, *_ in split:
            roles = [message["role"] for message in messages]
            if roles[-1] != "assistant" or roles[0] == "assistant":
                raise ValueError(f"expected a chat that begins with another and ends with assistant, got {roles}")
            before = [{"role": "system", "content": system}] if system and roles[0] != "system" else []
            begin = len(messages) - 1 if self.config.turns == "last" else first
            whole, begin = [*before, *messages], begin + len(before)
            found.append(chat.answered(whole, tools, first=begin, end_ids=self.end_ids, end=self.end_of_message))
        if found[0].prompt_ids != found[-1].prompt_ids:
            raise ValueError("the two chats of a pair differ before an answer, in what others say: expected the same")
        responses = tuple(Response(each.ids, each.learned) for each in found)
        return StoredRow(found[0].prompt_ids, responses, images=images)


def _shared(chats: list[list[dict[str, Any]]]) -> int:
    """The index of the first message that two chats do not share; of the last one, if they share all."""
    same = [a == b for a, b in zip(*chats, strict=False)]
    return min([same.index(False)] if False in same else [len(chat) - 1 for chat in chats])


def _text(fields: dict[str, Any], name: str) -> str:
    value = value_at(fields, name)
    if value is MISSING:
        raise ValueError(f"expected a text in {name!r}, and the row has {sorted(fields)}: name the field")
    if not isinstance(value, str):
        raise ValueError(f"expected a text in {name!r}, got {shown(value)}")
    return value


def _number(fields: dict[str, Any], name: str) -> float:
    value = value_at(fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number in {name!r}, got {shown(None if value is MISSING else value)}")
    return float(value)


def as_batch(rows: Sequence[StoredRow], pad_token_id: int) -> DataProto:
    """A batch of the rows' responses, with their images; the two responses of a pair are consecutive rows.

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
    images = [row.images for row in rows for _ in row.responses]
    return DataProto.from_dict(tensors, {"images": images} if any(images) else None)
