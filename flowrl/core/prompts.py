"""Prompt files."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from flowrl.errors import ConfigError

from .parquet import pyarrow, reading

_JSON = (".jsonl", ".ndjson", ".json")
_TABLES = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (".txt", *_JSON, *_TABLES, ".parquet")
_TAKEN = ("self", "prompts", "completions", "opponents")
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}

Row: TypeAlias = tuple[str, dict[str, Any]]
"""Where a record stands, for messages, and the record."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and the other columns of their file, each a list of the same length.

    `num_skipped` counts the rows of the file that were left out because their prompt is blank.
    """

    prompts: list[str]
    columns: dict[str, list[Any]]
    num_skipped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: list[int]) -> PromptSet:
        """The rows `index`, in that order."""
        return PromptSet(
            [self.prompts[i] for i in index], {k: [values[i] for i in index] for k, values in self.columns.items()}
        )


def read_prompts(path: Path, *, for_eval: bool = False) -> PromptSet:
    """Reads a file of prompts, and what else its rows hold as columns.

    * .txt: a prompt on each line that is not blank, without the spaces around it.
    * .jsonl, .ndjson, .json: objects with `prompt` and any other keys, one a line or in an array; or texts.
    * .csv, .tsv: a header with `prompt`; all values are text.
    * .parquet: a column `prompt` (extra `parquet`).

    The case of the suffix does not matter, and files of objects are read as JSON whatever their suffix. Rows with a
    blank prompt are left out, which is said once.

    Args:
        for_eval: also check that the tables of a summary can be made: `category` is text, a number or a truth value,
            and `held_out` a truth value, see `is_flagged`.

    Raises:
        ConfigError: nothing in it, or a row is malformed; names file and line, or row of an array.
    """
    suffix = path.suffix.lower()
    if suffix and suffix not in _SUFFIXES:
        raise ConfigError(f"{path}: prompts are read from {', '.join(_SUFFIXES)} files; convert it to one of them")
    prompts, columns, skipped = [], [], 0
    for where, record in _parquet_rows(path) if suffix == ".parquet" else _text_rows(path, suffix):
        prompt = record.get("prompt")
        if not isinstance(prompt, str):
            found = f"it is {prompt!r}" if "prompt" in record else f"found: {', '.join(map(repr, record))}"
            raise ConfigError(f"{where}: expected an object with a text 'prompt'; {found}")
        check_columns(record, where)
        if for_eval:
            _check_subsets(record, where)
        if prompt.strip():
            prompts.append(prompt)
            columns.append(record)
        else:
            skipped += 1
    if not prompts:
        raise ConfigError(f"{path}: no prompts in it" + (f", only {skipped} blank ones" if skipped else ""))
    if skipped:
        _tell(f"{path}: left out {skipped} row(s) with a blank prompt")
    names = sorted({name for record in columns for name in record} - {"prompt"})
    return PromptSet(prompts, {name: [record.get(name) for record in columns] for name in names}, skipped)


def check_columns(names: Iterable[str], where: str) -> None:
    """Refuses columns that rewards cannot be given, because they are called with arguments of these names.

    Raises:
        ConfigError: there is one; starts with `where`.
    """
    taken = [name for name in names if name in _TAKEN]
    if taken:
        raise ConfigError(f"{where}: rename the column {taken[0]!r}: rewards have an argument of that name")


def is_flagged(value: Any) -> bool:
    """Whether a cell says yes: a truth value, 1 or 0, missing (no), or text: true, false, yes, no, 1, 0 or blank.

    Raises:
        ValueError: it is none of these.
    """
    if value is None or (isinstance(value, bool | int | float) and value in (0, 1)):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _FLAGS:
        return _FLAGS[value.strip().lower()]
    raise ValueError(f"{value!r} is neither true nor false")


def parse_json(text: str, where: str) -> Any:
    """What a JSON text holds.

    Raises:
        ConfigError: not JSON, or a key that stands twice in an object; starts with `where`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None


