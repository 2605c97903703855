"""The rows of a file, or of a run's settings: layout, columns, lengths, doubles, bad rows; and in our fields."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rlprims.fit.config import FitConfig, FitDataConfig
from rlprims.fit.rows import Reader as StoredReader
from rlprims.reports._visible import visible
from rlprims.reports.terminal import make_table
from rlprims.runs.config import load_as, read_yaml
from rlprims.runs.end_tokens import load_end_tokens
from rlprims.runs.files import files_of
from rlprims.runs.layouts import MISSING, NEEDED, Fields, Use, as_messages, fields_of, layout_of, value_at
from rlprims.runs.rows import BadRows, read_rows
from rlprims.trainer.config import Config
from rlprims.trainer.data import DataConfig, Reader, source_of
from rlprims.trainer.scoring.rewards import answer_check
from rlprims.turns.tokens import checked_tools, shown

_AS_THEY_ARE = ("answer", "source", "tools", "system")
_SAMPLES, _BARS, _WIDTH = 3, 8, 40

Check: TypeAlias = Callable[[Any, str, Mapping[str, Any]], None]


class Rows(NamedTuple):
    """A file of rows, and how they are read."""

    path: Path | str
    config: DataConfig | FitDataConfig
    use: Use
    model: str | None = None
    """The model whose tokens they become."""
    check: Check = lambda answer, source, fields: None
    """Raises a ValueError for an answer that cannot be scored."""


class Tokens(NamedTuple):
    """The tokens of a row, and which of them are learned."""

    ids: list[int]
    learned: list[bool]
    rejected: Sequence[int] = ()
    """Of a pair: the tokens of the worse response."""


class Survey(NamedTuple):
    """What a file has."""

    rows: int
    columns: dict[str, tuple[int, str]]
    """By name the number of rows that have it, and its first value."""
    lengths: list[int]
    """Tokens of each row; characters without a tokenizer."""
    contents: Counter[str]
    samples: list[Tokens | dict[str, Any]]
    bad: BadRows
    fields: Fields


def use_of(row: Mapping[str, Any]) -> Use:
    """What the rows of a file are for, by one of them."""
    if layout_of(row, "pairs"):
        return "pairs"
    if layout_of(row, "prompts"):
        return "prompts"
    return "demonstrations" if layout_of(row, "demonstrations") or {"prompt", "response"} <= row.keys() else "prompts"


def of_run(path: Path, overrides: Sequence[str] = ()) -> Rows:
    """The training rows of a run's settings, with the check of its verifier."""
    settings = read_yaml(path)
    if "loss" in settings and "algorithm" not in settings:
        fit = load_as(FitConfig, path, overrides)
        use: Use = "demonstrations" if fit.kind == "demonstrations" else "pairs"
        return Rows(fit.data.train, fit.data.model_copy(update={"on_bad_row": "skip"}), use, fit.model.path)
    run = load_as(Config, path, overrides)
    data = run.data.model_copy(update={"on_bad_row": "skip"})
    return Rows(data.train, data, "prompts", run.model.path, answer_check(run.verifiers()))


def of_file(path: Path | str, use: Use | None, layout: str | None, template: str, model: str | None) -> Rows:
    """The rows of a file, with our names of fields; ``use`` None: by the first row."""
    use = use or use_of(first_row(path))
    chat = {"template": "chat"} if template == "chat" else {}
    how: dict[str, Any] = {"train": path, "on_bad_row": "skip", "layout": layout, **chat}
    return Rows(path, DataConfig(**how) if use == "prompts" else FitDataConfig(**how), use, model)


def first_row(path: Path | str) -> dict[str, Any]:
    """The first row that can be read."""
    bad = BadRows(path)
    for _, row in read_rows(path, bad):
        return row
    raise ValueError(f"{path}: it has no rows" if not bad.found else bad.text())


