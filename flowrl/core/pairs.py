"""Preference data: a prompt with the better and the worse of two images; and SFT data, a prompt with one image.

Reading checks the text of every row and that its image files exist; images are opened one at a time, when asked for.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, overload

from PIL import Image, ImageOps

from flowrl.core.prompts import PromptSet, import_pyarrow, reading_parquet
from flowrl.errors import ConfigError

PICK_A_PIC = ("caption", "jpg_0", "jpg_1", "label_0", "label_1", "has_label")
_OWN = ("prompt", "image", "image_w", "image_l", "reward_w", "reward_l")


@dataclass(frozen=True, slots=True)
class Cell:
    """An image that stays in its parquet file: the `row`-th of `column` in the row group `group`."""

    file: Path
    group: int
    row: int
    column: str


ImageSource: TypeAlias = Path | bytes | Image.Image | Cell


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its images; `loser` is None in SFT data. `where` is file:row, for messages."""

    prompt: str
    winner: ImageSource
    loser: ImageSource | None = None
    reward_w: float | None = None
    reward_l: float | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = "pair"

    def open(self) -> tuple[Image.Image, Image.Image | None]:
        """Winner and loser, decoded to RGB.

        Raises:
            ConfigError: an image cannot be read; names file and row.
        """
        return open_image(self.winner, self.where), None if self.loser is None else open_image(self.loser, self.where)


@dataclass(frozen=True)
class PairSet(Sequence[Pair]):
    """The rows of a data set: all with a loser, or none. `dropped` counts the rows left out, by reason."""

    rows: list[Pair]
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> PairSet: ...
    def __getitem__(self, index: int | slice) -> Pair | PairSet:
        return PairSet(self.rows[index], self.dropped) if isinstance(index, slice) else self.rows[index]

    @property
    def has_losers(self) -> bool:
        """False for SFT data."""
        return any(pair.loser is not None for pair in self.rows[:1])

    def prompt_set(self) -> PromptSet:
        """Prompts and columns, row for row; a column that a row lacks is None there."""
        names = sorted({name for pair in self.rows for name in pair.columns})
        columns = {name: [pair.columns.get(name) for pair in self.rows] for name in names}
        return PromptSet([pair.prompt for pair in self.rows], columns)


def open_image(source: ImageSource, where: str = "image") -> Image.Image:
    """Decodes an image to RGB, turned the way its EXIF orientation says.

    Raises:
        ConfigError: it cannot be read; starts with `where`.
    """
    if isinstance(source, Cell):
        source = _from_parquet(source, where)
    name = str(source) if isinstance(source, Path) else "the image"
    try:
        if isinstance(source, Image.Image):
            return source.convert("RGB")
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{where}: cannot read {name}: {error}; replace it or remove the row") from error


def read_pairs(path: str | Path) -> PairSet:
    """Reads a .jsonl file, a .parquet file, a folder of either, or a pattern such as data/train-*.parquet.

    Rows hold prompt, image_w, image_l and perhaps reward_w, reward_l; or prompt, image (SFT); or, in parquet, the
    columns of Pick-a-Pic v2, of which ties and unlabelled rows are dropped and all but caption and images left alone.
    Images are paths relative to the file or, in parquet, bytes or {bytes, path}. Any other column is kept, but for
    parquet columns that hold bytes.

    Raises:
        ConfigError: a file, column or value is missing or malformed; names file and row, counted from 1.
    """
    dropped: Counter[str] = Counter()
    rows: list[Pair] = []
    for file in _files(Path(path)):
        for pair in _jsonl_pairs(file) if file.suffix == ".jsonl" else _parquet_pairs(file, dropped):
            if rows:
                _require_same_kind(rows[0], pair)
            rows.append(pair)
    if not rows:
        why = "; ".join(f"{count} dropped: {reason}" for reason, count in dropped.items())
        raise ConfigError(f"{path}: no pairs in it" + (f" ({why})" if why else ""))
    return PairSet(rows, dict(dropped))


def check_pairs(path: str | Path) -> dict[str, int]:
    """Opens every image of a data set once; counts pairs, distinct prompts and dropped rows.

    Raises:
        ConfigError: what `read_pairs` or `Pair.open` raise.
    """
    pairs = read_pairs(path)
    for pair in pairs:
        pair.open()
    return {"pairs": len(pairs), "prompts": len({pair.prompt for pair in pairs}), **pairs.dropped}


