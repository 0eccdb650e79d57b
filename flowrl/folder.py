"""The folder of a run: whether it can be used, who uses it, and what in it is worth keeping. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from .core.manifest import list_checkpoints
from .errors import ConfigError

_LOCK, _OWNER = ".lock", ".owner.json"
_BEGINNINGS = (
    "config.yaml",
    "changes.jsonl",
    "metrics.jsonl",
    "timing.jsonl",
    "before.pt",
    "curves.png",
    "samples",
    "tensorboard",
    "checkpoints",
)
"""What a run writes before it has anything to go on from."""


def check_unused(folder: Path) -> None:
    """Whether no other process owns a folder; told before anything is loaded.

    Raises:
        ConfigError: one does; says which. Or it can be no folder.
    """
    if any(len(os.fsencode(part)) > 255 for part in folder.parts):
        raise ConfigError(f"output_dir={str(folder)!r}: no file name can be that long")
    if (folder / _LOCK).is_file():
        _acquire(folder).release()


def check_new(folder: Path) -> None:
    """Whether a new run can have this folder; creates nothing.

    Raises:
        ConfigError: something worth keeping is in it, or it cannot be written.
    """
    if folder.exists() and not is_free(folder):
        holds_run = folder.is_dir() and bool(list_checkpoints(folder / "checkpoints"))
        go_on = f", or continue it with `flowrl train --resume {folder}`" if holds_run else ""
        raise ConfigError(f"output_dir={str(folder)!r} exists already: choose another or delete it{go_on}")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"output_dir={str(folder)!r}: cannot write in {str(parent)!r}")


def is_free(folder: Path) -> bool:
    """Whether a folder is empty, or holds only the beginnings of a run that cannot be resumed."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names:
        return True
    beginnings = all(name in (*_BEGINNINGS, _LOCK, _OWNER) or name.endswith(".partial") for name in names)
    return _OWNER in names and beginnings and not list_checkpoints(folder / "checkpoints")


def clear(folder: Path) -> None:
    """Deletes the beginnings of a run in a folder that `is_free`."""
    for name in _BEGINNINGS:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    clear_partial(folder)


def clear_partial(folder: Path) -> None:
    """Deletes files that a killed process was about to write."""
    for path in folder.glob("*.partial"):
        path.unlink()


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Within it this process owns the folder, which is made if need be. The lock ends with the process.

    Raises:
        ConfigError: another process owns it; says which.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    lock = _acquire(folder)
    try:
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        (folder / _OWNER).write_text(json.dumps(owner), encoding="utf-8", newline="\n")
        yield
    finally:
        lock.release()
        left = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if is_new and left <= {_LOCK, _OWNER}:
            shutil.rmtree(folder, ignore_errors=True)


def _acquire(folder: Path) -> BaseFileLock:
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"{str(folder)!r} is in use by {_owner(folder)}; wait for it, or choose another") from None
    return lock


def _owner(folder: Path) -> str:
    try:
        owner = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "another process"