def converted(row: Mapping[str, Any], fields: Fields, use: Use) -> dict[str, Any]:
    """The row in our fields, as settings by default read it; other fields stay."""
    found = {name: value_at(row, path) for name, path in fields.paths.items()}
    found = {
        name: value if name in _AS_THEY_ARE else as_messages(value, fields.layout)
        for name, value in found.items()
        if value is not MISSING
    }
    needed = ["messages"] if "messages" in found else NEEDED[use]
    if use == "pairs" and not isinstance(found.get("chosen"), str):
        needed = ["chosen", "rejected"]
    if missing := [name for name in needed if name not in found]:
        raise ValueError(f"expected {', '.join(fields.paths[name] for name in missing)}; the row has {sorted(row)}")
    if fields.convert is not None:
        found["answer"] = fields.convert(found["answer"])
    if "tools" in found:
        found["tools"] = checked_tools(found["tools"], fields.paths["tools"])
    if isinstance(found.get("system"), str) and "messages" in found:
        found["messages"] = [{"role": "system", "content": found.pop("system")}, *found["messages"]]
    used = {path.partition(".")[0] for path in fields.paths.values()}
    named = {"data_source" if name == "source" else name: value for name, value in found.items()}
    return {**{name: value for name, value in row.items() if name not in used}, **named}


def convert(rows: Rows, to: Path) -> tuple[int, BadRows]:
    """Write the rows of a file as JSON lines in our fields; returns their number, and those that were left out."""
    path, config, use = rows[:3]
    bad, count, fields = BadRows(path, "skip"), 0, fields_of(config, use, first_row(path))
    with to.open("x", encoding="ascii") as file:
        for place, row in read_rows(path, bad):
            try:
                line = json.dumps(converted(row, fields, use), default=str)
            except ValueError as error:
                bad.add(place, error)
            else:
                file.write(line + "\n")
                count += 1
    return count, bad


def tokenizing(rows: Rows) -> tuple[Any, Callable[[Any], Tokens]]:
    """The tokenizer of a model, and a function of a row that returns its tokens, as a run would have them."""
    path, config, use, model, check = rows
    tokenizer, ends = load_end_tokens(str(model))
    first, folder = first_row(path), files_of(path)[0].parent
    if isinstance(config, DataConfig):
        prompts, limit = Reader(config, tokenizer, first, check), config.max_prompt_length

        def of_prompt(row: dict[str, Any]) -> Tokens:
            ids = prompts.example(row, source_of(path), folder).prompt_ids
            return Tokens(_within(limit, ids), [False] * len(ids))

        return tokenizer, of_prompt
    stored = StoredReader(config, use, tokenizer, ends or [tokenizer.eos_token_id], 2**31)  # type: ignore[arg-type]
    stored.see(first)

    def of_stored(row: dict[str, Any]) -> Tokens:
        prompt_ids, (response, *others), *_ = stored.row(row, folder)
        ids = [*_within(config.max_prompt_length, prompt_ids), *response.ids]
        return Tokens(ids, [False] * len(prompt_ids) + response.learned, [token for r in others for token in r.ids])

    return tokenizer, of_stored


def _within(limit: int | None, prompt_ids: list[int]) -> list[int]:
    if limit is not None and len(prompt_ids) > limit:
        raise ValueError(f"the prompt is too long: {len(prompt_ids)} tokens, data.max_prompt_length is {limit}")
    return prompt_ids


