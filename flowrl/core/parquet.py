"""Parquet files, by pyarrow, which flowrl does not install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.errors import ConfigError


def pyarrow() -> Any:
    """pyarrow with its parquet module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("reading parquet files needs pyarrow: pip install 'flowrl-align[parquet]'") from None
    return pyarrow


@contextmanager
def reading(where: str) -> Iterator[None]:
    """pyarrow's errors as ConfigError."""
    try:
        yield
    except (OSError, ValueError, pyarrow().ArrowException) as error:
        raise ConfigError(f"{where}: not a parquet file that can be read: {error}") from error