def check_text(value: Any, where: str) -> None:
    """Refuses half of a surrogate pair anywhere in a value of JSON: no file and no tokenizer takes it.

    Raises:
        ConfigError: there is one; starts with `where`.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ConfigError(f"{where}: {half} is half of a surrogate pair and no text; remove it") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return found


def _text_rows(path: Path, suffix: str) -> Iterator[Row]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}; save it as UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{path}: not text, it holds NUL bytes; save it as UTF-8 text")
    lines = [(f"{path}:{number}", line) for number, line in enumerate(io.StringIO(text, newline=None), 1)]
    lines = [(where, line) for where, line in lines if line.strip()]
    if not lines:
        return iter(())
    if suffix in _JSON or _holds_objects(text, lines):
        return _json_rows(path, text, lines)
    if suffix in _TABLES:
        return _table_rows(path, text, _TABLES[suffix])
    return ((where, {"prompt": line.strip()}) for where, line in lines)


def _holds_objects(text: str, lines: list[tuple[str, str]]) -> bool:
    """Whether the first line is an object of JSON, or the whole text one or an array of them."""
    for part in (lines[0][1], text):
        if part.lstrip().startswith(("{", "[")):
            try:
                value = json.loads(part)
            except (ValueError, RecursionError):
                continue
            objects = value if isinstance(value, list) and part is text else [value]
            if objects and all(isinstance(item, dict) and item for item in objects):
                return True
    return False


def _json_rows(path: Path, text: str, lines: list[tuple[str, str]]) -> Iterator[Row]:
    """Rows of the lines, or of the one array or object that fills the file."""
    whole = text.lstrip().startswith("[") or _is_json(text)
    if len(lines) > 1 and (_is_json(lines[0][1]) or not whole):
        items = [(where, parse_json(line, where)) for where, line in lines]
    else:
        where = lines[0][0] if len(lines) == 1 else str(path)
        found = parse_json(text, where)
        items = [(where, found)]
        if isinstance(found, list):
            items = [(f"{path}, row {number}", item) for number, item in enumerate(found, 1)]
    for where, item in items:
        check_text(item, where)
        record = {"prompt": item} if isinstance(item, str) else item
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: expected an object with a text 'prompt', got {item!r}")
        yield where, record


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _table_rows(path: Path, text: str, delimiter: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if not cells:
                continue
            if not header:
                header = [name.strip() for name in cells]
                _check_header(header, where)
            elif len(cells) != len(header):
                found = f"{len(cells)} cells, but the header has {len(header)}"
                raise ConfigError(f"{where}: {found}; quote a cell that holds {delimiter!r}")
            else:
                yield where, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: not a table: {error}") from None


def _check_header(names: list[str], where: str) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{where}: the column {twice[0]!r} stands there twice; rename one")
    if "prompt" not in names:
        found = ", ".join(map(repr, names))
        raise ConfigError(f"{where}: no column 'prompt'; rename the one that holds it (found: {found})")


def _parquet_rows(path: Path) -> Iterator[Row]:
    pa, before = pyarrow(), 0
    with reading(str(path)):
        table = pa.parquet.ParquetFile(path)
    _check_header(table.schema_arrow.names, str(path))
    for group in range(table.num_row_groups):
        with reading(str(path)):
            records = table.read_row_group(group, use_threads=False).to_pylist()
        yield from ((f"{path}:{before + number}", record) for number, record in enumerate(records, 1))
        before += len(records)


def _check_subsets(record: dict[str, Any], where: str) -> None:
    """Refuses what `flowrl.report.summary.subsets` could not put into a table."""
    category = record.get("category")
    if not isinstance(category, str | bool | int | float | None):
        raise ConfigError(f"{where}: 'category' is {category!r}; expected text, a number or a truth value")
    try:
        is_flagged(record.get("held_out"))
    except ValueError as error:
        raise ConfigError(f"{where}: 'held_out': {error}; write true or false, or rename the column") from None


@cache
def _tell(message: str) -> None:
    """Warns once, however often a file is read."""
    logging.getLogger("flowrl").warning(message)
