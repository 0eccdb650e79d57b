"""Prompt files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError


@dataclass(frozen=True)
class PromptSet:
    """Prompts, and the other columns of their file, each a list of the same length."""

    prompts: list[str]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: list[int]) -> PromptSet:
        """The rows `index`, in that order."""
        return PromptSet(
            [self.prompts[i] for i in index], {k: [values[i] for i in index] for k, values in self.columns.items()}
        )


def read_prompts(path: Path) -> PromptSet:
    """Reads a .txt file (one prompt a line) or a .jsonl file (objects with `prompt` and any other keys).

    Raises:
        ConfigError: nothing in it, or a line is malformed; names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: no prompts in it")
    if path.suffix != ".jsonl":
        return PromptSet([line.strip() for _, line in lines], {})
    records = []
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
            raise ConfigError(f"{path}:{number}: expected an object with a text 'prompt'")
        records.append(record)
    names = sorted({name for record in records for name in record} - {"prompt"})
    columns = {name: [record.get(name) for record in records] for name in names}
    return PromptSet([record["prompt"] for record in records], columns)