def survey(asked: Rows, tokens: Callable[[Any], Tokens] | None = None) -> Survey:
    """Read a file once; with ``tokens`` as :func:`tokenizing` returns it."""
    path, config, use = asked[:3]
    bad, columns, contents = BadRows(path, "skip"), dict[str, tuple[int, str]](), Counter[str]()
    lengths, samples = list[int](), list[Tokens | dict[str, Any]]()
    rows, fields = 0, fields_of(config, use, first_row(path))
    plays = isinstance(config, DataConfig) and config.environment is not None
    for place, row in read_rows(path, bad):
        rows += 1
        for name, value in row.items():
            count, example = columns.get(name, (0, shown(value, _WIDTH)))
            columns[name] = count + 1, example
        try:
            as_tokens = None if tokens is None else tokens(row)
            ours = row if plays else converted(row, fields, use)
        except ValueError as error:
            bad.add(place, error)
            continue
        names = ("messages", *NEEDED[use], *({str(getattr(config, "images", ""))} & row.keys()))
        own = row if plays else [ours.get(name) for name in names]
        content = json.dumps(own, default=str, sort_keys=True)
        contents[content] += 1
        lengths.append(len(as_tokens.ids) if as_tokens and as_tokens.ids else len(content))
        samples += [as_tokens if as_tokens and as_tokens.ids else ours] if len(samples) < _SAMPLES else []
    return Survey(rows, columns, lengths, contents, samples, bad, fields)


def show(found: Survey, path: Path | str, console: Any, tokenizer: Any = None) -> None:
    """Print what a file has."""
    has = [(name, place) for name, place in found.fields.paths.items() if place.partition(".")[0] in found.columns]
    layout = ", ".join(f"{name} in {place}" for name, place in has)
    name = f"layout {found.fields.layout}: " if found.fields.layout else ""
    console.print(f"{path}: {found.rows} rows; {name}{layout}", highlight=False, soft_wrap=True)
    table = [(visible(name), str(count), visible(value)) for name, (count, value) in found.columns.items()]
    console.print(make_table(("column", "rows", "first value"), table))
    for number, sample in enumerate(found.samples, 1):
        console.print(f"row {number}", style="bold", highlight=False)
        if isinstance(sample, dict):
            for name, value in sample.items():
                console.print(f"  {visible(name)}: {visible(shown(value))}", highlight=False, soft_wrap=True)
        else:
            _show_tokens(sample, console, tokenizer)
    unit = "tokens" if isinstance(next(iter(found.samples), None), Tokens) else "characters of JSON"
    console.print(f"lengths in {unit}", style="bold")
    for line in histogram(found.lengths):
        console.print(line, highlight=False)
    doubles = found.contents.total() - len(found.contents)
    console.print(f"duplicates: {doubles}; rows that cannot be used: {found.bad.count}", highlight=False)
    if found.bad.count:
        console.print(visible(found.bad.text()), style="yellow", highlight=False, soft_wrap=True)


def _show_tokens(tokens: Tokens, console: Any, tokenizer: Any) -> None:
    """The text of a row; what is learned is green, and stands between ⟦ and ⟧ if there are no colours."""
    from rich.text import Text

    text = list[tuple[str, str]]()
    coloured = getattr(console, "color_system", None) is not None
    pairs = zip(tokens.ids, tokens.learned, strict=True)
    for learned, part in groupby(pairs, key=lambda pair: pair[1]):
        words = visible(tokenizer.decode([token for token, _ in part]))
        text.append((words if coloured or not learned else f"⟦{words}⟧", "green" if learned else "dim"))
    if tokens.rejected:
        text.append((f"\nrejected: {visible(tokenizer.decode(list(tokens.rejected)))}", "red"))
    console.print(Text.assemble(*text))


def histogram(lengths: list[int]) -> Iterator[str]:
    """Lines of a histogram, at most 80 columns wide.

    >>> print("\\n".join(histogram([1, 1, 1, 16])))
       1 to    2  ████████████████████████████████████████ 3
      15 to   16  █████████████ 1
    """
    if not lengths:
        return
    low, step = min(lengths), (max(lengths) - min(lengths)) // _BARS + 1
    counts = Counter((length - low) // step for length in lengths)
    digits = max(4, len(str(max(lengths))))
    for bar, count in sorted(counts.items()):
        begin = low + bar * step
        size = max(1, _WIDTH * count // max(counts.values()))
        yield f"{begin:{digits}} to {begin + step - 1:{digits}}  {'█' * size} {count}"


def overlap(a: Survey, b: Survey) -> int:
    """The number of rows of ``b`` that ``a`` also has."""
    return sum(count for content, count in b.contents.items() if content in a.contents)