def write_pairs(folder: str | Path, pairs: Iterable[Pair]) -> int:
    """Writes images/*.png and, last and at once, pairs.jsonl, which `read_pairs` reads; returns the number of rows.

    Raises:
        ConfigError: `folder` is not an empty or a new one, there are no pairs, or one cannot be read or written.
    """
    folder = check_new(folder)
    first = next(iterator := iter(pairs), None)
    if first is None:
        raise ConfigError(f"{folder}: no pairs to write")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    partial, count = folder / "pairs.partial", 0
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        for count, pair in enumerate(chain([first], iterator), 1):
            _require_same_kind(first, pair)
            stream.write(_written(pair, folder, count - 1) + "\n")
    partial.replace(folder / "pairs.jsonl")
    return count


def check_new(folder: str | Path) -> Path:
    """The folder, if it is new or empty.

    Raises:
        ConfigError: it is not.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: exists and is not an empty folder; name a new one or delete it")
    return folder


def best_and_worst(rewards: Sequence[float], groups: Sequence[int], *, margin: float = 0.0) -> list[tuple[int, int]]:
    """Indices of the best and the worst sample of each group, the first of equal ones; NaN rewards are ignored.

    Groups come in the order in which they first appear; those whose two rewards differ by no more than `margin` are
    left out.

    Raises:
        ValueError: lengths differ, or `margin` is negative.
    """
    if margin < 0:
        raise ValueError(f"margin must not be negative, got {margin}")
    values = [float(reward) for reward in rewards]
    members: dict[int, list[int]] = {}
    for i, (value, group) in enumerate(zip(values, groups, strict=True)):
        scored = members.setdefault(int(group), [])
        if not math.isnan(value):
            scored.append(i)
    ends = [(max(m, key=values.__getitem__), min(m, key=values.__getitem__)) for m in members.values() if m]
    return [(best, worst) for best, worst in ends if values[best] - values[worst] > margin]


def _written(pair: Pair, folder: Path, number: int) -> str:
    """Saves the images of a pair; returns its line."""
    taken = sorted(set(pair.columns) & set(_OWN))
    if taken:
        raise ConfigError(f"{pair.where}: rename the columns {', '.join(taken)}: pairs.jsonl has its own")
    row: dict[str, Any] = {"prompt": pair.prompt}
    names = ("image",) if pair.loser is None else ("image_w", "image_l")
    for name, image in zip(names, pair.open(), strict=False):
        assert image is not None
        row[name] = f"images/{number:06d}{name.removeprefix('image')}.png"
        image.save(folder / row[name])
    for name in ("reward_w", "reward_l"):
        value = _reward(getattr(pair, name), name, pair.where)
        row |= {} if value is None else {name: value}
    try:
        return json.dumps(row | pair.columns, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{pair.where}: a column cannot be written as JSON: {error}") from None


def _files(path: Path) -> list[Path]:
    """The files of a data set, in the order of their names."""
    if path.is_dir():
        for name in ("pairs.jsonl", "metadata.jsonl"):
            if (path / name).is_file():
                return [path / name]
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise ConfigError(f"{path}: neither pairs.jsonl, metadata.jsonl nor *.parquet in it")
        shards = [re.match(r"(.+)-\d+-of-\d+", file.stem) for file in files]
        splits = sorted({match[1] for match in shards if match})
        if len(splits) > 1:
            raise ConfigError(f"{path}: holds the splits {', '.join(splits)}; choose one: {path}/{splits[0]}-*.parquet")
        return files
    files = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{path}: no such file or folder")
    for file in files:
        if file.suffix not in (".jsonl", ".parquet"):
            raise ConfigError(f"{file}: pairs are read from .jsonl or .parquet files, or a folder of them")
    return files


def _jsonl_pairs(file: Path) -> Iterator[Pair]:
    with file.open(encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{where}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ConfigError(f"{where}: expected an object with 'prompt', 'image_w' and 'image_l'")
                _require_columns(row, where)
                yield _pair(row, where, file.parent)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not UTF-8 text: {error}") from None


def _parquet_pairs(file: Path, dropped: Counter[str]) -> Iterator[Pair]:
    """Reads the text of one row group after the other; columns of bytes stay in the file."""
    pa = import_pyarrow()
    with reading_parquet(str(file)):
        table = pa.parquet.ParquetFile(file, memory_map=True)
    types = {column.name: column.type for column in table.schema_arrow}
    picks = "jpg_0" in types
    if picks and (missing := [name for name in PICK_A_PIC if name not in types]):
        raise ConfigError(f"{file}: has the column jpg_0 of Pick-a-Pic but no {', '.join(missing)}")
    if not picks:
        _require_columns(types, str(file))
    held = {name for name, kind in types.items() if _holds_bytes(pa, kind)} - {"prompt", "caption"}
    images = [name for name in ("jpg_0", "jpg_1", "image", "image_w", "image_l") if name in held]
    read = [name for name in (PICK_A_PIC if picks else types) if name not in held]
    number = 0
    for group in range(table.num_row_groups):
        with reading_parquet(str(file)):
            rows = table.read_row_group(group, columns=read, use_threads=False).to_pylist()
        for i, row in enumerate(rows):
            number += 1
            row |= {name: Cell(file, group, i, name) for name in images}
            if picks:
                row = _pick(row, f"{file}:{number}", dropped)
            if row:
                yield _pair(row, f"{file}:{number}", file.parent)


def _pick(row: dict[str, Any], where: str, dropped: Counter[str]) -> dict[str, Any]:
    """A labelled row of Pick-a-Pic as prompt, image_w, image_l; else an empty one."""
    labels = row["label_0"], row["label_1"]
    if not row["has_label"]:
        dropped["unlabelled"] += 1
    elif labels == (0.5, 0.5):
        dropped["ties"] += 1
    elif labels in ((1, 0), (0, 1)):
        winner, loser = ("jpg_0", "jpg_1") if labels == (1, 0) else ("jpg_1", "jpg_0")
        return {"prompt": row["caption"], "image_w": row[winner], "image_l": row[loser]}
    else:
        raise ConfigError(f"{where}: label_0, label_1 are {labels}, not 1, 0 or 0, 1 or 0.5, 0.5")
    return {}


def _require_columns(names: Iterable[str], where: str) -> None:
    """Refuses anything but prompt, image_w, image_l or prompt, image."""
    found = set(names)
    if "prompt" not in found:
        raise ConfigError(f"{where}: no 'prompt'; rename the column that holds it (found: {', '.join(sorted(found))})")
    images = found & {"image", "image_w", "image_l"}
    if images not in ({"image"}, {"image_w", "image_l"}):
        had = " and ".join(sorted(images)) or ", ".join(sorted(found))
        raise ConfigError(f"{where}: needs 'image_w' and 'image_l', or 'image' alone for SFT data; has {had}")


def _pair(row: dict[str, Any], where: str, folder: Path) -> Pair:
    """Builds the pair of a row that has the columns of one layout."""
    if not isinstance(row["prompt"], str):
        raise ConfigError(f"{where}: 'prompt' is not text but {row['prompt']!r}")
    first = "image_w" if "image_w" in row else "image"
    winner = _source(row[first], first, where, folder)
    loser = _source(row["image_l"], "image_l", where, folder) if first == "image_w" else None
    if winner == loser:
        raise ConfigError(f"{where}: image_w and image_l are the same file {row[first]}; remove the row")
    reward_w, reward_l = (_reward(row.get(name), name, where) for name in ("reward_w", "reward_l"))
    columns = {name: value for name, value in row.items() if name not in _OWN}
    return Pair(row["prompt"], winner, loser, reward_w, reward_l, columns, where)


def _source(value: Any, name: str, where: str, folder: Path) -> Path | Cell:
    if isinstance(value, Cell):
        return value
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: '{name}' is {value!r}, expected the path of an image, relative to {folder}")
    if not (folder / value).is_file():
        raise ConfigError(f"{where}: {name}: no file {folder / value}; paths are relative to {folder}")
    return folder / value


def _reward(value: Any, name: str, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: '{name}' is {value!r}, expected a finite number; leave it out where unknown")
    return float(value)


def _require_same_kind(first: Pair, pair: Pair) -> None:
    if (first.loser is None) != (pair.loser is None):
        raise ConfigError(
            f"{pair.where}: a pair and an SFT row in one set ({first.where} is the other kind); keep them in two"
        )


def _holds_bytes(pa: Any, kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_bytes(pa, kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _from_parquet(cell: Cell, where: str) -> Path | bytes:
    """The bytes of a cell, or the file that it names."""
    with reading_parquet(where):
        value = _column(cell.file, cell.group, cell.column)[cell.row].as_py()
    content, name = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if content:
        return bytes(content)
    if not name:
        raise ConfigError(f"{where}: no image in '{cell.column}'; remove the row")
    return cell.file.parent / str(name)


@lru_cache(maxsize=2)
def _column(file: Path, group: int, column: str) -> Any:
    """A column of a row group, kept because its neighbours and the other image are likely to be next."""
    table = import_pyarrow().parquet.ParquetFile(file, memory_map=True)
    return table.read_row_group(group, columns=[column], use_threads=False).column(0)
