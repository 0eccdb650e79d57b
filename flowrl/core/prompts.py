"""Prompt files."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from flowrl.errors import ConfigError

logger = logging.getLogger("flowrl")

RESERVED = ("prompts", "completions", "opponents", "self")
"""What a reward is called with besides the columns."""

Row: TypeAlias = tuple[int, Any]
"""A row of a file before it is checked, and the line it starts in (in parquet: its number), counted from 1."""

_TRUTHS = dict.fromkeys(("true", "yes", "1", "1.0"), True)
_TRUTHS |= dict.fromkeys(("false", "no", "0", "0.0", "", "none"), False)
_BLANKS = re.compile(r"[ \t\r\n]*")
_EMPTY_ARRAY = re.compile(r"\s*\[\s*\]\s*")


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and the other columns of their file, each a list of the same length.

    `num_skipped` counts the blank prompts of the file, which are left out; sets with the same rows are equal.
    """

    prompts: list[str]
    columns: dict[str, list[Any]]
    num_skipped: int = field(default=0, compare=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: list[int]) -> PromptSet:
        """The rows `index`, in that order."""
        return PromptSet(
            [self.prompts[i] for i in index], {k: [values[i] for i in index] for k, values in self.columns.items()}
        )


def read_prompts(path: Path) -> PromptSet:
    r"""Reads prompts and their columns; the suffix, in any case, says how.

    - .txt: one prompt a line, without the blanks around it. Lines end with `\n` or `\r\n`.
    - .jsonl, .ndjson, .json: an object with `prompt` and any other keys a line, or one array of objects or texts.
    - .csv, .tsv: a header, in it `prompt`; all values are text.
    - .parquet: a column `prompt`; values are what pyarrow's `to_pylist` makes of them.

    Where the content says otherwise, it is believed: any of these may be parquet, and a .txt whose first line or whole
    is a JSON object or array is read as JSON. A byte-order mark is ignored. A key that an object lacks is None there.
    Blank prompts and blank lines, but for empty lines at the end, are skipped and counted; a warning tells.

    Raises:
        ConfigError: the file cannot be read, is of another kind or has no prompts; or a row has no text as `prompt`,
            repeats a column, has more or fewer than the header, one without a name or named as in `RESERVED`, or holds
            NaN, Infinity or half a surrogate pair. Names file and line, in parquet file and row.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{path}: prompts are read from {', '.join(_READERS)}; save it as one of them")
    try:
        raw, changed = path.read_bytes(), path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    records, num_skipped = [], 0
    for number, record in (_parquet if raw[:4] == raw[-4:] == b"PAR1" else read)(raw, path):
        _check(record, f"{path}:{number}")
        if record["prompt"].strip():
            records.append(record)
        else:
            num_skipped += 1
    if not records:
        raise ConfigError(f"{path}: no prompts in it")
    if num_skipped:
        _tell(path, num_skipped, changed)
    names = sorted({name for record in records for name in record} - {"prompt"})
    columns = {name: [record.get(name) for record in records] for name in names}
    return PromptSet([record["prompt"] for record in records], columns, num_skipped)


def check_categories(prompts: PromptSet, path: Path) -> None:
    """Checks the columns that a summary is made by: `category`, a text or number, and `held_out`, a truth.

    Raises:
        ConfigError: one of them is neither that nor missing; names file and row, which blank prompts do not count for.
    """
    for row, value in enumerate(prompts.columns.get("category", []), 1):
        if isinstance(value, list | dict | bytes):
            raise ConfigError(f"{path}: row {row}: 'category' is {_short(value)}; make it a text, or rename the column")
    for row, value in enumerate(prompts.columns.get("held_out", []), 1):
        if truth(value) is None:
            raise ConfigError(f"{path}: row {row}: 'held_out' is {_short(value)}; make it true or false")


def truth(value: Any) -> bool | None:
    """A boolean, number or text as True (true, yes, 1) or False (false, no, 0, nothing), in any case; else None."""
    return _TRUTHS.get(str(value).strip().lower())


def import_pyarrow() -> Any:
    """pyarrow with its parquet module; flowrl does not install it.

    Raises:
        ConfigError: it is missing; says how to install it.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("reading parquet files needs pyarrow: pip install 'flowrl-align[parquet]'") from None
    return pyarrow


