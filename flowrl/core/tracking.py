"""Writes what a run measures: JSON lines always, TensorBoard on demand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics file, an unfinished last line left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class MetricsFile:
    """Append-only JSON lines with one record for each (iteration, kind of record).

    `metrics.jsonl` holds only what follows from config and seed; clock readings go to a second file, so that two
    runs can be compared byte for byte.
    """

    def __init__(self, path: Path, *, records: Sequence[Mapping[str, Any]] | None = None):
        """Opens the file; `records` replace what it holds, for a run that goes on from an earlier point."""
        self.path = path
        if records is not None:
            partial = path.with_suffix(".partial")
            partial.write_text("".join(map(_line, records)), encoding="utf-8", newline="\n")
            partial.replace(path)

    def write(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Appends one record; numbers that are not finite become null."""
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_line({"iteration": iteration, **metrics}))


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with null for numbers that JSON does not know."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"


class TensorBoard:
    """The same numbers as TensorBoard scalars (extra `tensorboard`)."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, iteration: int, metrics: Mapping[str, Any]) -> None:
        """Adds every number of the record at this iteration."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, iteration)
        self._writer.flush()
