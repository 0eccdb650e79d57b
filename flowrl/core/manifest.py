"""Which checkpoints of a run are whole, and what they were made of. Imports no torch.

A checkpoint is a folder `<iteration>` with a `manifest.json`, written last: size and hash of every other file, and
`made_of`, the config and the fingerprints of what the run has read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


def write_manifest(folder: Path, made_of: Mapping[str, Any]) -> None:
    """Completes the checkpoint `folder`."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({"files": files, "made_of": made_of}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8", newline="\n")


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, oldest first, those that are not whole left out."""
    return [path for path in _numbered(folder) if flaw(path) is None]


def broken_checkpoints(folder: Path) -> dict[Path, str]:
    """What is wrong with those that are not whole, oldest first."""
    return {path: what for path in _numbered(folder) if (what := flaw(path)) is not None}


def _numbered(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())


def flaw(checkpoint: Path, *, contents: bool = False) -> str | None:
    """Why a checkpoint is not whole: a file is missing or has another size, or with `contents` another hash."""
    manifest = _read(checkpoint)
    if manifest is None:
        return f"no readable {MANIFEST} in it"
    for name, wanted in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != wanted["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {wanted['bytes']}"
        if contents and file_hash(path) != wanted["sha256"]:
            return f"{name} has other contents than were written"
    return None


def made_of(checkpoint: Path) -> dict[str, Any]:
    """The config and the fingerprints that a whole checkpoint was made of."""
    manifest = _read(checkpoint)
    return manifest["made_of"] if manifest else {}


def _read(checkpoint: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    try:
        known = all(set(wanted) == {"bytes", "sha256"} for wanted in manifest["files"].values())
        return manifest if known and isinstance(manifest["made_of"], dict) else None
    except (AttributeError, KeyError, TypeError):
        return None