@contextmanager
def reading_parquet(where: str) -> Iterator[None]:
    """pyarrow's errors as ConfigError."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError) as error:
        raise ConfigError(f"{where}: not a parquet file that can be read: {error}") from error


def _text(raw: bytes, path: Path) -> Iterator[Row]:
    text = _decoded(raw, path)
    if _is_json(text) or _is_json(text.lstrip().partition("\n")[0]):
        yield from _json(raw, path)
    else:
        yield from ((number, {"prompt": line.strip()}) for number, line in enumerate(text.split("\n"), 1))


def _json(raw: bytes, path: Path) -> Iterator[Row]:
    text = _decoded(raw, path)
    if text.lstrip().startswith("["):
        yield from _array(text, path)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            yield number, {"prompt": ""}
            continue
        with _reading_json(f"{path}:{number}"):
            record = _JSON.decode(line)
        yield number, record


def _array(text: str, path: Path) -> Iterator[Row]:
    """The elements of an array, one by one because the decoder does not tell their lines; a text is made an object."""
    if _EMPTY_ARRAY.fullmatch(text):
        return
    at, seen, line, mark = text.index("[") + 1, 0, 1, ","
    while mark == ",":
        start = _end_of_blanks(text, at)
        line, seen = line + text.count("\n", seen, start), start
        with _reading_json(f"{path}:{line}"):
            value, at = _JSON.raw_decode(text, start)
        yield line, {"prompt": value} if isinstance(value, str) else value
        at = _end_of_blanks(text, at) + 1
        mark = text[at - 1 : at]
    if mark != "]" or text[at:].strip():
        raise ConfigError(f"{path}:{line}: not JSON: expected ',' or ']' after this, and nothing after the array")


def _separated(raw: bytes, path: Path, *, delimiter: str) -> Iterator[Row]:
    rows = csv.reader(io.StringIO(_decoded(raw, path), newline=""), delimiter=delimiter, strict=True)
    line = 1
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_header(header, f"{path}:1")
        line = rows.line_num + 1
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                yield line, {"prompt": ""}
            elif len(cells) != len(header):
                raise ConfigError(
                    f"{path}:{line}: {len(cells)} values for {len(header)} columns; quote values with a separator"
                )
            else:
                yield line, dict(zip(header, cells, strict=True))
            line = rows.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{path}:{line}: not what the suffix says: {error}") from None


def _parquet(raw: bytes, path: Path) -> Iterator[Row]:
    pyarrow = import_pyarrow()
    with reading_parquet(str(path)):
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(raw)).read(use_threads=False)
    _check_header(table.column_names, str(path))
    with reading_parquet(str(path)):
        rows = table.to_pylist()
    yield from enumerate(rows, 1)


_READERS: dict[str, Callable[[bytes, Path], Iterator[Row]]] = {
    ".txt": _text,
    ".jsonl": _json,
    ".ndjson": _json,
    ".json": _json,
    ".csv": partial(_separated, delimiter=","),
    ".tsv": partial(_separated, delimiter="\t"),
    ".parquet": _parquet,
}


def _decoded(raw: bytes, path: Path) -> str:
    """The text, without a byte-order mark and without empty lines at its end."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}; save it as UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{path}: not text: holds NUL bytes; save it as UTF-8 text")
    return text.rstrip("\r\n")


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


@contextmanager
def _reading_json(where: str) -> Iterator[None]:
    """The decoder's errors as ConfigError."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}; expected an object a line, or one array") from None


def _object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    _once(name for name, _ in items)
    return dict(items)


def _once(names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} occurs twice")


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _end_of_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _check_header(names: Sequence[str], where: str) -> None:
    try:
        _once(names)
    except ValueError as error:
        raise ConfigError(f"{where}: the column {error}; rename or remove one") from None
    if "prompt" not in names:
        raise ConfigError(f"{where}: no column 'prompt'; rename the one that holds it (found: {_short(list(names))})")


def _check(record: Any, where: str) -> None:
    """Refuses a row that is no object, or has a prompt, name or value that cannot be used."""
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f"{where}: expected an object with a text 'prompt', got {_short(record)}")
    for name in record:
        if not name.strip() or name in RESERVED:
            raise ConfigError(f"{where}: a column cannot be named {name!r}; rename or remove it")
    values = [record]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: holds {value}, no finite number; leave it out or write null")
        elif isinstance(value, str) and not _encodable(value):
            raise ConfigError(f"{where}: {_short(value)} holds half a surrogate pair, which is no text; remove it")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    return reprlib.repr(value)


@lru_cache
def _tell(path: Path, num_skipped: int, changed: int) -> None:
    """Warns once, however often an unchanged file is read."""
    logger.warning("%s: %d blank prompt(s) skipped", path, num_skipped)
