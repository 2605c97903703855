"""The rows of a file: JSON lines or an array, plain or compressed; parquet; arrow; a folder that datasets saved."""

import codecs
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlprims import _json
from rlprims._storage import local_copy


def files_of(path: Path | str) -> list[Path]:
    """The files that a path names: itself, or in order those that match its wildcards; of a url their copies here."""
    path = Path(local_copy(str(path)))
    found = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    if not found:
        raise ValueError(f"{path}: No such file or directory")
    return found


def values_of(file: Path) -> Iterator[Any]:
    """The values of a file, in order, one after the other; a ValueError in the place of a line that cannot be read."""
    try:
        if file.is_dir():
            yield from _saved_folder(file)
        elif file.suffix == ".parquet":
            from pyarrow.parquet import ParquetFile

            for batch in ParquetFile(file).iter_batches(batch_size=256):
                yield from batch.to_pylist()
        elif file.suffix == ".arrow":
            yield from _arrow(file)
        else:
            yield from _json_values(file)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _saved_folder(folder: Path) -> Iterator[Any]:
    if not (folder / "state.json").exists():
        splits = ", ".join(sorted(state.parent.name for state in folder.glob("*/state.json")))
        instead = f"name one of its splits: {splits}" if splits else f"expected files, such as {folder}/*.jsonl"
        raise ValueError(f"not a data set that datasets saved: {instead}")
    from datasets import load_from_disk

    yield from load_from_disk(str(folder))


def _arrow(file: Path) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            batches: Any = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def _json_values(file: Path) -> Iterator[Any]:
    with _opened(file) as stream:
        if Path(file.name.removesuffix(".gz").removesuffix(".zst")).suffix == ".json":
            text = _decoded(stream.read())
            if text.lstrip().startswith("["):
                values = _parsed(text)
                yield from values if isinstance(values, list) else [values]
                return
            lines: Any = text.split("\n")
        else:
            lines = _lines(stream)
        for line in lines:
            yield line if isinstance(line, ValueError) else _parsed(line) if line.strip() else None


def _opened(file: Path) -> Any:
    if file.suffix == ".gz":
        return gzip.open(file)
    if file.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _lines(stream: Any) -> Iterator[str | ValueError]:
    """Lines end at U+000A alone: a string may contain U+2028."""
    head = stream.peek(2)[:2]
    if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        yield from io.TextIOWrapper(stream, encoding="utf-16", newline="\n")
        return
    for line in stream:
        try:
            yield _decoded(line)
        except ValueError as error:
            yield error


def _decoded(data: bytes) -> str:
    encoding = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"not {'UTF-16' if encoding == 'utf-16' else 'UTF-8'} at byte {error.start}") from None


def _parsed(text: str) -> Any:
    try:
        return _json.loads(text)
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON: {error.msg} at column {error.colno}")
    except ValueError as error:
        return error
